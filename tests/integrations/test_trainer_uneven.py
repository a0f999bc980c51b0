"""``GrassTrainer(deal=...)``: uneven processes train as one, also after a resume on other ones; wrong arguments."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from grass.distributed.uneven import drift, measuring  # noqa: E402
from grass.integrations.transformers import GrassTrainer, uneven  # noqa: E402
from grass.machine.profile import Profile  # noqa: E402
from tests.distributed.training import assert_close  # noqa: E402
from tests.distributed.uneven.training import llama, samples  # noqa: E402
from tests.distributed.world import attempt_world, run_world  # noqa: E402
from tests.integrations.runs import arguments, logged  # noqa: E402

GRASS = {"rank": 0.25, "update_interval": 2, "selection": "multinomial_norm"}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""Transformers computes losses and norms in float32."""


def trainer(out: Path, sizes: Any, model: Any = None, **options: Any) -> GrassTrainer:
    """40 samples, 5 steps of 8 in an epoch, a checkpoint within the second one."""
    size = 4 // int(os.environ.get("WORLD_SIZE", 1))
    values = {
        "per_device_train_batch_size": size,
        "max_steps": 9,
        "save_steps": 7,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        **options,
    }
    args = arguments(out, **values)
    return GrassTrainer(model or llama(), args, train_dataset=samples(), grass=GRASS, deal=sizes)


