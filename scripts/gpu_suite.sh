#!/usr/bin/env bash
# Everything that needs a GPU, in one command and under ten minutes on an H200:
#
#     scripts/gpu_suite.sh                       # all of the sections below
#     scripts/gpu_suite.sh tests train_step      # some of them
#     scripts/gpu_suite.sh --smoke [SECTION...]  # all but the tests, tiny: kernels in Triton's interpreter, the rest on the tests' stand-in
#                                                # accelerator (on the CPU where that cannot be built)
#
# Sections: tests (marked `gpu`), kernels, train_step (1b), capped_training (13b in 24 GB), offload, streaming.
#
# CSVs go to ${OUT:-benchmarks/gpu}, each with GPU, torch, triton and commit. Needs a Python ($PYTHON, python3) with torch,
# triton, transformers, accelerate, pandas, scipy, pytest and hypothesis, nothing installed from here and no network.
set -uo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
out="${OUT:-$root/benchmarks/gpu}"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
python="${PYTHON:-python3}"
export GRASS_COMMIT="${GRASS_COMMIT:-$(git -C "$root" rev-parse --short HEAD 2>/dev/null || echo unknown)}"
"$python" - <<'END' || exit 1
from importlib.util import find_spec
from sys import executable

needed = ["torch", "triton", "transformers", "accelerate", "pandas", "scipy", "pytest", "hypothesis"]
if missing := [name for name in needed if find_spec(name) is None]:
    raise SystemExit(f"{executable} lacks {', '.join(missing)}: pip install {' '.join(missing)}")
from importlib.metadata import version

print("With", ", ".join(f"{name} {version(name)}" for name in needed[:3]))
END
export PYTHONUNBUFFERED=1 CUBLAS_WORKSPACE_CONFIG=:4096:8

# The package as an installation lays it out: the kernels are grass.kernels.
stage="$(mktemp -d)"
trap 'rm -rf "$stage"' EXIT
cp -r "$root/grass" "$root/tests" "$root/scripts" "$root/setup.cfg" "$stage"
cp -r "$root/triton_kernels" "$stage/grass/kernels"
cd "$stage" && export PYTHONPATH="$stage${PYTHONPATH:+:$PYTHONPATH}"

failed=()
run() { # run NAME SECONDS COMMAND...: on a GPU for so long at most, and no longer than what is left of ten minutes
    echo "== $1"
    local left=$((600 - SECONDS)) limit=()
    [ ${#smoke[@]} -gt 0 ] || limit=(timeout "$((left < 1 ? 1 : left < $2 ? left : $2))")
    ${limit[@]+"${limit[@]}"} "${@:3}" 2>&1 | tee "$out/$1.log" | tail -n 40
    local status=${PIPESTATUS[0]}
    [ "$status" -eq 0 ] || failed+=("$1 ($status)")
}

smoke=()
if [ "${1:-}" = "--smoke" ]; then
    smoke=(--smoke)
    shift
else
    "$python" -c 'import torch; assert torch.cuda.is_available(), "no CUDA GPU: try --smoke"' || exit 1
fi
sections=(tests kernels train_step capped_training offload streaming)
chosen=("${@:-${sections[@]}}")
for name in "${chosen[@]}"; do
    [[ " ${sections[*]} " == *" $name "* ]] || { echo "no section $name: there are ${sections[*]}" >&2; exit 2; }
done
wanted() { [[ " ${chosen[*]} " == *" $1 "* ]]; }

if wanted tests && [ ${#smoke[@]} -eq 0 ]; then
    mapfile -t marked < <(grep -rlE 'pytest\.mark\.gpu' tests --include='test_*.py')
    parallel=()
    "$python" -c 'import xdist' 2>/dev/null && parallel=(--numprocesses "$(nproc)")
    # names are printed as tests end, which addopts = -q would undo: time may be up before the failures are shown
    run tests 300 "$python" -m pytest -o addopts= -m gpu -p no:cacheprovider -v --tb=short --durations=10 ${parallel[@]+"${parallel[@]}"} tests/kernels "${marked[@]}"
fi
kernels=(scatter_add_rows row_norms compact_adamw compact_adamw_8bit move_factors move_rows row_sketch shrink)
kernels+=(reload_rows)
if wanted kernels; then # in one process: imports take longer than the kernels
    run kernels 240 "$python" -c '
import runpy, sys, traceback
sys.path.insert(0, "scripts/bench/kernels")
out, smoke, *kernels = sys.argv[1:]
failed = []
for kernel in kernels:
    sys.argv = [kernel, *smoke.split(), "--out", out]
    try:
        runpy.run_path(f"scripts/bench/kernels/{kernel}.py", run_name="__main__")
    except Exception:
        traceback.print_exc()
        failed.append(kernel)
sys.exit("failed: " + ", ".join(failed) if failed else 0)
' "$out" "${smoke[*]-}" "${kernels[@]}"
fi
bench() { # bench NAME SECONDS SCRIPT
    wanted "$1" && run "$1" "$2" "$python" "scripts/bench/$3" --out "$out" ${smoke[@]+"${smoke[@]}"}
}
bench train_step 300 gpu_train_step.py
bench capped_training 300 capped_training.py
bench offload 150 gpu_offload.py
bench streaming 150 gpu_streaming.py

if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}"
    exit 1
fi
echo "all passed; CSVs in $out"
