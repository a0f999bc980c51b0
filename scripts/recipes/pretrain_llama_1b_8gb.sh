#!/usr/bin/env bash
# LLaMA 1B from scratch on one GPU of 8 GB: bfloat16 weights, float32 active rows and moments.
#
#     scripts/recipes/pretrain_llama_1b_8gb.sh [--smoke] [--resume] [--out DIRECTORY] [other flags of scripts/pretrain.py]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
pretrain_grass --out runs/llama_1b_8gb --model 1b --rank 256 --batch-size 4 --accumulate 64 "$@"
