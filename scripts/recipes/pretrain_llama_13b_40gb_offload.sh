#!/usr/bin/env bash
# LLaMA 13B from scratch on one GPU of 40 GB: bfloat16 weights, active rows in bfloat16, float32 moments in host memory.
# The rank is higher than in pretrain_llama_13b_40gb.sh.
#
# Planned: 39.7 GB on the device, 49.3 GB on the host.
#
#     scripts/recipes/pretrain_llama_13b_40gb_offload.sh [--smoke] [--resume] [--out DIRECTORY] [other flags of scripts/pretrain.py]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
pretrain_offloaded --out runs/llama_13b_40gb_offload --model 13b --rank 768 --explore 192 --batch-size 1 --accumulate 256 "$@"
