#!/usr/bin/env bash
# LLaMA 7B from scratch by AdamW at full rank on one GPU of 32 GB: bfloat16 weights, float32 masters and moments in host memory.
#
# Planned: 27.9 GB on the device, 107.8 GB on the host.
#
#     scripts/recipes/pretrain_llama_7b_32gb_offload_adamw.sh [--smoke] [--resume] [--out DIRECTORY] [other flags of scripts/pretrain.py]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
pretrain --out runs/llama_7b_32gb_offload_adamw --model 7b --optimizer adamw --offload --offload-masters --batch-size 2 --accumulate 128 "$@"
