"""The metrics under vLLM's names against the names in vLLM's own code: `make peer-test`."""

from __future__ import annotations

import re

import pytest

from tests.contract.gateway.test_vllm_metrics import ALL
from tests.peer.test_vllm import PYTHON

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="vLLM's environment is missing: make peer-test makes it")
_KINDS = {"gauge": "_gauge_cls", "counter": "_counter_cls", "histogram": "_histogram_cls"}


def test_every_name_is_one_of_vllms_and_of_its_kind() -> None:
    [path] = PYTHON.parents[1].glob("lib/python3*/site-packages/vllm/v1/metrics/loggers.py")
    text = path.read_text(encoding="utf-8")
    declared = {name: kind for kind, name in re.findall(r'self\.(_\w+_cls)\(\s*name="vllm:(\w+)"', text)}
    assert 'name = "vllm:cache_config_info"' in text  # a gauge that is declared by a variable
    declared["cache_config_info"] = _KINDS["gauge"]
    drafts = (path.parents[1] / "spec_decode" / "metrics.py").read_text(encoding="utf-8")
    declared |= dict.fromkeys(re.findall(r'\("vllm:(spec_decode_\w+)", "', drafts), _KINDS["counter"])
    assert {name: declared.get(name) for name in ALL} == {name: _KINDS[kind] for name, (kind, _) in ALL.items()}
