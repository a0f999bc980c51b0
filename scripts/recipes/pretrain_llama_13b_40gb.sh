#!/usr/bin/env bash
# LLaMA 13B from scratch on one GPU of 40 GB: bfloat16 weights, active rows in bfloat16, moments of 8 bits.
#
#     scripts/recipes/pretrain_llama_13b_40gb.sh [--smoke] [--resume] [--out DIRECTORY] [other flags of scripts/pretrain.py]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
pretrain_grass --out runs/llama_13b_40gb --model 13b --rank 640 --explore 160 --batch-size 1 --accumulate 256 "$@"
