import pytest

GRID = """
model: 1m
data: {batch_size: 1, seq_len: 16, eval_blocks: 2}
finetuning:
  classify: {batch_size: 4, max_length: 16, examples: 12}
  instruct: {batch_size: 2, max_length: 96, examples: 12}
horizons: {short: 10, long: 20}
methods:
  adamw: {name: adamw}
  grass: {name: grass, rank: 0.125, update_interval: 3}
studies:
  - {name: learning rate, methods: [adamw, grass], horizon: short, seeds: [0], vary: {lr: [0.001, 0.01]}}
  - {name: final, methods: [adamw], horizon: short, seeds: [0, 1], set: {lr: 0.01, betas: [0.8, 0.9]}}
  - {name: finetuning, task: classify, methods: [adamw], horizon: short, seeds: [0]}
  - {name: finetuning, task: instruct, methods: [grass], horizon: short, seeds: [0]}
  - {name: again, methods: [grass], horizon: short, seeds: [0], set: {lr: 0.01}}
"""


@pytest.fixture
def grid_file(tmp_path):
    path = tmp_path / "grid.yaml"
    path.write_text(GRID)
    return path


@pytest.fixture(scope="session")
def base_files():
    """A few files to make a base model from in no time."""
    from base import other_files

    return other_files()[:160:20]


@pytest.fixture(scope="session")
def base(tmp_path_factory, base_files):
    """A base model that has learnt next to nothing."""
    from base import ensure_base

    return ensure_base(tmp_path_factory.mktemp("base") / "base", steps=10, files=base_files, autocast=False)
