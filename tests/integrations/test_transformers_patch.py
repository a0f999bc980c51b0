"""``optim="grass_adamw"`` by the patch for transformers, applied to a copy of the files that it changes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
PATCH = ROOT / "docs" / "transformers-5.23.patch"
RUN = """
import sys, torch, transformers
from tests.integrations.runs import examples
from grass.memory.llama import llama_config
from grass.integrations.transformers import GrassFactory

assert transformers.__file__.startswith(sys.argv[1]), transformers.__file__
common = {"max_steps": 2, "learning_rate": 1e-2, "report_to": [], "use_cpu": True}
common |= {"disable_tqdm": True, "save_strategy": "no"}
weights = []
for by_name in (True, False):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(llama_config("1m", vocab_size=64, max_seq_len=16))
    named = {"optim": "grass_adamw", "optim_args": "rank=0.25, update_interval=1"} if by_name else {}
    args = transformers.TrainingArguments(sys.argv[1] + "/out", **common, **named)
    chosen = {"optimizer_cls_and_kwargs": (GrassFactory, {"args": args, "rank": 0.25, "update_interval": 1})}
    trainer = transformers.Trainer(model, args, train_dataset=examples(4), **({} if by_name else chosen))
    trainer.train()
    assert type(trainer.optimizer.optimizer).__name__ == "GrassAdamW"
    weights.append(model.state_dict())
assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
print("trained")
"""


def linked(package: Path, folder: Path, changed: set[Path]) -> None:
    """A copy of ``package`` that has the ``changed`` files as files and all else as links."""
    folder.mkdir()
    for entry in package.iterdir():
        if entry.name == "__pycache__":
            continue
        if entry in changed:
            shutil.copy(entry, folder / entry.name)
        elif any(entry in path.parents for path in changed):
            linked(entry, folder / entry.name, changed)
        else:
            (folder / entry.name).symlink_to(entry)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("patch") is None, reason="needs patch")
@pytest.mark.skipif(not transformers.__version__.startswith("5.23."), reason="the patch is for transformers 5.23")
def test_optim_by_name(tmp_path: Path) -> None:
    package = Path(transformers.__file__).parent
    names = re.findall(r"^\+\+\+ b/src/transformers/(.*)$", PATCH.read_text(), flags=re.MULTILINE)
    assert names
    linked(package, tmp_path / "transformers", {package / name for name in names})
    subprocess.run(["patch", "-p2", "-i", PATCH], cwd=tmp_path, check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "trained" in done.stdout
