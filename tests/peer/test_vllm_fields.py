"""tests/support/vllm_fields.json against vLLM's own request classes: `make peer-test`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.peer.test_vllm import PYTHON, ROOT

FIELDS = ROOT / "tests" / "support" / "vllm_fields.json"
DRIVER = Path(__file__).parent / "vllm_fields.py"

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM's environment is missing: make peer-test makes it"),
]


def test_the_stored_fields_are_vllms(tmp_path: Path) -> None:
    """tests/unit/gateway/test_vllm_fields.py shows that each of them is served, refused or ignored on purpose."""
    done = subprocess.run([PYTHON, DRIVER], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout[done.stdout.index("{") :]) == json.loads(FIELDS.read_text())
