#!/usr/bin/env bash
# Instruction tuning of a 7B model on one GPU of 8 GB: bf16 weights in host memory, layers visit the device.
#
# Planned: 2.9 GB on the device, 25.1 GB on the host.
#
#     scripts/recipes/finetune_7b_8gb.sh [--smoke] [--out DIRECTORY] [other flags of scripts/finetune.py]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
flags=() data=(--model mistralai/Mistral-7B-v0.3 --dataset tatsu-lab/alpaca) last=()
for flag in "$@"; do
    if [[ $flag == --smoke ]]; then
        data=(--model tiny) last=(--rank 16 --max-length 64 --max-steps 4 --logging-steps 1)
    else
        flags+=("$flag")
    fi
done
exec "${PYTHON:-python}" scripts/finetune.py instruct --out runs/finetune_7b_8gb "${data[@]}" \
    --packed --max-length 1024 --per-device-train-batch-size 2 --gradient-accumulation-steps 8 --num-train-epochs 1 \
    --dtype bfloat16 --method grass --rank 256 --active-dtype float32 --offload --stream --lr 5e-5 \
    ${flags[@]+"${flags[@]}"} ${last[@]+"${last[@]}"}
