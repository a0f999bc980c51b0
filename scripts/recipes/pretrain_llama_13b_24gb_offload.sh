#!/usr/bin/env bash
# LLaMA 13B from scratch on one GPU of 24 GB: int8 weights, active rows in bfloat16, float32 moments in host memory.
# The rank is higher than in pretrain_llama_13b_24gb.sh.
#
# Planned: 23.5 GB on the device, 29.5 GB on the host.
#
#     scripts/recipes/pretrain_llama_13b_24gb_offload.sh [--smoke] [--resume] [--out DIRECTORY] [other flags of scripts/pretrain.py]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
pretrain_offloaded --out runs/llama_13b_24gb_offload --model 13b --rank 512 --explore 128 --weights int8 --batch-size 1 --accumulate 256 "$@"
