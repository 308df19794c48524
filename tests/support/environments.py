"""Python environments of other systems. The requirements files in tests/peer/ say what is installed in each."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python_of(name: str) -> Path:
    """The Python of the environment, which is made if it is missing. Skips the test where it cannot be installed."""
    try:
        made = subprocess.run(
            [ROOT / "tests/peer/env.sh", name], capture_output=True, text=True, timeout=600, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"installing {name} takes more than 600 s")
    if made.returncode:
        pytest.skip(f"{name} cannot be installed: {made.stderr.strip()[-300:]}")
    return Path(made.stdout.strip())
