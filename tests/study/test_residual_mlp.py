import math

import pandas as pd
import pytest
import residual_mlp


def test_all_methods_begin_alike(tmp_path):
    residual_mlp.main(["--steps", "1", "--csv", str(tmp_path / "losses.csv")])
    found = pd.read_csv(tmp_path / "losses.csv")
    assert found.groupby("seed")["loss"].nunique().eq(1).all()
    assert found["loss"].between(0.95 * math.log(256), 1.15 * math.log(256)).all()
    assert found.groupby("method").size().to_dict() == dict.fromkeys(residual_mlp.METHODS, 6)


@pytest.mark.slow
def test_it_learns():
    text = residual_mlp.text_of_the_library()
    for rank in residual_mlp.METHODS.values():
        assert residual_mlp.train(text, rank, 4e-3, 0, steps=60) < 3.5
