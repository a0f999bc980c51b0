"""Every order in which copies and updates may legally run gives the same bits, and nothing reads what is not valid."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from grass import Offload
from grass.offload.host_copies import HostCopy, LayerCopy
from grass.offload.tasks import Task, check_order
from tests.offload.schedules import legal_next
from tests.offload.training import MODES, Mode, build, same, train

OPTIONS: list[dict[str, Any]] = [
    {"explore": 4},
    {"selection": "multinomial_norm", "state_policy": "bank", "explore": 0},
    {"selection": "top_r", "state_policy": "bank", "refresh": "exact", "explore": 4},
]
STEPS = 9
"""Two selections after the first."""
EXPECTED: dict[str, Any] = {}


class LazyExecutor:
    """Runs nothing before somebody waits, and then one drawn task after another until the awaited one is done.

    It refuses nothing that :class:`grass.offload.executor.Executor` takes, and ends no thread: there is none.
    """

    fault = None

    def __init__(self, data: st.DataObject | None) -> None:
        self.data = data
        self.waiting: list[Task] = []
        self.left_open = 0

    def submit(self, tasks: Iterable[Task]) -> None:
        tasks = list(tasks)
        check_order(tasks, self.waiting)
        self.waiting += tasks

    @torch.no_grad()
    def wait(self, task: Task) -> None:
        while not task.done:
            ready = legal_next(self.waiting, set())
            assert self.data is not None
            chosen = ready[self.data.draw(st.integers(0, len(ready) - 1))] if len(ready) > 1 else ready[0]
            chosen.start = 0.0
            assert chosen.work is not None
            chosen.work()
            chosen.work, chosen.end = None, 1.0
            self.waiting.remove(chosen)
        self.left_open += len(self.waiting)

    def check(self) -> None: ...

    def is_own_thread(self) -> bool:
        return False


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills the host's gradients and the rows that came up with NaN before they are written and after their use."""

    def nan(tensor: Tensor | None) -> None:
        if tensor is not None and tensor.is_floating_point():
            tensor.fill_(float("nan"))

    begin, arrive = HostCopy.begin, LayerCopy.arrive

    def poisoned_begin(self: HostCopy, link: Any, **options: Any) -> None:
        begin(self, link, **options)
        nan(self._grad)

    def poisoned_arrive(self: LayerCopy) -> None:
        rows = self._rows
        arrive(self)
        nan(rows)

    monkeypatch.setattr(HostCopy, "begin", poisoned_begin)
    monkeypatch.setattr(LayerCopy, "arrive", poisoned_arrive)
    for kind in (HostCopy, LayerCopy):
        monkeypatch.setattr(kind, "give", poisoned_give(kind.give, nan))
    empty_like = torch.empty_like

    def poisoned_empty_like(*args: Any, **options: Any) -> Tensor:
        made = empty_like(*args, **options)
        nan(made)
        return made

    monkeypatch.setattr(torch, "empty_like", poisoned_empty_like)


def poisoned_give(give: Callable[..., None], nan: Callable[[Tensor], None]) -> Callable[..., None]:
    def both(self: HostCopy, link: Any) -> None:
        give(self, link)
        nan(self._grad)

    return both


def trained(mode: Mode, options: dict[str, Any], offload: Offload | None, data: st.DataObject | None = None) -> Any:
    model, optimizer = build(mode, offload=offload, **({} if mode == "full" else options))
    executor = None
    if data is not None:
        assert optimizer.offload is not None
        executor = optimizer.offload._executor = LazyExecutor(data)  # type: ignore[assignment]
    losses = train(model, optimizer, STEPS)
    return (losses, dict(model.state_dict()), optimizer.state_dict()), executor


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    "options",
    [OPTIONS[0], *(pytest.param(options, marks=pytest.mark.slow) for options in OPTIONS[1:])],
    ids=lambda options: options.get("selection", "uniform"),
)
@pytest.mark.parametrize("mode", MODES)
def test_any_legal_order_equals_the_resident_optimizer(mode: Mode, options: dict[str, Any]) -> None:
    expected = copy.deepcopy(trained(mode, options, None)[0])
    left_open = 0

    @given(st.data())
    @settings(max_examples=8)
    def check(data: st.DataObject) -> None:
        nonlocal left_open
        result, executor = trained(mode, options, Offload(), data)
        assert same(result, expected)
        left_open += executor.left_open

    check()
    assert left_open > 0 or mode != "compact"  # some tasks did run later than they could


def test_nothing_runs_before_somebody_waits() -> None:
    """The test above would find a missing wait: without one, a model keeps the weights of the step before."""
    model, optimizer = build("full", offload=Offload())
    assert optimizer.offload is not None
    train(model, optimizer, 2)
    optimizer.offload.finish()
    executor = optimizer.offload._executor = LazyExecutor(None)  # type: ignore[assignment]
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, 1)
    assert len(executor.waiting) == 3 * len(list(model.parameters()))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    executor.waiting.clear()
    optimizer.offload._pending.clear()
