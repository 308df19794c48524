"""API keys at a gateway over loopback: both APIs, quotas, other tenants' requests, revoked keys."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import openai
import pytest

from paceline.v1 import inference_pb2, inference_pb2_grpc
from services.client import AsyncPacelineClient, Overloaded, PacelineError
from services.gateway.admission.parse_limiter import ParseLimiter
from services.gateway.errors import Gone
from services.gateway.openai import routes
from services.gateway.telemetry import request_log
from services.runtime.keys.entries import entry_text, hash_of, make_key
from tests.contract.gateway.conftest import Running, Start, eventually, until
from tests.contract.gateway.test_overload import answer, connect
from tests.contract.gateway.test_resume import events
from tests.support.sse import told
from tests.support.untyped_grpc import untyped

PATH, KEY = "/v1/completions", "Idempotency-Key"
BODY: dict[str, Any] = {"prompt": [7, 8, 9], "max_tokens": 5, "ignore_eos": True}
LONG = BODY | {"max_tokens": 300, "stream": True}
METHOD = "/paceline.v1.InferenceService/Generate"
SERVED, UNKNOWN = grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED


class Keys:
    """A key file. The key of a name is the name, repeated."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, str] = {}

    def add(self, name: str, **fields: Any) -> str:
        secret = name * 20
        self._entries[name] = entry_text(make_key(name, sha256=hash_of(secret), **fields))
        self._write()
        return secret

    def remove(self, name: str) -> None:
        del self._entries[name]
        self._write()

    def _write(self) -> None:
        new = self.path.with_suffix(".new")
        new.write_text("\n".join(self._entries.values()))
        os.replace(new, self.path)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.toml")


async def launch(start: Start, keys: Keys, settings: dict[str, Any] | None = None, **scheduler: Any) -> Running:
    return await start(settings={"keys_file": str(keys.path), **(settings or {})}, **scheduler)


def bearer(secret: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}", **more}


async def post(running: Running, secret: str, path: str = PATH, **body: Any) -> httpx.Response:
    return await running.http.post(path, json=BODY | body, headers=bearer(secret))


async def over_grpc(running: Running, metadata: dict[str, str], **fields: Any) -> tuple[grpc.StatusCode, str]:
    """How a call ended, and what was said."""
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[7, 8, 9]), **fields)
    request.sampling.max_tokens = 5
    async with grpc.aio.insecure_channel(running.addresses.grpc or "") as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, metadata=list(metadata.items()))
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code(), str(error.details())
        return SERVED, ""


# ── which calls are served ───────────────────────────────────────────────────────────────────────────────────────────


async def test_both_apis_want_a_key(start: Start, keys: Keys) -> None:
    secret = keys.add("a")
    running = await launch(start, keys)
    for headers in (bearer(secret), {"x-api-key": secret}):
        assert (await running.http.post(PATH, json=BODY, headers=headers)).status_code == 200
        assert (await over_grpc(running, headers))[0] is SERVED
    for headers, code in (({}, "missing_api_key"), ({"x-api-key": "wrong"}, "invalid_api_key")):
        refused = await running.http.post(PATH, json=BODY, headers=headers)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith('Bearer realm="paceline"')
        error = refused.json()["error"]
        assert (error["type"], error["param"], error["code"], error["reason"]) == ("Unauthorized", None, 401, code)
        assert refused.headers["x-request-id"]
        status, said = await over_grpc(running, headers)
        assert (status, said) == (UNKNOWN, error["message"])
    assert len(running.scheduler.submissions) == 4


