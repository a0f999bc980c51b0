#!/usr/bin/env bash
# LLaMA 30B from scratch on one GPU of 24 GB: bf16 weights in host memory, layers visit the device, float32 active rows.
#
# Planned: 12.1 GB on the device, 131.7 GB on the host.
#
#     scripts/recipes/pretrain_llama_30b_24gb.sh [--smoke] [--resume] [--out DIRECTORY] [other flags of scripts/pretrain.py]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
pretrain_grass --out runs/llama_30b_24gb --model 30b --rank 512 --offload --stream --host-activations --batch-size 8 --accumulate 32 "$@"
