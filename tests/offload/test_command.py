"""``python -m grass.offload`` measures, prints and stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from grass.machine import rates
from grass.machine.rates import Machine
from grass.offload.__main__ import main


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SECONDS": 0.01, "HOST_ROWS": 8, "LEAST_BYTES": 1 << 14, "MOST_BYTES": 1 << 16}.items():
        monkeypatch.setattr(rates, name, value)


def test_what_is_printed_is_what_is_stored(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    main(["--device", "cpu", "--threads", "1", "--out", str(path)])
    stored, printed = Machine.load(path, "cpu", threads=1), capsys.readouterr().out
    assert stored.name in printed
    assert f"{stored.host_rate / 1e6:,.0f} million elements/s" in printed
    assert f"{stored.up_rate / 1e9:,.2f} GB/s" in printed
    main(["--device", "cpu"])
    assert "written to" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "meta"], "Invalid device='meta'. Must be a CPU or an accelerator with streams."),
        (["--device", "cpu", "--threads", "0"], "Invalid --threads=0: must be >= 1"),
        (["--device", "cpu", "--out", "{tmp}/missing/machine.json"], "No such file"),
    ],
)
def test_refusals(flags: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main([flag.format(tmp=tmp_path) for flag in flags])
    assert message in capsys.readouterr().err
