"""``scripts/bench/many_models.py`` runs; its times depend on the machine and are not tested."""

import runpy
from pathlib import Path

import pytest

script = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "bench" / "many_models.py"))


@pytest.mark.slow
def test_every_contestant_alone_and_beside_others() -> None:
    table = script["race"](2, 1, 1)
    rows = {(row.optimizer, row.other_models) for row in table.itertuples()}
    assert rows == {(name, count) for name in script["CONTESTANTS"] for count in (0, 2)}
    assert (table.loc[table.other_models == 0, "times_alone"] == 1).all()
    assert (table[["step_us", "first_us"]] > 0).all(axis=None)
