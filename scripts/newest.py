"""Install the newest torch and transformers beside all that the tests need: what `make test-next` tests with.

    python -m venv .venv-next && .venv-next/bin/python scripts/newest.py

Bounds of torch and transformers are left out, so pip takes the newest that the other packages allow. Further arguments
are pip's; ``--dry-run`` only says what would be installed.
"""

import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = ("hf", "finetune", "docs", "bench", "trl", "lightning", "sweep", "test")


def requirements() -> list[str]:
    """What the package and the extras of the tests require, without bounds of torch and transformers."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = [config["options"]["install_requires"], *(config["options.extras_require"][name] for name in EXTRAS)]
    every = {line.strip() for text in lines for line in text.splitlines() if line.strip()}
    return sorted({re.sub(r"^(torch|transformers)[<>=].*", r"\1", line) for line in every})


def main() -> None:
    """Install the requirements, then the package itself without asking for its own bounds."""
    pip = [sys.executable, "-m", "pip", "install", *sys.argv[1:]]
    subprocess.run([*pip, "--upgrade", *requirements()], check=True)
    subprocess.run([*pip, "--no-deps", "--editable", str(ROOT)], check=True)
    versions = "import torch, transformers; print('torch', torch.__version__, 'transformers', transformers.__version__)"
    if "--dry-run" not in sys.argv:
        subprocess.run([sys.executable, "-c", versions], check=True)


if __name__ == "__main__":
    main()
