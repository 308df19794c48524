"""The Python examples of the README, against a real server. Only the addresses are replaced."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.stack import Stack

README = Path(__file__).parents[2] / "README.md"


def test_the_python_examples_of_the_readme_run(stack: Stack, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 3
    script = tmp_path / "readme.py"
    code = "\n".join(blocks)
    for ours, theirs in (("http://127.0.0.1:8000", stack.url), ("127.0.0.1:8001", f"127.0.0.1:{stack.grpc_port}")):
        assert ours in code
        code = code.replace(ours, theirs)
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer, call, told, story = done.stdout.split("\n", 3)
    assert answer == "3 + 4 = 7."
    assert call == 'get_weather {"city": "Oslo"}'
    assert told == "The weather in Oslo is sunny."
    assert len(story) > 40
