#!/usr/bin/env bash
# A mixture of experts of the shape of Qwen3-30B-A3B from scratch on one GPU of 80 GB: bf16 weights in host memory, most
# layers stay on the device, float32 active rows.
#
# Planned: 64.8 GB on the device, 198.4 GB on the host.
#
#     scripts/recipes/pretrain_qwen3_30b_a3b_80gb.sh [--smoke] [--resume] [--out DIRECTORY] [other flags of scripts/pretrain.py]
smoke_model=9m-mixture
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
pretrain_grass --out runs/qwen3_30b_a3b_80gb --model 30b-a3b --rank 256 --offload --stream --cache 50GB --batch-size 8 --accumulate 32 "$@"
