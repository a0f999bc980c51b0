import math

import pandas as pd
import pytest
import torch
import word_counts


@pytest.mark.slow
def test_all_methods_begin_alike(tmp_path):
    word_counts.main(["--steps", "1", "--csv", str(tmp_path / "losses.csv")])
    found = pd.read_csv(tmp_path / "losses.csv")
    # a single step at rates of at most 0.004 moves the loss of an untrained classifier by less than a tenth
    assert found["loss"].between(0.8 * math.log(word_counts.CLASSES), 1.2 * math.log(word_counts.CLASSES)).all()
    assert found.groupby("method").size().to_dict() == dict.fromkeys(word_counts.METHODS, 6)
    assert found["zeros"].between(0.9, 1).all()


def test_texts_held_out_are_no_others():
    texts = word_counts.Texts(torch.arange(24.0).view(24, 1), torch.zeros(24, dtype=torch.int64))
    own, held_out = (texts.part(held_out=held_out).counts.flatten().tolist() for held_out in (False, True))
    assert held_out == [0, 8, 16]
    assert sorted(own + held_out) == list(range(24))


@pytest.mark.slow
def test_it_learns():
    texts = word_counts.texts_of_the_library()
    for rank, exclude in word_counts.METHODS.values():
        assert word_counts.train(texts, rank, exclude, 1e-3, 0, steps=100) < 1.0
