#!/usr/bin/env bash
# LLaMA 7B from scratch on one GPU of 24 GB: bfloat16 weights, active rows in bfloat16, moments of 8 bits.
#
#     scripts/recipes/pretrain_llama_7b_24gb.sh [--smoke] [--resume] [--out DIRECTORY] [other flags of scripts/pretrain.py]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
pretrain_grass --out runs/llama_7b_24gb --model 7b --rank 640 --explore 160 --batch-size 2 --accumulate 128 "$@"
