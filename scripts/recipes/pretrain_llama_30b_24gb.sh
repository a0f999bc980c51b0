#!/usr/bin/env bash
# LLaMA 30B from scratch on one GPU of 24 GB: bf16 weights in host memory, layers visit the device, active rows in bfloat16.
#
# Planned: 11.8 GB on the device, 125.6 GB on the host.
#
#     scripts/recipes/pretrain_llama_30b_24gb.sh [--smoke] [--resume] [--out DIRECTORY] [other flags of scripts/pretrain.py]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
pretrain_offloaded --out runs/llama_30b_24gb --model 30b --lr 1.5e-4 --rank 832 --explore 208 --stream --host-activations --batch-size 8 --accumulate 32 "$@"
