"""The README's Python runs as written."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_ten_lines_run(capsys) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(README), "exec"), {})
    assert "['0', '2']" in capsys.readouterr().out
