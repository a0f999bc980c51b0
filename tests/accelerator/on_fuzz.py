"""Random training loops on the stand-in: a streamed or offloaded model trains as the resident one, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, given, settings

from tests.accelerator import standin

standin.install()

from tests.fuzz.lockstep import Action, in_lockstep  # noqa: E402
from tests.fuzz.settings import Place, Setting  # noqa: E402
from tests.fuzz.test_between_steps import ACTIONS, _small, places, settings_of  # noqa: E402, F401

DEVICE = "standin:0"
ELSEWHERE = {
    "clip": "a norm over two devices adds up in another order",
    "scaled": "the scaler is the CPU's",
    "block_by_hand": "its input is on the CPU",
    "copied": "a copy of a streamed model is on the host",
    "go_on_as_copy": "a copy of a streamed model is on the host",
    "expand": "a model is expanded where it lies, and streamed again only from the host",
    "move": "a model that was streamed has units on the host",
}
"""Actions that only the CPU's fuzzer has, and why."""


def on_device(setting: Setting) -> Setting:
    """The setting, with one arithmetic on host and device: not the CPU's kernel, and not another optimizer's."""
    return replace(setting, mode="compact" if setting.mode == "attached" else setting.mode, fused=False)


def unclipped(action: Action) -> Action:
    """The action, without clipping."""
    name, arguments = action
    return name, {**arguments, **({"clip": None} if name == "train" else {})}


PLACES = places().map(lambda place: replace(place, device=DEVICE))
SETTINGS = settings_of().map(on_device)
EVERY = st.one_of(ACTIONS).filter(lambda action: action[0] not in ELSEWHERE).map(unclipped)

every_case = given(SETTINGS, PLACES, st.lists(EVERY, min_size=4, max_size=12), st.integers(0, 1 << 20))


def check(setting: Setting, place: Place, actions: list[Action], order: int) -> None:
    standin.seed_order(order)
    in_lockstep(setting, place, actions)
    assert not standin.end()


@every_case
@settings(max_examples=4, phases=[Phase.generate])
def test_between_steps(setting: Setting, place: Place, actions: list[Any], order: int) -> None:
    check(setting, place, actions, order)


@pytest.mark.slow
@every_case
@settings(max_examples=25, phases=[Phase.generate])
def test_between_more_steps(setting: Setting, place: Place, actions: list[Any], order: int) -> None:
    check(setting, place, actions, order)
