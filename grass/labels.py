"""What the tokens of a language model are to predict, and what it does to its logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

IGNORED = -100
"""The target of tokens that do not count, as in ``F.cross_entropy``."""


def next_tokens(labels: Tensor) -> Tensor:
    """Each token's target, the label of the next one: ``(..., s) -> (..., s)``; the last token does not count."""
    return F.pad(labels, (0, 1), value=IGNORED)[..., 1:]


def changes_logits(config: Any) -> str | None:
    """The field of a configuration by which its model does more to its logits than its head, if there is one."""
    for name, unchanged in (("final_logit_softcapping", None), ("logit_scale", 1), ("logits_scaling", 1)):
        if getattr(config, name, None) not in (None, unchanged):
            return name
    return None
