"""The gateway's process for large bodies starts with the first large body and ends with the gateway, also after a
kill."""

from __future__ import annotations

import signal

import httpx
import psutil
import pytest

from tests.support.stack import Stack

JUNK = {"prompt": [5, 6, 7], "max_tokens": 2, "metadata": {"x": [{}] * 50_000}}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_process_for_large_bodies_ends_with_its_gateway(own_stack: Stack, number: signal.Signals) -> None:
    stack = own_stack.up()
    gateway = psutil.Process(stack.processes["gateway"].pid)
    assert httpx.post(f"{stack.url}/v1/completions", json={"prompt": [5]}, timeout=60).status_code == 200
    assert not gateway.children(recursive=True)
    assert httpx.post(f"{stack.url}/v1/completions", json=JUNK, timeout=60).status_code == 200
    children = gateway.children(recursive=True)
    assert children
    stack.kill("gateway", number)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