def environment(rank: int) -> None:
    """As torchrun sets it."""
    if torch.distributed.get_world_size() > 1:
        found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": torch.distributed.get_world_size()}
        os.environ.update({name: str(value) for name, value in found.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


def run(rank: int, out: Path, sizes: Any, resume: str | None = None) -> tuple[dict[str, torch.Tensor], list[Any], int]:
    environment(rank)
    made = trainer(out, sizes, save_strategy="no" if resume else "steps")
    made.train(resume_from_checkpoint=resume)
    assert made.args.world_size == torch.distributed.get_world_size()
    return dict(made.model.state_dict()), logged(made, "loss"), made.get_total_train_batch_size(made.args)


@pytest.mark.slow
def test_trains_as_one_process_and_resumes_on_one_and_three(tmp_path: Path) -> None:
    [(expected, losses, batch)] = run_world(run, 1, tmp_path / "one", [4])
    assert batch == 8
    for weights, found, size in run_world(run, 2, tmp_path / "two", [3, 1]):
        assert_close(weights, expected, **CLOSE)
        torch.testing.assert_close(found, losses, **CLOSE)
        assert size == 8
    checkpoint = str(tmp_path / "two" / "checkpoint-7")
    for sizes in ([4], [2, 1, 1]):
        for weights, found, _ in run_world(run, len(sizes), tmp_path / "resumed", sizes, checkpoint):
            assert_close(weights, expected, **CLOSE)
            torch.testing.assert_close(found[-2:], losses[-2:], **CLOSE)


class Clock:
    """Time that passes only where a forward says so."""

    now = 1.0

    def perf_counter(self) -> float:
        return self.now


Changed = tuple[dict[str, torch.Tensor], list[Any], list[int], list[str]]


def changing(
    rank: int, out: Path, slower: tuple[float, float] = (1.0, 3.0), made: GrassTrainer | None = None
) -> Changed:
    """Rank 1 is so much slower than rank 0 until four micro-batches, and after them; a look after every second step."""
    environment(rank)
    drift.time = measuring.time = clock = Clock()
    drift.STEPS = 3  # more than half of them follow the batch that was loaded ahead with the old sizes
    taken: list[int] = []

    def passes(model: Any, inputs: Any, result: Any) -> None:
        size, factor = len(result.logits), slower[len(taken) > 3] if rank else 1.0
        clock.now += size * factor
        if torch.is_grad_enabled() and made.state.global_step < made.state.max_steps:
            taken.append(size)

    made = made or trainer(out, "auto", save_strategy="no", dataloader_num_workers=0)
    measured = made._uneven._measured
    made._uneven._measured = lambda even: (measured(even), taken.clear())[0]
    made.model.register_forward_hook(passes)
    lines: list[str] = []
    logging.getLogger("grass").addHandler(handler := logging.Handler())
    logging.getLogger("grass").setLevel(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    made.train()
    weights = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in made.model.state_dict().items()}
    return weights, logged(made, "loss"), taken, [line for line in lines if "changed" in line]


@pytest.mark.slow
def test_other_sizes_when_times_change(tmp_path: Path) -> None:
    """The losses stay those of one process."""
    [(expected, losses, _)] = run_world(run, 1, tmp_path / "one", [4])
    first, second = run_world(changing, 2, tmp_path / "two")
    for weights, found, _, lines in (first, second):
        assert_close(weights, expected, **CLOSE)
        torch.testing.assert_close(found, losses, **CLOSE)
        assert "before: 8 samples: " in lines[0]
    assert first[2][0] == second[2][0]
    assert first[2][-1] > second[2][-1]
    assert {a + b for a, b in zip(first[2], second[2], strict=True)} == {first[2][0] * 2}


def sharded(out: Path, rank: int, sizes: Any, version: int = 2, **options: Any) -> GrassTrainer:
    """By FSDP2. On a CPU Trainer does not offer it: accelerate's plugin is set by hand."""
    environment(rank)
    made = trainer(out, sizes, save_strategy="no", gradient_accumulation_steps=1, **options)
    accelerate.PartialState().distributed_type = accelerate.DistributedType.FSDP
    accelerate.state.AcceleratorState().fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=version, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
    )
    made.is_fsdp_enabled = True
    return made


def changing_sharded(rank: int, out: Path) -> tuple[Changed, bool]:
    """Rank 1 is as fast as rank 0 in the end; rank 0, which waits for it in FSDP2, takes no notice of that."""

    def waits(group: Any, *arguments: Any, run: Any = FSDPParamGroup.wait_for_unshard) -> Any:
        drift.time.now += 50.0 * (rank == 0)
        return run(group, *arguments)

    FSDPParamGroup.wait_for_unshard = waits
    made = sharded(out, rank, "auto", per_device_train_batch_size=4)
    for name in ("first", "second"):  # their shards on rank 1 are empty
        made.model.lm_head.register_parameter(name, torch.nn.Parameter(torch.ones(1).double()))
    changed = changing(rank, out, (3.0, 1.0), made)
    trained = [id(p) for group in made.optimizer.param_groups for p in group["params"]]
    return changed, sorted(trained) == sorted(id(p) for p in made.model.parameters() if p.requires_grad)


@pytest.mark.slow
def test_other_sizes_when_times_change_under_fsdp2(tmp_path: Path) -> None:
    [(expected, losses, _)] = run_world(run, 1, tmp_path / "one", [4])
    (first, first_trains_all), (second, second_trains_all) = run_world(changing_sharded, 2, tmp_path / "two")
    assert first_trains_all
    assert second_trains_all
    for weights, found, _, lines in (first, second):
        assert_close({name: weights[name] for name in expected}, expected, **CLOSE)
        torch.testing.assert_close(found, losses, **CLOSE)
        assert "2 micro-batches of 2, 2" in lines[0]
    assert (first[2][0], first[2][-1]) == (3, 2)
    assert (second[2][0], second[2][-1]) == (1, 2)


def test_auto_measures_and_divides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process whose memory ends at four samples: eight are two micro-batches."""
    tried = []
    loss_of = uneven.loss_of

    def limited(trainer: Any, inputs: list[Any], loader: Any, items: int) -> torch.Tensor:
        tried.append(len(inputs))
        if len(inputs) > 4:
            raise torch.OutOfMemoryError
        return loss_of(trainer, inputs, loader, items)

    monkeypatch.setattr(uneven, "loss_of", limited)
    made = trainer(tmp_path, "auto", per_device_train_batch_size=8, gradient_accumulation_steps=1, max_steps=2)
    made.train()
    assert set(tried) == {1, 2, 4, 5, 6, 8}  # one first, to see what the loss does
    assert made.args.gradient_accumulation_steps == 8 // made._uneven.deal.size >= 2
    assert made.get_total_train_batch_size(made.args) == 8
    assert isinstance(made._uneven.deal.profiles[0], Profile)
    assert made.state.global_step == 2


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"accelerator_config": {"split_batches": True}}, "Invalid split_batches=True"),
        ({"accelerator_config": {"dispatch_batches": True}}, "Invalid dispatch_batches=True"),
        ({"average_tokens_across_devices": False}, "Invalid average_tokens_across_devices=False"),
    ],
)
def test_arguments_that_do_not_fit(tmp_path: Path, options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        trainer(tmp_path, [4], **options)


def test_a_deal_of_another_type(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="Invalid deal='even': must be 'auto' or the samples of each process"):
        trainer(tmp_path, "even")


def test_muon_takes_even_parts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Invalid deal=\[4\] with optimizer='muon': uneven parts take 'adamw'"):
        GrassTrainer(llama(), arguments(tmp_path), grass={"rank": 4, "optimizer": "muon"}, deal=[4])


class Plain(torch.nn.Module):
    """A language model without ``num_items_in_batch``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.inner(input_ids=input_ids, labels=labels).loss}


class Ignoring(Plain):
    """One that takes it and ignores it."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **ignored: Any) -> dict[str, torch.Tensor]:
        return super().forward(input_ids, labels)


def test_models_whose_loss_is_a_mean(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Plain\.forward does not take num_items_in_batch"):
        trainer(tmp_path, [4], Plain())
    with pytest.raises(ValueError, match="The loss of Ignoring ignores num_items_in_batch"):
        trainer(tmp_path, [4], Ignoring()).train()


def under_fsdp1(rank: int, out: Path) -> None:
    sharded(out, rank, "auto", version=1).train()


def test_auto_under_fsdp1_is_refused(tmp_path: Path) -> None:
    for outcome in attempt_world(under_fsdp1, 2, tmp_path):
        assert "deal='auto' cannot tell what a process computes from what it waits for others" in outcome.error


def test_sizes_for_other_numbers_of_processes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Invalid sizes=\[3, 1\]: must be 1 numbers"):
        trainer(tmp_path, [3, 1]).train()
