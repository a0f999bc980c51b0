#!/usr/bin/env bash
# LLaMA 7B from scratch on one GPU of 24 GB: bfloat16 weights, active rows in bfloat16, float32 moments in host memory.
# The rank is higher than in pretrain_llama_7b_24gb.sh.
#
# Planned: 23.6 GB on the device, 30.9 GB on the host.
#
#     scripts/recipes/pretrain_llama_7b_24gb_offload.sh [--smoke] [--resume] [--out DIRECTORY] [other flags of scripts/pretrain.py]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
pretrain_offloaded --out runs/llama_7b_24gb_offload --model 7b --rank 896 --explore 224 --batch-size 2 --accumulate 128 "$@"
