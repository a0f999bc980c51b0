#!/usr/bin/env bash
# LLaMA 70B from scratch on one GPU of 24 GB: int8 weights in host memory, layers visit the device, active rows in bfloat16.
#
# Planned: 14.6 GB on the device, 183.6 GB on the host.
#
#     scripts/recipes/pretrain_llama_70b_24gb.sh [--smoke] [--resume] [--out DIRECTORY] [other flags of scripts/pretrain.py]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
pretrain_offloaded --out runs/llama_70b_24gb --model 70b --lr 1.5e-4 --rank 1024 --explore 256 --weights int8 --stream --host-activations --batch-size 8 --accumulate 32 "$@"
