import errno
import signal

import pytest
import torch
from transformers import LlamaForCausalLM

from grass.memory.llama import llama_config
from training.run import checkpoint
from training.run.checkpoint import CheckpointStore, export_model
from training.run.metrics import COLUMNS, truncate_csv
from training.run.models import build_llama
from training.run.signals import GracefulStop


def llama(seed=0, dtype=torch.float32):
    return build_llama(llama_config("1m", vocab_size=257, max_seq_len=16), seed=seed, dtype=dtype)


def same_weights(one, two):
    ours, theirs = one.state_dict(), two.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def test_round_trip(store):
    model, other = llama(0), llama(1)
    state = {"step": 3, "rng": torch.get_rng_state(), "nested": {"lr": [1e-3], "name": "grass", "none": None}}
    state["optimizer"] = {"state": {0: {"step": 3}, 1: {}}, "param_groups": [{"lr": 0.1}]}
    path = store.save(3, model, state)
    assert store.latest() == path
    loaded = store.load(path, other)
    assert same_weights(model, other)
    assert torch.equal(loaded.pop("rng"), state.pop("rng"))
    assert loaded == state


def test_plain_transformers_loads_checkpoints_and_exports(store, tmp_path):
    model = llama(dtype=torch.bfloat16)
    export_model(llama(1), tmp_path / "model")
    export_model(model, tmp_path / "model")
    for path in (store.save(1, model, {}), tmp_path / "model"):
        loaded = LlamaForCausalLM.from_pretrained(path)
        assert loaded.dtype == torch.bfloat16
        assert same_weights(loaded, model)


def test_only_the_newest_are_kept(store):
    for step in (9, 10, 100):
        store.save(step, llama(), {})
    assert sorted(path.name for path in store.root.iterdir()) == ["step-00000010", "step-00000100"]


def test_nothing_to_load(store):
    assert store.latest() is None


STATE = {"step": 1, "optimizer": {"state": {0: {"step": 3}}}}
FILES = ["state.pt", "optimizer-00001.pt", "model.safetensors", "config.json", "manifest.json"]


def flip(file, count=64):
    """Invert bytes in the middle of a file."""
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    data[middle : middle + count] = bytes(255 - byte for byte in data[middle : middle + count])
    file.write_bytes(data)


DAMAGES = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "missing": lambda file: file.unlink(),
    "flipped": flip,
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_checkpoints_are_passed_over_and_named(store, file, damage, caplog):
    good, bad = store.save(1, llama(), STATE), store.save(2, llama(), STATE)
    damage(bad / file)
    assert store.latest() == good
    (record,) = caplog.records
    assert str(bad) in record.getMessage()
    assert file in record.getMessage()


def test_all_damaged_is_an_error(store):
    for step in (1, 2):
        flip(store.save(step, llama(), STATE) / "state.pt")
    with pytest.raises(ValueError, match=r"Every checkpoint .* step-00000002 \(state.pt .* step-00000001 \(state.pt"):
        store.latest()


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_checkpoints_do_not_count_as_kept(store, damage):
    """The run resumes at step 1, before two damaged checkpoints."""
    store.save(1, llama(), STATE)
    store.save(20, llama(), STATE)
    store.keep = 3
    store.save(30, llama(), STATE)
    store.keep = 2
    for step in (20, 30):
        damage(store.root / f"step-{step:08d}" / "state.pt")
    resumed = CheckpointStore(store.root, keep=2)
    assert resumed.latest() == store.root / "step-00000001"
    for step in (5, 10):
        assert resumed.save(step, llama(), STATE).exists()
    assert [path.name[-2:] for path in resumed.paths()] == ["05", "10", "20", "30"]
    assert resumed.latest().name == "step-00000010"
    for step in (20, 30, 40):
        resumed.save(step, llama(), STATE)
    assert [path.name[-2:] for path in resumed.paths()] == ["30", "40"]


def test_the_checkpoint_just_saved_stays(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(9, llama(), STATE)
    assert store.save(3, llama(), STATE).exists()


@pytest.mark.parametrize("write", ["write_weights", "write_state", "_flush"])
def test_a_full_disk_leaves_nothing_unfinished(store, write, monkeypatch):
    good = store.save(1, llama(), STATE)

    def full(*arguments, **keywords):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, write, full)
        with pytest.raises(OSError, match="No space left"):
            store.save(2, llama(), STATE)
    assert list(store.root.iterdir()) == [good]


def test_what_a_killed_process_left_makes_room_first(store, monkeypatch):
    (store.root / ".incomplete-step-00000001-abcdef01").mkdir(parents=True)
    seen = []
    monkeypatch.setattr(checkpoint, "write_state", lambda *_: seen.extend(store.root.iterdir()))
    store.save(2, llama(), STATE)
    assert [path.name.rpartition("-")[0] for path in seen] == [".incomplete-step-00000002"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize(
    "moment",
    [
        (checkpoint, "write_weights"),
        (torch, "save"),
        (checkpoint, "_flush"),
        (checkpoint.Path, "write_text"),
        (checkpoint.Path, "rename"),
    ],
    ids=lambda moment: moment[1],
)
def test_death_while_saving_leaves_the_previous_checkpoint(store, moment, monkeypatch):
    good = store.save(1, llama(), {"step": 1})

    def die(*arguments, **keywords):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(*moment, die)
        with pytest.raises(Killed):
            store.save(2, llama(), {"step": 2})
    assert store.latest() == good
    assert len(list(store.root.iterdir())) == 2, "the unfinished directory, with another name"
    assert store.save(2, llama(), {"step": 2}) == store.latest()
    assert sorted(path.name for path in store.root.iterdir()) == ["step-00000001", "step-00000002"]


def test_checkpoints_hold_no_code(store):
    path = store.save(1, llama(), {"projector": GracefulStop()})
    with pytest.raises(Exception, match="weights_only"):
        store.load(path, llama())


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="keep=0: must be >= 1"):
        CheckpointStore(tmp_path, keep=0)


def test_first_signal_asks_and_the_second_acts():
    received = []
    previous = signal.signal(signal.SIGTERM, lambda *_: received.append("default"))
    try:
        with GracefulStop() as stop:
            assert not stop.requested
            signal.raise_signal(signal.SIGTERM)
            assert stop.requested
            assert received == []
            signal.raise_signal(signal.SIGTERM)
            assert received == ["default"]
        signal.raise_signal(signal.SIGTERM)
        assert received == ["default"] * 2
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_csv_drops_later_and_half_written_rows(tmp_path):
    path = tmp_path / "metrics.csv"
    header = ",".join(COLUMNS)
    path.write_text(f"{header}\n9,1\n10,2\n11,3\n1")
    truncate_csv(path, 10)
    assert path.read_text() == f"{header}\n9,1\n10,2\n"
    truncate_csv(path, 0)
    assert path.read_text() == f"{header}\n"
