#!/usr/bin/env bash
# LLaMA 70B from scratch on one GPU of 24 GB: int8 weights in host memory, layers visit the device, float32 active rows.
#
# Planned: 14.8 GB on the device, 176.7 GB on the host.
#
#     scripts/recipes/pretrain_llama_70b_24gb.sh [--smoke] [--resume] [--out DIRECTORY] [other flags of scripts/pretrain.py]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
pretrain_grass --out runs/llama_70b_24gb --model 70b --rank 512 --weights int8 --offload --stream --host-activations --batch-size 8 --accumulate 32 "$@"
