import law
import numpy as np
import pandas as pd
import pytest
from results import CURVE
from run import DIRECTORY
from tables import read_cells

ADAMW = "rank=1.0 update_interval=1000000 selection=top_r dim=auto state_policy=reset explore=0"


def cell(model, settings, loss, **other):
    row = {"task": "pretrain", "model": model, "steps": "270", "seed": "0", "optimizer": "grass"}
    return row | {"settings": f"lr={other.pop('lr', 0.012)} {settings}", CURVE[-1]: loss} | other


def test_the_lowest_of_a_parabola_is_found_between_the_rates():
    rates = 0.01 * 2.0 ** np.arange(-2, 3)
    curve = pd.Series(1.5 + 0.2 * (np.log2(rates) - np.log2(0.013)) ** 2, index=rates)
    best, inside = law.lowest(curve)
    assert inside
    assert best == pytest.approx(0.013)


@pytest.mark.parametrize(("losses", "best"), [([1.0, 2.0, 3.0], 0.1), ([3.0, 2.0, 1.0], 0.4), ([1.0], 0.1)])
def test_the_lowest_of_a_slope_is_a_bound(losses, best):
    curve = pd.Series(losses, index=[0.1, 0.2, 0.4][: len(losses)])
    assert law.lowest(curve) == (best, False)


def test_the_exponent_of_made_up_rates_is_found():
    shares = np.array([1.0, 0.5, 0.25, 0.125])
    best = pd.DataFrame({"hidden": 64, "steps": 270, "moving": shares, "best": 0.01 * shares**-0.75, "inside": True})
    one_bound = best.assign(inside=best["moving"] != 0.25)
    for rates in (best, one_bound.assign(best=best["best"].where(one_bound["inside"], 1.0))):
        fitted = law.fit(rates)
        np.testing.assert_allclose(fitted["exponent"], 0.75)
        np.testing.assert_allclose(fitted["residual"].dropna(), 0, atol=1e-12)
    off = law.fit(best.assign(best=best["best"].where(best["moving"] != 0.125, 2 * best["best"])))
    # least squares through the origin: the doubled rate at log2(8) = 3 has 3 / (1 + 4 + 9) of its power of two
    np.testing.assert_allclose(off["exponent"], 0.75 + 3 / 14)
    np.testing.assert_allclose(off["residual"].dropna(), [-3 / 14, -6 / 14, 1 - 9 / 14])


def test_without_adamw_s_best_rate_there_is_no_multiple():
    best = pd.DataFrame({"hidden": 64, "steps": 270, "moving": [1.0, 0.5], "best": 0.1, "inside": [False, True]})
    assert law.fit(best)[["times", "exponent", "residual"]].isna().all(axis=None)


def test_only_cells_of_the_law_count():
    """Of two precisions the one with more rates; other options, methods and tasks do not count."""
    half = "rank=0.125 explore=0.125 compact=True"
    cells = [
        *(cell("1m", f"scale={scale} {ADAMW}", loss) for scale, loss in ((0.5, 3.0), (0.25, 2.0), (0.125, 3.0))),
        cell("1m", f"scale=1.0 {half}", 1.5),
        cell("1m", f"scale=1.0 {half} autocast=False", 1.0),
        cell("1m", f"scale=0.5 {half}", 1.75),
        cell("1m", f"scale=0.25 {half}", 1.8),
        cell("1m", "scale=0.25 rank=0.25 explore=0.25 compact=True", 1.0),  # one rate alone
        cell("1m", f"scale=1.0 {half}", 0.0, seed="1"),
        cell("1m", f"scale=0.5 {half}", 0.0, seed="2"),  # not at the best rate
        cell("1m", f"scale=1.0 {half} selection=balanced", 0.0),
        cell("1m", "scale=1.0 rank=0.1875 explore=0.0625 compact=True", 0.0),  # as many that move, but not r = q
        cell("1m", "scale=0.25 rank=0.125 explore=0.125", 0.0),  # dense mode
        cell("1m", "scale=0.25", 0.0, optimizer="galore"),
        cell("1m", f"scale=0.25 {half}", 0.0, task="facts"),
        cell("1m", f"scale=0.25 {half}", 0.0, lr=0.006),  # another rate of other parameters
    ]
    best = law.best_rates(pd.DataFrame(cells)).set_index("moving")
    assert best["tried"].to_dict() == {1.0: "0.0015 0.003 0.006", 0.25: "0.003 0.006 0.012"}
    assert best["inside"].to_dict() == {1.0: True, 0.25: False}
    assert best["seeds"].to_dict() == {1.0: "0", 0.25: "0 1"}
    assert best["losses"].to_dict() == {1.0: "2.0000", 0.25: "1.5000 0.0000"}