async def test_the_openai_and_paceline_clients_send_their_key(
    start: Start, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = keys.add("a")
    running = await launch(start, keys)
    client = running.openai.with_options(api_key=secret)
    assert (await client.models.list()).data[0].id == "paceline-demo"
    with pytest.raises(openai.AuthenticationError):
        await running.openai.models.list()
    async with AsyncPacelineClient(running.addresses.grpc or "", api_key=secret) as ours:
        assert len((await ours.generate(token_ids=[7], max_tokens=3, ignore_eos=True)).token_ids) == 3
    async with AsyncPacelineClient(running.addresses.grpc or "", retry_for_s=0) as ours:
        with pytest.raises(PacelineError) as refused:
            await ours.generate(token_ids=[7], max_tokens=3)
    assert refused.value.code is UNKNOWN
    monkeypatch.setenv("PACELINE_API_KEY", secret)
    async with AsyncPacelineClient(running.addresses.grpc or "") as ours:
        await ours.generate(token_ids=[7], max_tokens=3)


async def test_health_is_open_and_metrics_are_not(start: Start, keys: Keys) -> None:
    keys.add("a")
    metrics = keys.add("m", metrics=True)
    running = await launch(start, keys)
    for path in ("/health", "/ready"):
        assert (await running.http.get(path)).status_code == 200
    for path in ("/metrics", "/v1/models", "/version", "/nothing"):
        assert (await running.http.get(path)).status_code == 401
    assert (await running.http.get("/metrics", headers=bearer("a" * 20))).status_code == 403
    text = (await running.http.get("/metrics", headers=bearer(metrics))).text
    assert "paceline_gateway_unauthenticated_requests_total 4.0" in text
    opened = await launch(start, keys, {"open_metrics": True})
    assert (await opened.http.get("/metrics")).status_code == 200


async def test_the_load_of_other_keys_is_not_shown(start: Start, keys: Keys) -> None:
    mine, theirs, metrics, boss = keys.add("a"), keys.add("b"), keys.add("m", metrics=True), keys.add("z", admin=True)
    running = await launch(start, keys)

    async def loads() -> list[int]:
        secrets = (mine, theirs, metrics, boss)
        return [(await running.http.get("/load", headers=bearer(one))).json()["server_load"] for one in secrets]

    running.scheduler.paused = True
    tasks = [asyncio.create_task(post(running, mine, n=2)), asyncio.create_task(post(running, theirs))]
    await until(lambda: running.scheduler.num_running == 3)
    assert await loads() == [2, 1, 3, 3]
    running.scheduler.paused = False
    assert [(await task).status_code for task in tasks] == [200, 200]
    await until(lambda: running.scheduler.num_running == 0)
    assert await loads() == [0, 0, 0, 0]


async def test_a_cors_preflight_needs_no_key(start: Start, keys: Keys) -> None:
    secret = keys.add("a")
    running = await launch(start, keys, {"allowed_origins": "http://page"})
    origin = {"origin": "http://page"}
    asked = origin | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    assert (await running.http.options(PATH, headers=asked)).status_code == 200
    refused = await running.http.post(PATH, json=BODY, headers=origin)
    assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (401, True)
    assert (await running.http.post(PATH, json=BODY, headers=bearer(secret) | origin)).status_code == 200


async def test_a_wrong_key_is_refused_before_the_body_and_takes_no_parse_turn(
    start: Start, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = keys.add("a")
    running = await launch(start, keys)
    turns: list[int] = []
    wait_turn = ParseLimiter.wait_turn

    async def counted(self: ParseLimiter, *args: Any, **options: Any) -> None:
        turns.append(1)
        await wait_turn(self, *args, **options)

    monkeypatch.setattr(ParseLimiter, "wait_turn", counted)
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nx-api-key: wrong\r\ncontent-length: 5000\r\n\r\n".encode()
    connections = [connect(running, head) for _ in range(100)]  # no body ever comes
    for connection in connections:
        assert (await answer(connection)).startswith(b"HTTP/1.1 401 ")
    assert not turns
    assert (await post(running, secret)).status_code == 200
    assert turns
    for connection in connections:
        connection.close()


async def test_grpc_refuses_a_wrong_key_before_the_request_is_here(start: Start, keys: Keys) -> None:
    keys.add("a")
    running = await launch(start, keys)
    async with grpc.aio.insecure_channel(running.addresses.grpc or "") as channel:
        call = untyped(channel).stream_stream(METHOD)(metadata=[("x-api-key", "wrong")])
        async with asyncio.timeout(20):
            assert await call.code() is UNKNOWN  # nothing was written
        for method in ("/paceline.v1.InferenceService/Session", "/no.Such/Method"):
            call = untyped(channel).stream_stream(method)()
            async with asyncio.timeout(20):
                assert await call.code() is UNKNOWN


# ── tenants, priorities, quotas ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_request_has_the_tenant_of_its_key(start: Start, keys: Keys) -> None:
    secret, router = keys.add("a", tenant="acme"), keys.add("r", any_tenant=True)
    running = await launch(start, keys)
    for body in ({}, {"tenant": "acme"}, {"user": "customer 7"}):
        assert (await post(running, secret, **body)).status_code == 200
    assert (await over_grpc(running, bearer(secret)))[0] is SERVED
    assert {submission.tenant for submission in running.scheduler.submissions} == {"acme"}
    refused = await post(running, secret, tenant="other")
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "tenant")
    status, said = await over_grpc(running, bearer(secret), tenant="other")
    assert (status, said) == (grpc.StatusCode.PERMISSION_DENIED, refused.json()["error"]["message"])
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "tenant": "other"}
    path = "/v1/chat/completions"
    assert (await running.http.post(path, json=chat, headers=bearer(secret))).status_code == 403
    assert (await running.http.post(path, json=chat, headers=bearer(router))).status_code == 200
    assert running.scheduler.submissions[-1].tenant == "other"


