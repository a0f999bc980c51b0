r"""Which rows to train: the seven selection rules of Grass, one of ours, and a registry for more.

Given a gradient's row norms ``norms[i] = ||G_i||``, a rule picks ``rank`` rows ``sigma`` and their scales ``rho``, the
two parts of the projection ``P^T = rho B`` (Muhamed et al., 2024, section 3.2):

========================  =============================================  ===========================================
rule                      rows                                           scale ``rho_j``
========================  =============================================  ===========================================
``top_r``                 the ``r`` largest norms: minimises             1
                          ``||G - P P^T G||_F``
``multinomial_norm``      drawn with ``q_i ~ ||G_i||``                   ``1 / sqrt(r q_{sigma_j})`` with
``multinomial_norm_sq``   drawn with ``q_i ~ ||G_i||^2``                 replacement, so that ``E[P P^T] = I``;
``uniform``               drawn with ``q_i = 1 / m``                     1 without
``balanced`` (ours)       the next ``r`` of a random order of all rows,  1
                          a new order when fewer than ``r`` are left
========================  =============================================  ===========================================

Selection is a pure function of the norms, the rank and a generator. It runs on the CPU in float64, so processes with
the same norms pick the same rows on any device. Special cases:

- equal norms: ``top_r`` prefers the lower index;
- a norm that is NaN or infinite counts as zero, so it is never preferred to a finite one;
- all norms zero: ``top_r`` takes the first ``r`` rows, the sampling rules draw uniformly;
- fewer nonzero norms than ``r``: without replacement all of them are taken and the rest drawn uniformly from the zero
  rows; with replacement the zero rows are never drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Below any sum of a log-probability and a Gumbel variate in float64: rows of weight zero come last.
_LAST = -1.0e6


@dataclass(frozen=True)
class Selection:
    """The chosen rows.

    Attributes:
        indices: int64 ``(r,)`` on the CPU, ascending; with replacement a row may occur more than once.
        scale: float32 ``(r,)``, ``rho``; ``None`` means all ones, and that no row occurs twice.
    """

    indices: Tensor
    scale: Tensor | None = None


Rule = Callable[[Tensor, int, torch.Generator | None, bool], Selection]
"""``rule(norms, rank, generator, replacement)``; ``norms`` is float64 ``(m,)`` on the CPU, finite and non-negative.

