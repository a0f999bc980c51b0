"""What works with what: each cell names the test that shows it, or the error that is raised and its test."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODES = ("dense mode", "compact mode", "offload", "streaming")
"""The last two with either mode."""

FSDP, TP, GRID = "distributed/test_fsdp", "distributed/test_tensor_parallel", "distributed/parallel_2d"
COMPACT_TP, EXPERTS = "distributed/test_compact_tensor_parallel", "experts/test_compact"
EXPERT_PARALLEL = "distributed/test_expert_parallel"
CELLS: dict[str, dict[str, tuple[str, str]]] = {
    "DDP": {
        "dense mode": ("yes", "distributed/test_reduced_allreduce::test_joint_training_equals_one_process"),
        "compact mode": ("yes", "distributed/test_compact_ddp::test_joint_training_equals_one_process"),
        "offload": ("yes", "distributed/test_offload_ddp::test_equals_the_resident_optimizer"),
        "streaming": ("RuntimeError", "streaming/test_arguments::test_ddp_around_a_streamed_model"),
    },
    "FSDP2": {
        "dense mode": ("yes", f"{TP}::test_dense_mode_under_fsdp2"),
        "compact mode": ("yes", f"{FSDP}::test_joint_training_equals_one_process"),
        "offload": ("yes", "distributed/test_offload_fsdp::test_equals_the_resident_optimizer"),
    },
    "TP (`parallelize_module`)": {
        "dense mode": ("yes", f"{TP}::test_sharded_weights_train_as_whole_ones"),
        "compact mode": ("yes", f"{COMPACT_TP}::test_equals_one_process_with_the_same_strata"),
        "offload": ("ValueError", f"{COMPACT_TP}::test_what_is_refused"),
    },
    "FSDP2 and TP": {
        "dense mode": ("yes", f"{TP}::test_fsdp2_beside_tensor_parallelism"),
        "compact mode": ("yes", f"{COMPACT_TP}::test_equals_one_process_with_the_same_strata"),
    },
    "2D (`parallelize_2d`)": {
        "compact mode": ("yes", f"{GRID}/test_compact::test_equals_one_process_with_the_same_strata"),
    },
    "offload": {
        "dense mode": ("yes", "offload/test_parity::test_equals_the_resident_optimizer"),
        "compact mode": ("yes", "offload/test_parity::test_equals_the_resident_optimizer"),
        "streaming": ("yes", "streaming/test_parity::test_training"),
    },
    "streaming": {
        "dense mode": ("yes", "streaming/test_parity::test_training"),
        "compact mode": ("yes", "streaming/test_parity::test_training"),
        "offload": ("yes", "streaming/test_parity::test_training"),
    },
    'int8 (`weights="int8"`)': {
        "compact mode": ("yes", "compact_mode/test_int8::test_trains_like_full_precision"),
        "offload": ("yes", "offload/test_parity::test_equals_the_resident_optimizer"),
        "streaming": ("yes", "streaming/test_parity::test_training"),
    },
    "`torch.compile`": {
        "dense mode": ("yes", "stepping/test_compile_step::test_whole_step"),
        "compact mode": ("yes", "compact_mode/test_compile::test_compiled_training"),
        "offload": ("yes", "offload/test_forward_hooks_calls::test_the_model_inside_a_wrapper_or_a_part_of_it_waits"),
        "streaming": ("yes", "streaming/test_parity::test_compiled_units"),
    },
    "experts": {
        "dense mode": ("yes", "experts/test_dense::test_equals_separate_matrices"),
        "compact mode": ("yes", f"{EXPERTS}::test_equals_separate_converted_layers"),
        "offload": ("yes", f"{EXPERTS}::test_offload"),
        "streaming": ("yes", f"{EXPERTS}::test_streaming"),
    },
    "experts under FSDP2": {
        "dense mode": ("yes", "distributed/test_experts::test_sharded_experts_equal_one_process"),
        "compact mode": ("yes", "distributed/test_experts::test_sharded_experts_equal_one_process"),
    },
    "expert parallelism (`Shard(0)`), also beside FSDP2": {
        "dense mode": ("ValueError", f"{EXPERT_PARALLEL}::test_what_is_refused"),
        "compact mode": ("yes", f"{EXPERT_PARALLEL}::test_equals_one_process"),
        "offload": ("ValueError", f"{EXPERT_PARALLEL}::test_what_is_refused"),
    },
    "`step_in_backward`": {
        "dense mode": ("yes", "test_in_backward::test_equals_the_ordinary_loop"),
        "compact mode": ("ValueError", "test_in_backward::test_what_it_does_not_take"),
        "offload": ("ValueError", "offload/test_faults::test_step_in_backward_is_refused"),
    },
    "another optimizer (`grass.attach`)": {
        "compact mode": ("yes", "compact_mode/test_attach::test_trains"),
    },
}


def support() -> str:
    """The table, with a footnote of the test of each cell.

    Raises:
        ValueError: a test that a cell names is not there, or one of an error expects no such error.
    """
    numbers: dict[str, int] = {}
    lines = [f"| | {' | '.join(MODES)} |", "|---" * (len(MODES) + 1) + "|"]
    for feature, cells in CELLS.items():
        row = []
        for mode in MODES:
            answer, test = cells.get(mode, ("–", ""))
            if test:
                _check(answer, test)
                answer += f" ({numbers.setdefault(test, len(numbers) + 1)})"
            row.append(answer)
        lines.append(f"| {feature} | {' | '.join(row)} |")
    notes = [f"{number}. `{test.replace('::', '.py::')}`" for test, number in numbers.items()]
    return "\n".join([*lines, "", "Tests, in `tests/`:", "", *notes])


def _check(answer: str, test: str) -> None:
    file, name = test.split("::")
    text = (ROOT / "tests" / f"{file}.py").read_text()
    functions = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        raise ValueError(f"there is no test {test}")
    if answer != "yes" and f"{answer}" not in text:
        raise ValueError(f"{test} expects no {answer}")
