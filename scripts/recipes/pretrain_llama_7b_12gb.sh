#!/usr/bin/env bash
# LLaMA 7B from scratch on one GPU of 12 GB: int8 weights, active rows in bfloat16, moments of 8 bits.
#
#     scripts/recipes/pretrain_llama_7b_12gb.sh [--smoke] [--resume] [--out DIRECTORY] [other flags of scripts/pretrain.py]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
pretrain_grass --out runs/llama_7b_12gb --model 7b --rank 288 --explore 72 --weights int8 --batch-size 1 --accumulate 256 "$@"
