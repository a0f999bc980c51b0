"""What the callback logs, to whom, and what it refuses to train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import grass
from grass.diagnostics import MEASURES, SelectionHistory
from tests.integrations.runs import MODES, Build, arguments, examples, logged, trainer

transformers = pytest.importorskip("transformers")
from grass.integrations.transformers import GrassCallback  # noqa: E402

BYTES = ("grass_state_device_bytes", "grass_state_host_bytes")


class Reporter(transformers.TrainerCallback):
    """Sees what any reporter sees."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append({**kwargs["logs"], "step": state.global_step})


class Oracle(transformers.TrainerCallback):
    """Measures of its own, after every step."""

    def __init__(self) -> None:
        self.history: SelectionHistory | None = None
        self.records: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.history = SelectionHistory(kwargs["optimizer"].optimizer)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.history is not None
        self.records.append(self.history.record())


@pytest.mark.parametrize("mode", MODES)
def test_measures(tiny_llama: Build, tmp_path: Path, mode: str) -> None:
    """Those of the step just logged, in the history and to every reporter, beside Trainer's own."""
    ours, reporter, oracle = trainer(tiny_llama(), arguments(tmp_path), mode), Reporter(), Oracle()
    for callback in (reporter, oracle):
        ours.add_callback(callback)
    ours.train()
    entries = [entry for entry in ours.state.log_history if "grass_turnover" in entry]
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4, 5, 6]
    assert [entry["step"] for entry in ours.state.log_history if "loss" in entry] == [1, 2, 3, 4, 5, 6]
    for entry, expected in zip(entries, oracle.records, strict=True):
        for measure in MEASURES:
            assert entry.get(f"grass_{measure}", pytest.approx(float("nan"), nan_ok=True)) == pytest.approx(
                expected[measure], nan_ok=True
            )
    assert entries[-1]["grass_energy"] > 0
    assert len({entry["grass_coverage"] for entry in entries}) > 1, "rows change"
    json.dumps(ours.state.log_history, allow_nan=False)
    assert [entry for entry in reporter.seen if "grass_turnover" in entry] == entries


