"""State in files: errors come before training, not in its middle."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from grass import Offload
from grass.offload.host_storage import HostStorage
from tests.offload.training import build, train


def test_a_full_disk_is_an_error_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 0, 10))
    model, optimizer = build("compact", offload=Offload(path=tmp_path))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(OSError, match=r"needs .* GB in .*which has"):
        train(model, optimizer, 1)
    assert not optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="must be a directory"):
        build("full", offload=Offload(path=tmp_path / "file"))


def test_an_empty_path_is_refused() -> None:
    with pytest.raises(ValueError, match="Invalid path='': must name a directory"):
        Offload(path="")


def test_tensors_keep_shape_strides_and_values(tmp_path: Path) -> None:
    storage = HostStorage(tmp_path)
    for tensor in (torch.randn(300, 200), torch.randn(300, 200).t(), torch.randn(3), torch.randn(400, 300).bfloat16()):
        copy = storage.copy(tensor)
        assert copy.stride() == tensor.stride()
        assert torch.equal(copy, tensor)
