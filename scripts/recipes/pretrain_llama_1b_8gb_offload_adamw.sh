#!/usr/bin/env bash
# LLaMA 1B from scratch by AdamW at full rank on one GPU of 8 GB: bfloat16 weights, float32 masters and moments in host memory.
#
# Planned: 6.3 GB on the device, 21.4 GB on the host.
#
#     scripts/recipes/pretrain_llama_1b_8gb_offload_adamw.sh [--smoke] [--resume] [--out DIRECTORY] [other flags of scripts/pretrain.py]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
pretrain --out runs/llama_1b_8gb_offload_adamw --model 1b --lr 5e-4 --optimizer adamw --offload --offload-masters --batch-size 4 --accumulate 64 "$@"
