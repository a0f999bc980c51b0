"""Whatever is done between two steps, a streamed or offloaded model trains as the plain one does, bit for bit."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from grass.offload import host_storage
from grass.streaming import host_block
from tests.fuzz.lockstep import Action, in_lockstep
from tests.fuzz.loop import CONTEXTS
from tests.fuzz.models import BLOCKS
from tests.fuzz.run import WRITES
from tests.fuzz.settings import ATTACHED, Place, Setting

NUMBERS = st.integers(0, 40)
DEPTHS = st.sampled_from([BLOCKS, BLOCKS, BLOCKS, 1, 2])
BOOLS = st.booleans()


def settings_of() -> st.SearchStrategy[Setting]:
    common = {
        "update_interval": st.sampled_from([2, 3]),
        "selection": st.sampled_from(["uniform", "balanced", "multinomial_norm", "top_r"]),
        "state_policy": st.sampled_from(["reset", "keep", "bank"]),
        "moment_dtype": st.sampled_from(["float32", "float32", "bfloat16", "8bit"]),
        "decay": st.sampled_from(["selected", "selected", "all"]),
        "refresh": st.sampled_from(["sketch", "exact"]),
    }
    return st.builds(
        Setting,
        model=st.sampled_from(["chain", "tied", "experts"]),
        mode=st.sampled_from([*["compact"] * 3, "dense", "full", *ATTACHED]),
        weights=st.sampled_from(["float32", "float32", "int8", "bfloat16", "bfloat16 under float32"]),
        rank=st.sampled_from([1, 2]),
        explore=st.sampled_from([0, 0, 2]),
        dim=st.sampled_from([0, 1]),
        dropout=st.sampled_from([0.0, 0.2]),
        options=st.fixed_dictionaries(common).map(lambda d: tuple(d.items())),
    ).map(allowed)


def allowed(setting: Setting) -> Setting:
    """The setting, without what experts and other optimizers do not take."""
    changes: dict[str, Any] = {}
    if setting.mode in ATTACHED and dict(setting.options)["state_policy"] == "bank":
        changes = {"state_policy": "keep"}
    if setting.model == "experts":
        changes |= {"moment_dtype": "float32", "decay": "selected"}
    model = "chain" if (setting.model, setting.mode) == ("experts", "muon") else setting.model
    return Setting(**{**vars(setting), "model": model, "options": tuple({**dict(setting.options), **changes}.items())})


STREAMS = st.fixed_dictionaries(
    {"cache": st.sampled_from([0, 3000, 1 << 30]), "offload_activations": BOOLS, "path": BOOLS}
).map(lambda d: tuple((k, v) for k, v in d.items() if v or k != "path"))
OFFLOADS = st.fixed_dictionaries(
    {
        "fraction": st.sampled_from([0.0, 0.5, 1.0]),
        "path": BOOLS,
        "overlap": st.sampled_from([True, True, False]),
        "masters": BOOLS,
    }
).map(lambda d: tuple((k, v) for k, v in d.items() if v is not False or k != "path"))


@st.composite
def places(draw: st.DrawFn) -> Place:
    streamed, offloaded = draw(st.sampled_from([(True, False), (False, True), (True, True)]))
    return Place(draw(STREAMS) if streamed else None, draw(OFFLOADS) if offloaded else None)


def action(name: str, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Action]:
    return st.tuples(st.just(name), st.fixed_dictionaries(arguments))


BACKWARD = action("backward", number=NUMBERS, depth=DEPTHS)
STEP = action("step", closure=st.sampled_from([False, False, False, True]))
TRAIN = action(
    "train",
    number=NUMBERS,
    steps=st.integers(1, 4),
    clip=st.sampled_from([None, 0.5]),
    batches=st.sampled_from([1, 1, 2]),
    depth=DEPTHS,
)
WHATS = st.sampled_from(["model", "optimizer", "both"])
ACTIONS = [
    BACKWARD,
    BACKWARD,
    STEP,
    STEP,
    TRAIN,
    TRAIN,
    TRAIN,
    action("backward_later", number=NUMBERS, depth=DEPTHS),
    action("backward_twice", number=NUMBERS),
    action("backward_of_two", number=NUMBERS),
    action("forward_only", number=NUMBERS),
    action("microbatches", number=NUMBERS, count=st.integers(1, 3)),
    action("block_by_hand", number=st.integers(0, BLOCKS - 1), backward=BOOLS),
    action(
        "fail",
        moment=st.sampled_from(["forward", "backward", "gradient"]),
        number=st.integers(0, BLOCKS - 1),
        then=st.sampled_from(["optimizer", "model", ""]),
    ),
    action("scaled", number=NUMBERS, overflows=BOOLS),
    action("zero_grad", of=st.sampled_from(["model", "optimizer"]), none=BOOLS),
    action("clip", norm=st.sampled_from([0.1, 10.0])),
    action("parameters"),
    action("state", what=WHATS),
    action("evaluate", context=st.sampled_from(sorted(CONTEXTS)), number=NUMBERS, train=BOOLS),
    action("mode", training=BOOLS),
    action("generate", length=st.integers(1, 3)),
    action("save", file=BOOLS),
    action("load", what=WHATS, crosswise=BOOLS),
    action("load_own", what=WHATS),
    action("put_in", scale=st.sampled_from([0.0, 1.001])),
    action("write", number=NUMBERS, how=st.sampled_from(sorted(WRITES))),
    action("set_option", key=st.just("lr"), value=st.sampled_from([1e-3, 1e-2, 0.0])),
    action("set_option", key=st.just("weight_decay"), value=st.sampled_from([0.0, 0.1])),
    action("set_option", key=st.just("update_interval"), value=st.sampled_from([1, 2, 4])),
    action("freeze", number=NUMBERS, frozen=BOOLS),
    action("cast"),
    action("add_group", number=st.integers(0, BLOCKS)),
    action("checkpointing", on=BOOLS),
    action("copied", number=NUMBERS),
    action("go_on_as_copy"),
    action("new_optimizer", loaded=BOOLS, seed=st.sampled_from([0, 1])),
    action("expand", streamed_first=BOOLS),
    action("move", place=st.one_of(STREAMS.map(Place), st.just(Place()))),
]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files for tensors as small as these models'."""
    monkeypatch.setattr(host_storage, "SMALLEST", 1)
    monkeypatch.setattr(host_block, "SMALLEST", 1)


every_case = given(settings_of(), places(), st.lists(st.one_of(ACTIONS), min_size=6, max_size=24), BOOLS)


@pytest.mark.slow
@every_case
@settings(max_examples=60)
def test_between_steps(setting: Setting, place: Place, actions: list[Action], late: bool) -> None:
    in_lockstep(setting, place, actions, late=late)


@pytest.mark.soak
@every_case
@settings(max_examples=250)
def test_between_more_steps(setting: Setting, place: Place, actions: list[Action], late: bool) -> None:
    in_lockstep(setting, place, actions, late=late)
