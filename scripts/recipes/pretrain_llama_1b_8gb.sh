#!/usr/bin/env bash
# LLaMA 1B from scratch on one GPU of 8 GB: bfloat16 weights, active rows in bfloat16, moments of 8 bits.
#
#     scripts/recipes/pretrain_llama_1b_8gb.sh [--smoke] [--resume] [--out DIRECTORY] [other flags of scripts/pretrain.py]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
pretrain_grass --out runs/llama_1b_8gb --model 1b --lr 5e-4 --rank 512 --explore 512 --batch-size 4 --accumulate 64 "$@"