async def test_the_log_names_the_key(
    start: Start, keys: Keys, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, request_log.__name__)
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(request_log._log, "info", lambda message, **fields: lines.append(fields))
    secret = keys.add("a", tenant="acme", max_requests=3)
    running = await launch(start, keys)
    assert (await post(running, secret, n=2)).status_code == 200
    await until(lambda: bool(lines))
    assert [(line["key"], line["tenant"], line["sequences"]) for line in lines] == [("a", "acme", 2)]
    assert secret not in str(lines)


async def test_priorities_have_a_ceiling(start: Start, keys: Keys) -> None:
    secret = keys.add("a", max_priority=2.0)
    running = await launch(start, keys)
    assert (await post(running, secret, priority=2.0)).status_code == 200
    refused = await post(running, secret, priority=3)
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "priority")
    assert "3 is above 2" in refused.json()["error"]["message"]
    assert (await over_grpc(running, bearer(secret), priority=3.0))[0] is grpc.StatusCode.PERMISSION_DENIED


async def test_a_submission_has_the_min_slo_s_of_its_key(start: Start, keys: Keys) -> None:
    usual, strict, free = keys.add("a"), keys.add("b", min_slo_s=30.0), keys.add("c", min_slo_s=0.0)
    running = await launch(start, keys)
    for secret in (usual, strict, free):
        assert (await post(running, secret, ttft_slo_s=0.01, deadline_s=60.0)).status_code == 200
        headers = bearer(secret, **{"x-llm-d-slo-ttft-ms": "10"})
        assert (await running.http.post(PATH, json=BODY, headers=headers)).status_code == 200
        assert (await over_grpc(running, bearer(secret), ttft_slo_s=0.01))[0] is SERVED
    submitted = running.scheduler.submissions
    assert [(one.owner, one.min_slo_s) for one in submitted] == [("a", 1.0)] * 3 + [("b", 30.0)] * 3 + [("c", 0.0)] * 3
    assert {round(one.ttft_slo_s, 2) for one in submitted} == {0.01}, "min_slo_s does not change the goal itself"


async def test_max_requests_limits_the_requests_of_a_key_at_a_time(start: Start, keys: Keys) -> None:
    secret, other = keys.add("a", max_requests=1), keys.add("b", max_requests=1)
    running = await launch(start, keys)
    running.scheduler.paused = True
    first = asyncio.create_task(post(running, secret))
    await until(lambda: running.scheduler.num_running == 1)
    refused = await post(running, secret)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["message"] == "the key 'a' is at its limit of 1 requests at a time (max_requests)"
    assert (await post(running, secret, "/tokenize", prompt="x")).status_code == 429
    async with AsyncPacelineClient(running.addresses.grpc or "", api_key=secret, retry_for_s=0) as client:
        with pytest.raises(Overloaded, match="max_requests") as over:
            await client.generate(token_ids=[7], max_tokens=3)
    assert over.value.retry_after_s == 1.0
    second = asyncio.create_task(post(running, other))  # this key has its own limit
    await until(lambda: running.scheduler.num_running == 2)
    running.scheduler.paused = False
    assert [(await task).status_code for task in (first, second)] == [200, 200]
    assert (await post(running, secret)).status_code == 200


async def test_a_client_that_disconnects_no_longer_counts_towards_max_requests(start: Start, keys: Keys) -> None:
    secret = keys.add("a", max_requests=1)
    running = await launch(start, keys, step_s=0.01)
    async with running.http.stream("POST", PATH, json=LONG, headers=bearer(secret)) as stream:
        assert stream.status_code == 200

    async def served() -> bool:
        return (await post(running, secret)).status_code == 200

    await eventually(served)


