"""Tables about the learning rates of projected weights: how they go with the share of the columns, and with width."""

from __future__ import annotations

from fractions import Fraction
from statistics import fmean, stdev

from page_tables.markdown import table
from page_tables.source import Row, read, select, settings_of
from page_tables.study import AS_ADAMW

RATE = 0.012
"""The learning rate of the width study."""
OTHER_RATES = {str(RATE), "0.003"}
"""Learning rates of embeddings, head and norms in long runs."""
WIDTHS = {"1m": "128", "9m-wide": "320", "28m-wide": "768"}
"""Hidden size of its models."""
WIDEST = {"200m-wide": "2,048", "800m-wide": "4,096"}
"""Hidden size of models that ran on a GPU alone, with fewer rates."""
OF_THE_LAW = {"lr", "scale", "rank", "explore", "compact", "autocast"}
"""Settings in which cells of the law differ."""


def is_of_the_law(values: dict[str, str]) -> bool:
    """Whether a cell is of the law: AdamW with two rates, or compact mode with r = q and otherwise default options."""
    if (rank := values.get("rank", "0.25")) == "1.0":
        return set(values) <= OF_THE_LAW | {word.partition("=")[0] for word in AS_ADAMW}
    return "compact" in values and set(values) <= OF_THE_LAW and values.get("explore", rank) == rank


def linear_rate(values: dict[str, str]) -> float:
    """The learning rate of linear layers; in compact mode ``scale`` is ``"auto"`` where a cell names none."""
    rank = float(values.get("rank", 0.25))
    auto = 1 / (rank + float(values.get("explore", rank))) if "compact" in values else 1.0
    return float(values["lr"]) * float(values.get("scale", auto))


def law(steps: str) -> str:
    """Losses in float32 by width, fraction and rate of the projected weights at a horizon: the study ``law``."""
    losses: dict[tuple[int, float], dict[float, list[str]]] = {}
    for row in sorted(read("cells.csv"), key=lambda row: row["seed"]):
        values = settings_of(row)
        fits = row["steps"] == steps and row["optimizer"] == "grass" and values["lr"] == str(RATE)
        if fits and "autocast" in values and is_of_the_law(values):
            fraction, rate = float(values.get("rank", 0.25)), RATE * float(values["scale"])
            of = losses.setdefault((int(WIDTHS[row["model"]]), fraction), {})
            of.setdefault(rate, []).append(f"{float(row['loss_100']):.3f}")
    rates = sorted({rate for found in losses.values() for rate in found})
    lines = []
    for (hidden, fraction), found in sorted(losses.items(), key=lambda item: (item[0][0], -item[0][1])):
        name = "AdamW, two rates" if fraction == 1 else f"{Fraction(fraction)} n"
        lines.append([str(hidden), name, *(" ".join(found.get(rate, [])) for rate in rates)])
    return table(["hidden size", "r = q", *(f"{rate:.2g}" for rate in rates)], lines)


def law_fit() -> str:
    """The best rates of ``law.csv`` as multiples of AdamW's, and the exponent that fits them."""
    shares, lines = _shares(), []
    for (hidden, steps), of in _by_width_and_horizon().items():
        left = [abs(float(row["residual"])) for row in of.values() if row["residual"]]
        fitted = [f"{float(of[1.0]['exponent']):.2f}", f"{2 ** max(left):.2f}"] if len(left) > 1 else ["", ""]
        times = [_times(of[share]) if share in of else "" for share in shares]
        lines.append([str(hidden), f"{steps:,}", _others(of), plain(float(of[1.0]["best"])), *times, *fitted])
    shared = ["hidden size", "steps", "other parameters", "AdamW's"]
    return table([*shared, *map(_name, shares), "exponent", "off by at most a factor"], lines)


def law_losses() -> str:
    """AdamW's losses by seed at its best rate, from ``law.csv``, and what each share of the columns adds to them."""
    shares, lines = _shares(), []
    for (hidden, steps), of in _by_width_and_horizon().items():
        adamw = _losses_by_seed(of[1.0])
        line = [str(hidden), f"{steps:,}", _others(of), mean_and_each(list(adamw.values()))]
        for share in shares:
            ours = _losses_by_seed(of[share]) if share in of else {}
            line.append(mean_and_each([ours[seed] - adamw[seed] for seed in ours if seed in adamw], "+"))
        lines.append(line)
    return table(["hidden size", "steps", "other parameters", "AdamW's", *map(_name, shares)], lines)