@pytest.mark.parametrize("mode", MODES)
def test_sizes(tiny_llama: Build, tmp_path: Path, mode: str) -> None:
    """Bytes by the closed form; as many elements train in either mode."""
    ours = trainer(tiny_llama(), arguments(tmp_path), mode)
    ours.train()
    model = ours.model
    linear = [m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"]
    rows = sum(4 * m.out_features for m in linear)
    weights = sum(m.weight.numel() for m in linear)
    others = [value for name, value in model.state_dict().items() if "_proj" not in name]
    counters = 4 * len(others) + len(linear) * 4 * (8 + 4)  # step counts of tensors; indices and step counts of rows
    for active, device, host in logged(ours, "grass_active_parameters", *BYTES):
        assert active == rows + sum(value.numel() for value in others)
        assert device == 8 * active + counters
        assert host == (8 * weights + 4 * sum(m.in_features for m in linear) if mode == "compact" else 0)


@pytest.mark.slow
def test_rare_logs_show_their_own_step(tiny_llama: Build, tmp_path: Path) -> None:
    """Whichever steps are logged, the energy is that of the gradient of the same step."""
    every = trainer(tiny_llama(), arguments(tmp_path), "dense")
    every.train()
    expected = {entry["step"]: entry for entry in every.state.log_history if "grass_energy" in entry}
    for overrides, steps in (
        ({"logging_steps": 2}, [2, 4, 6]),
        ({"logging_steps": 4, "logging_first_step": True}, [1, 4]),
        ({"logging_strategy": "epoch", "max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 4}, [4]),
    ):
        rare = trainer(tiny_llama(), arguments(tmp_path, **overrides), "dense")
        oracle = Oracle()
        rare.add_callback(oracle)
        rare.train()
        entries = [entry for entry in rare.state.log_history if "grass_energy" in entry]
        assert [entry["step"] for entry in entries] == steps
        for entry in entries:
            assert entry["grass_energy"] == oracle.records[entry["step"] - 1]["energy"]
            if "max_steps" not in overrides:
                assert entry["grass_energy"] == expected[entry["step"]]["grass_energy"]


def test_tensorboard(tiny_llama: Build, tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    ours = trainer(tiny_llama(), arguments(tmp_path, report_to=["tensorboard"], max_steps=3), "dense")
    ours.train()
    written = [*tmp_path.rglob("events.out.tfevents.*")]
    assert written
    found: dict[str, list[int]] = {}
    for path in written:
        accumulator = events.EventAccumulator(str(path))
        accumulator.Reload()
        found.update({tag: [event.step for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]})
    for name in (*(f"grass_{measure}" for measure in MEASURES), *BYTES, "grass_active_parameters", "loss"):
        assert found[f"train/{name}"] == [1, 2, 3], name


def test_no_grass_at_all(tiny_llama: Build, tmp_path: Path) -> None:
    plain = transformers.Trainer(tiny_llama(), arguments(tmp_path), train_dataset=examples())
    plain.add_callback(GrassCallback(plain))
    with pytest.raises(ValueError, match="AdamW selects no rows"):
        plain.train()


@pytest.mark.parametrize(
    "build", [lambda model: model, lambda model: grass.compact(model, rank=4, explore=0, targets=["up_proj"])]
)
def test_converted_after_the_optimizer_was_built(tiny_llama: Build, tmp_path: Path, build: Any) -> None:
    """Nothing of it, or a part: refused before a step, naming the layers."""
    model, args = tiny_llama(), arguments(tmp_path)
    build(model)
    plain = transformers.Trainer(model, args, train_dataset=examples())
    plain.add_callback(GrassCallback(plain))
    plain.create_optimizer()
    grass.compact(model, rank=4, explore=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"converted after their optimizer.*layers\.0\.self_attn\.q_proj"):
        plain.train()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class ConvertsAtTheStart(transformers.TrainerCallback):
    """The mistake: Trainer has built its optimizer by then."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        grass.compact(kwargs["model"], rank=4, explore=0)


@pytest.mark.parametrize("with_ours", [True, False], ids=["with GrassCallback", "without"])
def test_converted_as_training_begins(tiny_llama: Build, tmp_path: Path, with_ours: bool) -> None:
    """By a callback before ours, our callback refuses; without ours, the first step does."""
    model = tiny_llama()
    late = transformers.Trainer(model, arguments(tmp_path), train_dataset=examples(), callbacks=[ConvertsAtTheStart()])
    if with_ours:
        late.add_callback(GrassCallback(late))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"built before grass.compact|converted after their optimizer"):
        late.train()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_trained_twice(tiny_llama: Build, tmp_path: Path) -> None:
    """A second ``train()`` of one trainer goes on with the same optimizer, and one history at a time."""
    ours = trainer(tiny_llama(), arguments(tmp_path, max_steps=2), "compact")
    ours.train()
    optimizer = ours.optimizer.optimizer
    hooks = len(optimizer._optimizer_step_post_hooks)
    ours.train()
    assert ours.optimizer.optimizer is optimizer
    assert len(optimizer._optimizer_step_post_hooks) == hooks == 0
    assert len(logged(ours, "grass_turnover")) == 2
    assert all(state["step"] == 4 for state in optimizer.state.values() if "indices" in state)


def test_plain_trainer_with_a_model_converted_before(tiny_llama: Build, tmp_path: Path) -> None:
    """The two-line form: the optimizer given to Trainer as an object."""
    model = tiny_llama()
    grass.compact(model, rank=4, explore=0)
    optimizer = grass.GrassAdamW(model, lr=1e-2, update_interval=2)
    given = transformers.Trainer(model, arguments(tmp_path), train_dataset=examples(), optimizers=(optimizer, None))
    given.add_callback(GrassCallback(given))
    given.train()
    assert len(logged(given, "grass_turnover")) == 6