async def test_a_client_that_disconnects_before_its_submission_no_longer_counts_towards_max_requests(
    start: Start, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`return_prompt_text` may wait for a thread, and the client may leave then."""
    secret = keys.add("a", max_requests=1)
    running = await launch(start, keys)

    async def gone(*_: Any) -> str:
        raise Gone

    with monkeypatch.context() as patched:
        patched.setattr(routes, "_prompt_text", gone)
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "return_prompt_text": True}
        with pytest.raises(httpx.RemoteProtocolError):
            await running.http.post("/v1/chat/completions", json=chat, headers=bearer(secret))
    assert (await post(running, secret)).status_code == 200
    assert len(running.scheduler.submissions) == 1


async def test_output_that_a_client_sends_counts_as_prompt(start: Start, keys: Keys) -> None:
    """Otherwise a client could send its prompt as output to resume after. The server computes both alike."""
    secret = keys.add("a", tokens_per_minute=600, max_tokens_in_flight=700)
    running = await launch(start, keys)
    sampling = inference_pb2.SamplingOptions(max_tokens=601, temperature=0, ignore_eos=True)
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[7]), sampling=sampling, resume_after=600, resume_token_ids=[9] * 600
    )
    async with grpc.aio.insecure_channel(running.addresses.grpc or "") as channel:
        generate = inference_pb2_grpc.InferenceServiceStub(channel).Generate
        metadata = list(bearer(secret).items())
        assert [token async for part in generate(request, metadata=metadata) for token in part.token_ids]
        request.sampling.max_tokens = 700
        with pytest.raises(grpc.aio.AioRpcError, match="tokens_per_minute"):
            await generate(request, metadata=metadata).read()
    assert (await post(running, secret)).status_code == 429


async def test_a_beam_search_is_charged_for_all_beams(start: Start, keys: Keys) -> None:
    """Its client gets one of them, or none if it leaves before the end."""
    secret = keys.add("a", tokens_per_minute=600, max_tokens_in_flight=700)
    running = await launch(start, keys)
    running.scheduler.paused = True
    beams = {"use_beam_search": True, "best_of": 64, "n": 1, "max_tokens": 10}
    leaves = httpx.Timeout(10, read=0.2)
    with pytest.raises(httpx.ReadTimeout):
        await running.http.post(PATH, json=BODY | beams, headers=bearer(secret), timeout=leaves)
    await until(lambda: len(running.scheduler.submissions) == 1)
    refused = await post(running, secret)
    assert (refused.status_code, "tokens_per_minute" in refused.text) == (429, True)


async def test_tokens_in_flight_and_per_minute(start: Start, keys: Keys) -> None:
    flight, minute = keys.add("f", max_tokens_in_flight=20), keys.add("m", tokens_per_minute=600)
    watcher = keys.add("o", metrics=True)
    running = await launch(start, keys)
    assert (await post(running, flight, max_tokens=17)).status_code == 200
    refused = await post(running, flight, max_tokens=18)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    assert (await post(running, flight, max_tokens=8, n=2)).status_code == 200  # 3 + 2 × 8: the samples share a prompt
    assert (await post(running, flight, max_tokens=9, n=2)).status_code == 400
    assert (await post(running, minute, max_tokens=700)).status_code == 200
    refused = await post(running, minute)
    assert refused.status_code == 429
    assert "600 tokens per minute (tokens_per_minute)" in refused.json()["error"]["message"]
    assert 9 <= int(refused.headers["retry-after"]) <= 11  # 103 tokens above the limit, at 10 a second
    text = (await running.http.get("/metrics", headers=bearer(watcher))).text
    assert 'paceline_gateway_quota_refusals_total{quota="tokens_per_minute"} 1.0' in text


# ── requests of other keys ───────────────────────────────────────────────────────────────────────────────────────────


async def test_an_idempotency_key_belongs_to_the_key_that_made_it(start: Start, keys: Keys) -> None:
    """Also within one tenant, at the same gateway and at another."""
    mine, theirs, third = (keys.add(name, tenant="t") for name in ("a", "b", "c"))
    running, other = await launch(start, keys, step_s=0.005), await launch(start, keys)
    began = await events(running, LONG, bearer(mine, **{KEY: "k"}), stop_after=4)
    last = {KEY: "k", "Last-Event-ID": began[-1].id}
    for gateway in (running, other):
        async with gateway.http.stream("POST", PATH, json=LONG, headers=bearer(theirs, **last)) as stolen:
            said = (await stolen.aread()).decode()
        assert "cannot_resume" in said
        assert '"text"' not in said
    # Idempotency keys of two API keys do not collide: the third key's request is a new one, whatever its body.
    assert (await running.http.post(PATH, json=BODY, headers=bearer(third, **{KEY: "k"}))).status_code == 200
    whole = await events(other, LONG, bearer(mine, **{KEY: "k"}))
    for gateway in (running, other):
        rest = await events(gateway, LONG, bearer(mine, **last))
        assert told([*began, *rest]).texts == told(whole).texts
    assert (await running.http.post(PATH, json=BODY, headers=bearer(mine, **{KEY: "k"}))).status_code == 422


async def test_an_idempotency_key_over_grpc_belongs_to_its_api_key(start: Start, keys: Keys) -> None:
    mine, theirs = keys.add("a", tenant="t"), keys.add("b", tenant="t")
    running = await launch(start, keys)
    address, got = running.addresses.grpc or "", []
    for secret in (mine, mine, theirs):
        async with AsyncPacelineClient(address, api_key=secret) as client:
            options: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "idempotency_key": "k"}
            got.append((await client.generate(token_ids=[7, 8], **options)).token_ids)
    assert got[0] == got[1] != got[2]
    assert len(running.scheduler.submissions) == 2
    # The error is about their own request with this idempotency key, not about mine.
    status, said = await over_grpc(running, bearer(theirs), idempotency_key="k", resume_after=3)
    assert status is grpc.StatusCode.INVALID_ARGUMENT
    assert said.startswith("idempotency_key: this key was used for another request")


# ── changes ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_revoked_key_ends_no_stream_and_starts_none(start: Start, keys: Keys) -> None:
    secret = keys.add("a")
    running = await launch(start, keys, step_s=0.02)
    stream = asyncio.create_task(events(running, LONG, bearer(secret, **{KEY: "k"})))
    await until(lambda: running.scheduler.num_running == 1)
    keys.remove("a")

    async def revoked() -> bool:
        return (await post(running, secret)).status_code == 401

    async with asyncio.timeout(5):
        await eventually(revoked)
    assert (await over_grpc(running, bearer(secret)))[0] is UNKNOWN
    assert not stream.done()
    resumed = await running.http.post(PATH, json=LONG, headers=bearer(secret, **{KEY: "k", "Last-Event-ID": "1.2.3"}))
    assert resumed.status_code == 401
    assert told(await stream).reasons == {0: ["length"]}


async def test_a_new_key_is_in_force_and_a_wrong_file_changes_nothing(start: Start, keys: Keys) -> None:
    first = keys.add("a")
    running = await launch(start, keys)
    second = keys.add("b")

    async def served() -> bool:
        return (await post(running, second)).status_code == 200

    await eventually(served)
    keys.path.write_text("[keys.a]\nsha256 = 'x'\n")
    await asyncio.sleep(1.5)  # the gateway looks at the file every 0.5 s
    assert [(await post(running, secret)).status_code for secret in (first, second)] == [200, 200]


# ── where a gateway listens ──────────────────────────────────────────────────────────────────────────────────────────


def reaches(address: str, host: str) -> bool:
    """Whether the port of `address` is open on another address of this machine."""
    with socket.socket() as client:
        return client.connect_ex((host, int(address.rpartition(":")[2]))) == 0


async def test_without_keys_only_loopback_is_served(start: Start, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.2 stands for the machine's other addresses: a server bound to 127.0.0.1 cannot be reached there."""
    said: list[str] = []
    monkeypatch.setattr("services.gateway.server._log.warning", lambda message, **_: said.append(message))
    closed = await start(settings={"host": "0.0.0.0"})
    (why,) = [message for message in said if "API keys" in message]
    assert why.startswith("no API keys: listens on 127.0.0.1 alone, not on 0.0.0.0; ")
    keys.add("a")
    for opened in (
        await start(settings={"host": "0.0.0.0", "insecure": True}),
        await launch(start, keys, {"host": "0.0.0.0"}),
    ):
        assert all(reaches(address or "", "127.0.0.2") for address in (opened.addresses.http, opened.addresses.grpc))
    assert not any(reaches(address or "", "127.0.0.2") for address in (closed.addresses.http, closed.addresses.grpc))
    assert all(reaches(address or "", "127.0.0.1") for address in (closed.addresses.http, closed.addresses.grpc))
