#!/usr/bin/env bash
# LLaMA 13B from scratch on one GPU of 40 GB: bfloat16 weights, float32 active rows and moments.
#
#     scripts/recipes/pretrain_llama_13b_40gb.sh [--smoke] [--resume] [--out DIRECTORY] [other flags of scripts/pretrain.py]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
pretrain_grass --out runs/llama_13b_40gb --model 13b --rank 192 --batch-size 1 --accumulate 256 "$@"