def precisions() -> str:
    """The differences of cells of the law that ran in two precisions, on two devices or with two seeds."""
    cells: dict[tuple[str, ...], dict[tuple[str, str], float]] = {}
    for name, device in (("cells.csv", "CPU"), ("gpu/cells.csv", "GPU")):
        for row in select(name, "pretrain & grass"):
            if is_of_the_law(values := settings_of(row)):
                kind = "float32" if values.pop("autocast", None) else device
                cell = row["model"], row["steps"], str(sorted(values.items()))
                cells.setdefault(cell, {})[kind, row["seed"]] = float(row["loss_100"])
    seeds = sorted({seed for runs in cells.values() for _, seed in runs})
    changes = {
        "bf16 autocast instead of float32": [(("float32", seed), ("CPU", seed)) for seed in seeds],
        "a GPU instead of a CPU, bf16 autocast": [(("CPU", seed), ("GPU", seed)) for seed in seeds],
        "the second seed instead of the first": [((kind, "0"), (kind, "1")) for kind in ("float32", "CPU", "GPU")],
    }
    lines = []
    for change, pairs in changes.items():
        found = [runs[new] - runs[old] for runs in cells.values() for old, new in pairs if old in runs and new in runs]
        lines.append([change, str(len(found)), f"{fmean(found):+.3f}", f"{stdev(found):.3f}"])
    return table(["change", "pairs of cells", "mean difference of losses", "standard deviation"], lines)


def _by_width_and_horizon() -> dict[tuple[int, int], dict[float, Row]]:
    """The rows of ``law.csv`` of which AdamW's best rate is known, by the share that moves; where there are others."""
    groups: dict[tuple[int, int], dict[float, Row]] = {}
    for row in read("law.csv"):
        if row["times"]:
            groups.setdefault((int(row["hidden"]), int(row["steps"])), {})[float(row["moving"])] = row
    return {key: of for key, of in sorted(groups.items()) if len(of) > 1}


def _shares() -> list[float]:
    return sorted({share for of in _by_width_and_horizon().values() for share in of} - {1.0}, reverse=True)


def _others(of: dict[float, Row]) -> str:
    """The learning rates of embeddings, head and norms at which the best rates were found."""
    return ", ".join(sorted({row["other"] for row in of.values()}))


def _name(share: float) -> str:
    return f"r = q = {Fraction(share / 2)} n"


def _losses_by_seed(row: Row) -> dict[str, float]:
    return dict(zip(row["seeds"].split(), map(float, row["losses"].split()), strict=True))


def mean_and_each(values: list[float], sign: str = "") -> str:
    """The mean in bold before the values of several seeds; the value of one."""
    each = " ".join(f"{value:{sign}.3f}" for value in values)
    return f"**{fmean(values):{sign}.3f}** ({each})" if len(values) > 1 else each


def _times(row: Row) -> str:
    """A multiple of AdamW's rate; a bound where the best is the largest or the smallest that was tried."""
    if row["inside"] == "True":
        return f"{float(row['times']):.1f}"
    largest = max(map(float, row["tried"].split()))
    return f"{'at least' if float(row['best']) >= 0.99 * largest else 'at most'} {float(row['times']):.1f}"


def starting_rates() -> str:
    """The best rates of linear layers by width, of AdamW with two rates and of compact mode, and where they lead.

    Those of the first seed, which ran with all rates: seeds differ by more than neighbouring rates do.
    """
    losses: dict[tuple[str, float], dict[float, float]] = {}
    for row in select("cells.csv", "pretrain & 270 & grass & seed=0"):
        values = settings_of(row)
        if values["lr"] == str(RATE) and is_of_the_law(values) and row["model"] in WIDTHS:
            of = losses.setdefault((row["model"], float(values.get("rank", 0.25))), {})
            of[RATE * float(values.get("scale", 1))] = float(row["loss_100"])
    best = {key: min(of, key=of.__getitem__) for key, of in losses.items()}
    lines = []
    for model, hidden in WIDTHS.items():
        adam, ours = best[model, 1.0], best[model, 0.125]
        times = f"{plain(ours)}, {ours / adam:.0f} times AdamW's"
        lines.append([hidden, plain(adam), f"{RATE:g}", plain(4 * adam), times, "measured"])
    for model, hidden in WIDEST.items():
        tried = {linear_rate(settings_of(row)): float(row["loss_100"]) for row in _of_adamw(model)}
        adam = min(tried, key=tried.__getitem__)
        where = "the largest" if adam == max(tried) else "the best"
        basis = f"{where} of {len(tried)} tried, on a GPU"
        lines.append([hidden, plain(adam), f"{RATE:g}", plain(4 * adam), "not run at n/8", basis])
    heads = [
        "hidden size",
        "linear layers: `lr`",
        "embeddings, head, norms",
        'what `scale="auto"` makes of it, r = q = n/8',
        "best of those tried there",
    ]
    return table([*heads, "basis"], lines)


def _of_adamw(model: str) -> list[Row]:
    """The cells of AdamW with two rates that a GPU ran of a model."""
    return [row for row in select("gpu/cells.csv", model) if settings_of(row).get("rank") == "1.0"]


def plain(rate: float) -> str:
    """A rate with two digits and without an exponent."""
    return f"{float(f'{rate:.2g}'):.7f}".rstrip("0")
