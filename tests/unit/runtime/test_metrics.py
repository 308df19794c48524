"""/metrics over GET and HEAD."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest

from services.runtime.metrics import start_metrics_server


def fetch(port: int, method: str, path: str = "/metrics") -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read()


def test_get_head_and_close() -> None:
    server = start_metrics_server("127.0.0.1", 0)
    try:
        status, headers, body = fetch(server.port, "GET")
        assert status == 200
        assert headers["content-type"].startswith("text/plain")
        assert b"process_resident_memory_bytes" in body
        status, headers, body = fetch(server.port, "HEAD")
        assert (status, body) == (200, b"")
        assert headers["content-type"].startswith("text/plain")
    finally:
        server.close()
    with pytest.raises(urllib.error.URLError):
        fetch(server.port, "GET")


def test_a_taken_port_is_an_oserror_unless_a_free_one_will_do() -> None:
    server = start_metrics_server("127.0.0.1", 0)
    try:
        another = start_metrics_server("127.0.0.1", server.port, or_free=True)
        assert fetch(another.port, "GET")[0] == 200
        assert another.port != server.port
        another.close()
        with pytest.raises(OSError, match="in use"):
            start_metrics_server("127.0.0.1", server.port)
    finally:
        server.close()
