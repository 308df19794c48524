"""Web pages of other origins: preflight requests, and the headers that let a page read an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.cli.up.health import GatewayProbe
from tests.contract.gateway.conftest import MODEL, Running, Start, _end, _scheduler, _start, eventually, until
from tests.contract.gateway.test_overload import answer as received
from tests.contract.gateway.test_overload import connect

PAGE = "https://page.example"
ASKS = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,idempotency-key,x-stainless-lang",
}
HEADERS = {"Origin": PAGE, "Content-Type": "application/json"}
BODY = {"model": MODEL, "prompt": "x", "max_tokens": 3}


async def test_pages_of_other_origins_are_refused_by_default(running: Running) -> None:
    assert (await running.http.options("/v1/completions", headers=ASKS)).status_code == 405
    refused = await running.http.post("/v1/completions", headers=HEADERS, json=BODY)
    assert (refused.status_code, refused.json()["error"]["reason"]) == (403, "origin_not_allowed")
    assert not [name for name in refused.headers if name.startswith("access-control")]


def simple(path: str, content_type: str, origin: str) -> bytes:
    """A request that a browser sends for a page without a preflight request."""
    body = json.dumps(BODY)
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1:8000", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"Content-Type: {content_type}"] if content_type else []
    return "\r\n".join([*lines, *([origin] if origin else []), "", body]).encode()


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/nowhere"])
async def test_a_request_of_another_origin_without_a_preflight_is_refused(
    running: Running, path: str, content_type: str
) -> None:
    for origin in (f"Origin: {PAGE}", "Origin: null", "Sec-Fetch-Site: cross-site", "Origin: http://127.0.0.1:3000"):
        with connect(running, simple(path, content_type, origin)) as connection:
            said = await received(connection)
        assert said.startswith(b"HTTP/1.1 403 "), said
        assert b"origin_not_allowed" in said or b"permission_error" in said, said
    assert not running.scheduler.submissions


async def test_other_clients_send_no_origin_or_their_own(running: Running) -> None:
    own = "Origin: http://127.0.0.1:8000"
    for origin in ("", own, f"{own}\r\nSec-Fetch-Site: same-origin", "Sec-Fetch-Site: none"):
        with connect(running, simple("/v1/completions", "application/json", origin)) as connection:
            said = await received(connection)
        assert said.startswith(b"HTTP/1.1 200 "), said
    assert (await running.http.get("/v1/models", headers={"Origin": PAGE})).status_code == 200, "a GET changes nothing"


async def test_a_name_that_a_page_has_rebound_to_loopback_is_refused(running: Running) -> None:
    """DNS rebinding: the browser sends the name of the page as the host. On every path but those of probes, the gateway
    refuses the name before any work for the request."""
    before = len(running.scheduler.submissions)
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/nowhere")):
        told = await running.http.request(method, path, headers={"Host": "page.example:8000"}, json=BODY)
        assert told.status_code == 403
        assert told.json()["error"]["reason"] == "host_not_allowed"
        assert told.json()["error"]["message"].startswith("Host: 'page.example:8000' is not a name of this server")
        assert told.headers["x-request-id"]
    assert len(running.scheduler.submissions) == before
    for path in ("/health", "/ready", "/ping"):
        assert (await running.http.get(path, headers={"Host": "10.1.2.3"})).status_code == 200, "probes may use an IP"
    assert (await running.http.get("/metrics", headers={"Host": "10.1.2.3"})).status_code == 200, "so may Prometheus"
    assert (await running.http.get("/metrics", headers={"Host": "evil.example"})).status_code == 403
    for host in ("localhost", "[::1]:99", "127.0.0.1"):
        assert (await running.http.get("/v1/models", headers={"Host": host})).status_code == 200


async def test_other_names_are_answered_where_the_operator_lists_them(start: Start) -> None:
    running = await start(settings={"allowed_hosts": "127.0.0.1, *.example"})
    assert (await running.http.get("/v1/models", headers={"Host": "page.example"})).status_code == 200
    assert (await running.http.get("/v1/models", headers={"Host": "page.example.com"})).status_code == 403


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def public() -> AsyncIterator[Running]:
    """A gateway that any page may call."""
    running = await _start(_scheduler(), True, {"allowed_origins": "*"})
    yield running
    await _end(running)


async def test_a_preflight_request_of_an_allowed_origin_succeeds(public: Running) -> None:
    before = await public.http.options("/v1/completions", headers=ASKS)
    assert before.status_code == 200
    assert before.headers["access-control-allow-origin"] == "*"
    assert "POST" in before.headers["access-control-allow-methods"]
    assert before.headers["access-control-allow-headers"] == ASKS["Access-Control-Request-Headers"]


@pytest.mark.parametrize(("more", "status"), [({}, 200), ({"stream": True}, 200), ({"n": 0}, 400)])
async def test_a_page_may_read_every_answer(public: Running, more: dict[str, object], status: int) -> None:
    answer = await public.http.post("/v1/completions", headers=HEADERS, json={**BODY, **more})
    assert answer.status_code == status
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert answer.text.endswith("data: [DONE]\n\n") == ("stream" in more)
    without = await public.http.post("/v1/completions", json={**BODY, **more})
    assert not [name for name in without.headers if name.startswith("access-control")]


async def test_a_page_may_read_a_429_and_its_headers(start: Start) -> None:
    running = await start(settings={"max_live_requests": 1, "allowed_origins": "*"})
    running.scheduler.paused = True
    task = asyncio.create_task(running.http.post("/v1/completions", json=BODY))
    await until(lambda: running.scheduler.num_running == 1)
    refused = await running.http.post("/v1/completions", headers=HEADERS, json=BODY)
    assert refused.status_code == 429
    assert refused.headers["access-control-allow-origin"] == "*"
    exposed = set(refused.headers["access-control-expose-headers"].split(", "))
    plain = {"content-type", "content-length", "date", "connection", "vary"}
    sent = {name for name in refused.headers if not name.startswith("access-control")} - plain
    assert sent <= exposed, "a page's script sees all that another client sees"
    assert {"retry-after", "retry-after-ms", "x-should-retry", "x-request-id", "server-timing"} <= exposed
    running.scheduler.paused = False
    assert (await task).status_code == 200


@pytest.mark.parametrize("allowed", ["https://other.example, https://third.example:8443"])
async def test_an_origin_that_is_not_listed_is_refused(start: Start, allowed: str) -> None:
    running = await start(settings={"allowed_origins": allowed})
    assert (await running.http.options("/v1/completions", headers=ASKS)).status_code == 400
    answer = await running.http.post("/v1/completions", headers=HEADERS, json=BODY)
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers
    for origin in filter(None, allowed.split(", ")):
        assert (await running.http.post("/v1/completions", headers={"Origin": origin}, json=BODY)).status_code == 200
        answer = await running.http.get("/v1/models", headers={"Origin": origin})
        assert answer.headers["access-control-allow-origin"] == origin
        assert answer.headers["vary"] == "Origin"


async def test_the_probe_of_paceline_up_works_with_any_allowed_hosts(start: Start) -> None:
    running = await start(settings={"allowed_hosts": "api.example.com"}, scheduler_up=False)
    assert (await running.http.get("/v1/models")).status_code == 403
    probe = GatewayProbe(f"http://{running.addresses.http}")
    assert await asyncio.to_thread(probe.model_name) == "paceline-demo"
    assert not await asyncio.to_thread(probe.is_ready)
    await running.scheduler.start()
    await eventually(lambda: asyncio.to_thread(probe.is_ready))
