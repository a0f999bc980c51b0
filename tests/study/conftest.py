import sys
from pathlib import Path

import pytest

STUDY = Path(__file__).parents[2] / "scripts" / "study"
sys.path.insert(0, str(STUDY))

GRID = """
model: 1m
data: {batch_size: 1, seq_len: 16, eval_blocks: 2}
horizons: {short: 10, long: 20}
methods:
  adamw: {name: adamw}
  grass: {name: grass, rank: 0.125, update_interval: 3}
studies:
  - {name: learning rate, methods: [adamw, grass], horizon: short, seeds: [0], vary: {lr: [0.001, 0.01]}}
  - {name: final, methods: [adamw], horizon: short, seeds: [0, 1], set: {lr: 0.01, betas: [0.8, 0.9]}}
  - {name: again, methods: [grass], horizon: short, seeds: [0], set: {lr: 0.01}}
"""


@pytest.fixture
def grid_file(tmp_path):
    path = tmp_path / "grid.yaml"
    path.write_text(GRID)
    return path
