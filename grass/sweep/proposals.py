"""Settings that an Optuna study proposes, one trial after another."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from grass.extras import optional
from grass.sweep.grid import Settings, plain


class Proposals:
    """A study that is asked for settings and told how they did.

    Trials that the study has already count, whatever became of them.

    Args:
        study: an ``optuna.Study`` that minimizes one value.
        space: the distribution of each setting, or a list of its values.
        most: trials of the study.

    Raises:
        ImportError: Optuna is not installed.
        TypeError: ``study`` is no study, or ``space`` no mapping.
        ValueError: the study maximizes or has several values, or ``most`` < 1.
    """

    def __init__(self, study: Any, space: Any, most: int | None) -> None:
        optuna = optional("optuna", "sampler=")
        if not isinstance(study, optuna.Study):
            raise TypeError(f"Invalid sampler={study!r}: must be an optuna.Study")
        if not isinstance(space, Mapping):
            raise TypeError(f"Invalid grid={space!r}: with sampler= it has a distribution or a list for each setting")
        if study.directions != [optuna.study.StudyDirection.MINIMIZE]:
            raise ValueError("Invalid sampler: the study must minimize one value, which is the loss")
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ValueError(f"Invalid trials={most!r}: must be an integer >= 1 with sampler=")
        base, categorical = optuna.distributions.BaseDistribution, optuna.distributions.CategoricalDistribution
        self.space = {key: how if isinstance(how, base) else categorical(list(how)) for key, how in space.items()}
        self.study, self.most = study, most
        self.states = optuna.trial.TrialState
        self._open: dict[Hashable, list[int]] = {}

    def known(self) -> list[Settings]:
        """The settings of the trials that the study has."""
        found = []
        for trial in self.study.get_trials(deepcopy=False):
            if trial.params.keys() == self.space.keys():
                found.append(self._remember(trial))
        return found

    def left(self) -> bool:
        """Whether there may be more trials."""
        return len(self.study.get_trials(deepcopy=False)) - self._enqueued() < self.most

    def ask(self) -> Settings | None:
        """Settings to try next, if any are left."""
        return self._remember(self.study.ask(self.space)) if self.left() else None

    def tell(self, settings: Settings, end: str, loss: float | None) -> None:
        """How a trial ended. What was told before is not told again."""
        for number in self._open.pop(_key(settings), []):
            if end == "done":
                self.study.tell(number, loss, skip_if_finished=True)
            else:
                state = self.states.PRUNED if end == "behind" else self.states.FAIL
                self.study.tell(number, state=state, skip_if_finished=True)

    def _remember(self, trial: Any) -> Settings:
        settings = plain({key: trial.params[key] for key in self.space})
        self._open.setdefault(_key(settings), []).append(trial.number)
        return settings

    def _enqueued(self) -> int:
        return len(self.study.get_trials(deepcopy=False, states=(self.states.WAITING,)))


def _key(settings: Settings) -> Hashable:
    return tuple(settings.items())