@pytest.mark.parametrize(
    ("losses", "best"), [((2.5, 1.5, 2.5), 0.003), ((2.5, 2.2, 2.5), 0.012), ((1.0, 2.0, 3.0), 0.012)]
)
def test_the_better_rate_of_other_parameters_counts(losses, best):
    """That in which the best rate of linear layers is inside, and of two such that with the lower loss."""
    former = [cell("1m", f"scale={scale} {ADAMW}", loss) for scale, loss in ((0.5, 3.0), (0.25, 2.0), (0.125, 3.0))]
    other = [
        cell("1m", f"scale={scale} {ADAMW}", loss, lr=0.003) for scale, loss in zip((2, 1, 0.5), losses, strict=True)
    ]
    (row,) = law.best_rates(pd.DataFrame(former + other)).to_dict("records")
    assert row["other"] == best


def test_seeds_that_a_precision_lacks_come_from_another():
    """At the best rate alone, and where the precision has fewer than three."""
    cells = [
        *(cell("1m", f"scale={scale} {ADAMW}", loss) for scale, loss in ((0.5, 3.0), (0.25, 2.0), (0.125, 3.0))),
        cell("1m", f"scale=0.25 {ADAMW}", 2.25, seed="1"),
        cell("1m", f"scale=0.25 {ADAMW} autocast=False", 9.0, seed="1"),
        cell("1m", f"scale=0.25 {ADAMW} autocast=False", 2.5, seed="2"),
        cell("1m", f"scale=0.5 {ADAMW} autocast=False", 9.0, seed="3"),
    ]
    (row,) = law.best_rates(pd.DataFrame(cells)).to_dict("records")
    assert (row["seeds"], row["losses"]) == ("0 1 2", "2.0000 2.2500 2.5000")
    three = [*cells, cell("1m", f"scale=0.25 {ADAMW}", 2.75, seed="2")]
    (row,) = law.best_rates(pd.DataFrame(three)).to_dict("records")
    assert row["losses"] == "2.0000 2.2500 2.7500"


def test_a_rate_that_a_precision_lacks_brackets_the_best():
    """Only where the best is not inside."""
    edge = [cell("1m", f"scale={scale} {ADAMW}", loss) for scale, loss in ((1.0, 4.0), (0.5, 3.0), (0.25, 2.0))]
    other = cell("1m", f"scale=0.125 {ADAMW} autocast=False", 3.0)
    (row,) = law.best_rates(pd.DataFrame([*edge, other])).to_dict("records")
    assert (row["tried"], row["inside"]) == ("0.0015 0.003 0.006 0.012", True)
    inside = [*edge, cell("1m", f"scale=0.125 {ADAMW}", 2.5), cell("1m", f"scale=0.0625 {ADAMW} autocast=False", 1.0)]
    (row,) = law.best_rates(pd.DataFrame(inside)).to_dict("records")
    assert (row["tried"], row["inside"]) == ("0.0015 0.003 0.006 0.012", True)


def test_the_committed_law_is_that_of_the_committed_cells(tmp_path):
    (tmp_path / "cells.csv").write_text((DIRECTORY / "cells.csv").read_text())
    law.main(["--directory", str(tmp_path), "--out", str(tmp_path)])
    assert (tmp_path / "law.csv").read_text() == (DIRECTORY / "law.csv").read_text()
    assert (tmp_path / "quality_law.png").stat().st_size > 10_000
    assert set(read_cells(tmp_path / "cells.csv")["task"]) > {"pretrain"}
