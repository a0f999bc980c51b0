#!/usr/bin/env bash
# A mixture of experts of the shape of Qwen3-30B-A3B from scratch on one GPU of 80 GB: bf16 weights in host memory, most
# layers stay on the device, active rows in bfloat16.
#
# Planned: 64.1 GB on the device, 209.9 GB on the host.
#
#     scripts/recipes/pretrain_qwen3_30b_a3b_80gb.sh [--smoke] [--resume] [--out DIRECTORY] [other flags of scripts/pretrain.py]
smoke_model=9m-mixture
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
pretrain_offloaded --out runs/qwen3_30b_a3b_80gb --model 30b-a3b --rank 512 --explore 128 --stream --cache 50GB --batch-size 8 --accumulate 32 "$@"
