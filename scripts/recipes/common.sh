# Sourced by the recipes: `pretrain FLAGS...` runs scripts/pretrain.py on C4, which is streamed, with what they share.
# `pretrain_grass FLAGS...` does so with Grass in compact mode, `pretrain_offloaded FLAGS...` with float32 moments on the host.
# With --smoke among the flags, the same path on the embedded corpus with a model of four small layers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"

# In long runs the loss goes with the number of columns that have moments (docs/quality.md). So moments have 8 bits, or lie on
# the host, active rows have the weights' precision and are rounded stochastically, and --rank takes what that saves: mostly four
# columns are selected for each that is explored.
# The learning rate is AdamW's at these sizes, that of the LLaMA paper (Touvron et al., 2023, table 2): 3e-4 for 7B and 13B, half of it for
# larger ones; 1B has 5e-4. By scale="auto" projected weights have n / (r + q) times as much. That factor was measured up to a hidden
# size of 4,096, in 270 steps (docs/benchmarks.md); at these sizes nothing has been tuned.
training=(
    --dtype bf16 --checkpointing --chunked-loss 256
    --lr 3e-4 --clip 1.0
    --seq-len 2048 --steps 100000 --warmup 2000 --eval-every 1000 --save-every 1000
)
grass=(--optimizer grass --active-dtype bfloat16 --stochastic-rounding --moment-dtype 8bit)
offloaded=(--optimizer grass --active-dtype bfloat16 --stochastic-rounding --offload)
c4=(--dataset allenai/c4 --subset en --tokenizer t5-base)
smoke=(
    --model "${smoke_model:-1m}" --rank 16 --explore 4 --seq-len 64 --batch-size 2 --accumulate 2 --chunked-loss 48 --update-interval 2
    --steps 4 --warmup 1 --eval-blocks 2 --eval-every 4 --log-every 1 --save-every 4
)

pretrain() {
    local flags=() data=("${c4[@]}") last=()
    for flag in "$@"; do
        if [[ $flag == --smoke ]]; then
            data=() last=("${smoke[@]}")
        else
            flags+=("$flag")
        fi
    done
    exec "${PYTHON:-python}" scripts/pretrain.py "${training[@]}" ${data[@]+"${data[@]}"} "${flags[@]}" ${last[@]+"${last[@]}"}
}

pretrain_grass() {
    pretrain "${grass[@]}" "$@"
}

pretrain_offloaded() {
    pretrain "${offloaded[@]}" "$@"
}