Only with ``replacement`` may a row occur twice in what it returns.
"""

BALANCED = "balanced"
"""The rule by which no row is selected twice before nearly all others were selected once."""

_RULES: dict[str, Rule] = {}
_WITHOUT_NORMS: set[str] = set()


def register_rule(name: str, rule: Rule, *, needs_norms: bool = True) -> None:
    """Make ``rule`` available as ``selection=name``.

    Most rules are sampling rules, which :func:`sampled` builds from a weight function::

        register_rule("sqrt_norm", sampled(torch.sqrt))

    Args:
        name: of the rule.
        rule: the function.
        needs_norms: ``False`` for a rule that ignores the norms: none are computed for it, and it gets ones.

    Raises:
        ValueError: the name is taken.
    """
    if name in _RULES:
        raise ValueError(f"Selection rule {name!r} is already registered; available: {', '.join(_RULES)}")
    _RULES[name] = rule
    if not needs_norms:
        _WITHOUT_NORMS.add(name)


def needs_norms(name: str) -> bool:
    """Whether a rule reads the norms that it is given."""
    return name not in _WITHOUT_NORMS


def available_rules() -> tuple[str, ...]:
    """Names accepted as ``selection``."""
    return tuple(_RULES)


def select_rows(
    norms: Tensor,
    rank: int,
    rule: str = "top_r",
    generator: torch.Generator | None = None,
    *,
    replacement: bool = False,
    experts: int = 1,
    turn: int = 0,
) -> Selection:
    """Choose ``rank`` of the ``m`` rows with the given norms.

    Args:
        norms: ``(m,)``, the Euclidean norms of the gradient's rows (``dim=1``: of its columns), any dtype and device.
        rank: how many rows, ``1 <= rank <= m``.
        rule: one of :func:`available_rules`.
        generator: CPU generator of the sampling rules; ``None`` uses torch's global one.
        replacement: draw with replacement and scale by ``rho``.
        experts: matrices that the rows belong to, one after another. The rule chooses equally many of each, and of an
            expert whose norms are all zero at random.
        turn: of ``balanced``: which ``rank`` rows of the order that ``generator`` draws, ``0 <= turn < m // rank``.

    Raises:
        ValueError: ``norms`` is not a vector, ``rank`` is out of range, or the rule is unknown.
    """
    if norms.ndim != 1:
        raise ValueError(f"norms must be a vector (m,), got shape {tuple(norms.shape)}")
    if not 1 <= rank <= norms.numel():
        raise ValueError(f"Invalid {rank=}: must be between 1 and the {norms.numel()} rows there are")
    check_rule(rule, replacement)
    clean = norms.detach().to("cpu", torch.float64).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    if rule == BALANCED:
        return _in_turn(clean.numel() // experts, rank // experts, turn, generator, experts)
    if experts > 1:
        return _of_each_expert(clean.view(experts, -1), rank // experts, rule, generator)
    selection = _RULES[rule](clean, rank, generator, replacement)
    if replacement and selection.scale is None:
        return Selection(
            selection.indices, torch.ones(rank, dtype=torch.float32, device="cpu")
        )  # a scale says that rows may repeat
    return selection


def _of_each_expert(norms: Tensor, rank: int, rule: str, generator: torch.Generator | None) -> Selection:
    """``rank`` rows of each expert; ``norms`` is ``(experts, m)``."""
    chosen = []
    for number, own in enumerate(norms):
        selection = _RULES[rule if own.any() else "uniform"](own, rank, generator, False)
        chosen.append(selection.indices + number * norms.shape[1])
    return Selection(torch.cat(chosen))


def check_rule(rule: str, replacement: bool) -> None:
    """Raise ``ValueError`` unless ``rule`` is registered and may be used with this ``replacement``."""
    if rule not in _RULES:
        raise ValueError(f"Unknown selection {rule!r}; available: {', '.join(_RULES)}")
    if rule in ("top_r", BALANCED) and replacement:
        raise ValueError(f"selection={rule!r} takes replacement=False: it selects no row twice")


def sampled(weights: Callable[[Tensor], Tensor]) -> Rule:
    """A sampling rule from ``weights(norms) -> (m,)``, non-negative and proportional to the probabilities ``q``."""

    def rule(norms: Tensor, rank: int, generator: torch.Generator | None, replacement: bool) -> Selection:
        draw = _draw_with_replacement if replacement else _draw_without_replacement
        return draw(weights(norms), rank, generator)

    return rule


def _top_r(norms: Tensor, rank: int, generator: torch.Generator | None, replacement: bool) -> Selection:
    order = torch.sort(norms, descending=True, stable=True).indices
    return Selection(order[:rank].sort().values)


def _draw_with_replacement(weights: Tensor, rank: int, generator: torch.Generator | None) -> Selection:
    total = weights.sum()
    q = weights / total if total > 0 else torch.full_like(weights, 1.0 / weights.numel())
    indices = torch.multinomial(q, rank, replacement=True, generator=generator).sort().values
    return Selection(indices, (rank * q[indices]).rsqrt().float())


def _draw_without_replacement(weights: Tensor, rank: int, generator: torch.Generator | None) -> Selection:
    """Successive draws, as one top-r of Gumbel-perturbed log-weights (Vieira, 2014; Kool et al., 2019, section 2.2)."""
    uniform = torch.rand(weights.shape, generator=generator, dtype=torch.float64, device="cpu")
    gumbel = -torch.log(-torch.log(uniform))
    keys = torch.where(weights > 0, weights.log(), _LAST) + gumbel
    return Selection(keys.topk(rank).indices.sort().values)


def _in_turn(size: int, rank: int, turn: int, generator: torch.Generator | None, experts: int) -> Selection:
    """Part number ``turn`` of a random order of ``size`` rows, of each expert."""
    part = slice(turn * rank, (turn + 1) * rank)
    orders = [torch.randperm(size, generator=generator, device="cpu") for _ in range(experts)]
    return Selection(torch.cat([order[part].sort().values + i * size for i, order in enumerate(orders)]))


def _balanced(norms: Tensor, rank: int, generator: torch.Generator | None, replacement: bool) -> Selection:
    return _in_turn(norms.numel(), rank, 0, generator, 1)


register_rule("top_r", _top_r)
register_rule("multinomial_norm", sampled(lambda norms: norms))
register_rule("multinomial_norm_sq", sampled(torch.square))
register_rule("uniform", sampled(torch.ones_like), needs_norms=False)
register_rule(BALANCED, _balanced, needs_norms=False)
