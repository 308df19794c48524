"""API keys with real processes: both APIs, admin commands, resumption after a kill, revocation, `paceline up`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest

from services.client import PacelineClient, PacelineError
from services.runtime.keys.entries import parse_keys
from tests.support import load
from tests.support.command import Done, paceline
from tests.support.ports import free_port
from tests.support.sse import Event, parse_events, told
from tests.support.stack import Stack

COMPLETION, KEY = "/v1/completions", "Idempotency-Key"
BODY: dict[str, Any] = {"prompt": "Once there was", "max_tokens": 8, "ignore_eos": True}
LONG = BODY | {"max_tokens": 400, "temperature": 1.0, "stream": True}


class KeyFile:
    """A key file. `paceline keys new` writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def new(self, name: str, *flags: str) -> str:
        argv = [sys.executable, "-m", "services.cli", "keys", "new", name, "--file", str(self.path), *flags]
        return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    def remove(self, name: str) -> None:
        before, _, rest = self.path.read_text().partition(f"[keys.{name}]")
        after = rest.partition("\n[")
        new = self.path.with_suffix(".new")
        new.write_text(before + after[1] + after[2])
        assert name not in {key.name for key in parse_keys(new.read_text())}
        os.replace(new, self.path)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> KeyFile:
    return KeyFile(tmp_path_factory.mktemp("keys") / "keys.toml")


@pytest.fixture(scope="module")
def secrets(file: KeyFile) -> dict[str, str]:
    return {
        "app": file.new("app", "--tenant", "acme", "--max-requests", "8"),
        "other": file.new("other", "--tenant", "acme"),
        "boss": file.new("boss", "--admin"),
        "gone": file.new("gone"),
    }


@pytest.fixture(scope="module")
def keyed(file: KeyFile, secrets: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """All services with one file, as PACELINE_KEYS_FILE gives it to them; two gateways."""
    running = Stack(tmp_path_factory.mktemp("keyed"), environment={"PACELINE_KEYS_FILE": str(file.path)})
    running.scheduler_flags += ["--log-level", "debug", "--log-format", "json"]
    try:
        running.up().start_gateway("gateway-2")
        yield running
    finally:
        running.down()


def bearer(secret: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}", **more}


async def events(url: str, headers: dict[str, str], stop_after: int | None = None) -> list[Event]:
    lines: list[str] = []
    async with load.client(url) as http, http.stream("POST", COMPLETION, json=LONG, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            lines.append(line)
            if stop_after is not None and lines.count("") >= stop_after:
                break
    return list(parse_events(lines))


def test_the_official_client_needs_its_key(keyed: Stack, secrets: dict[str, str]) -> None:
    with httpx.Client(trust_env=False) as http:
        options: dict[str, Any] = {"base_url": f"{keyed.url}/v1", "max_retries": 0, "http_client": http}
        client = openai.OpenAI(api_key=secrets["app"], **options)
        messages: Any = [{"role": "user", "content": "What is 3 + 4?"}]
        answer = client.chat.completions.create(model="paceline-demo", messages=messages, max_tokens=20)
        assert answer.choices[0].message.content
        with pytest.raises(openai.AuthenticationError, match="the API key is not known here"):
            openai.OpenAI(api_key="none", **options).models.list()
        with pytest.raises(openai.PermissionDeniedError, match="for the tenant 'acme', not for 'x'"):
            client.completions.create(model="paceline-demo", prompt="x", extra_body={"tenant": "x"})


def test_grpc_clients_need_a_key_at_gateway_and_scheduler(keyed: Stack, secrets: dict[str, str]) -> None:
    def ask(target: str, name: str) -> grpc.StatusCode | None:
        with PacelineClient(target, api_key=secrets.get(name, ""), retry_for_s=0) as client:
            try:
                client.generate(token_ids=[7, 8, 9], max_tokens=3, seed=1)
            except PacelineError as error:
                return error.code
        return None

    gateway = f"127.0.0.1:{keyed.grpc_port}"
    assert [ask(gateway, name) for name in ("", "app", "boss")] == [grpc.StatusCode.UNAUTHENTICATED, None, None]
    # The scheduler takes only admin keys, because it does not check quotas.
    denied = [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, None]
    assert [ask(keyed.scheduler, name) for name in ("", "app", "boss")] == denied


def test_admin_commands_need_an_admin_key(
    keyed: Stack, secrets: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with httpx.Client(base_url=keyed.url, trust_env=False, headers=bearer(secrets["app"])) as http:
        asked = http.post(COMPLETION, json=BODY)
    explain = ("explain", asked.json()["id"])

    def run(*argv: str) -> Done:
        return paceline(keyed, *argv)

    for argv in (("policy", "get"), ("policy", "set", "sglang"), explain):
        assert run(*argv).returncode == 1
        assert "set PACELINE_API_KEY, or give --api-key" in run(*argv).stderr
        assert "the key 'app' may not use admin calls" in run(*argv, "--api-key", secrets["app"]).stderr
    monkeypatch.setenv("PACELINE_API_KEY", secrets["boss"])
    assert "paceline" in run("policy", "get").stdout
    assert run(*explain).returncode == 0
    assert run("policy", "set", "paceline").returncode == 0


def test_explain_tells_apart_requests_of_two_keys_with_the_same_request_id(
    keyed: Stack, secrets: dict[str, str], file: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = set()
    for name, num_tokens in (("app", 3), ("gone", 5)):
        with httpx.Client(base_url=keyed.url, trust_env=False, headers=bearer(secrets[name])) as http:
            asked = http.post(COMPLETION, json=BODY | {"max_tokens": num_tokens}, headers={"x-request-id": "same"})
        ids.add(asked.json()["id"])
    assert ids == {"cmpl-same"}, "a client finds its own id in the answer"
    monkeypatch.setenv("PACELINE_API_KEY", secrets["boss"])
    for name in ("same", "cmpl-same"):
        several = paceline(keyed, "explain", name)
        assert several.returncode == 1
        assert "tenant 'acme' and key 'app', tenant 'gone' and key 'gone'" in several.stderr
        assert paceline(keyed, "explain", name, "--tenant", "acme").returncode == 0
        assert paceline(keyed, "explain", name, "--key", "gone").returncode == 0
        assert "nothing is known" in paceline(keyed, "explain", name, "--key", "boss").stderr


def test_the_trace_of_a_client_is_in_the_schedulers_log(keyed: Stack, secrets: dict[str, str]) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = bearer(secrets["app"], traceparent=f"00-{trace}-00f067aa0ba902b7-01", **{"x-request-id": "traced"})
    with httpx.Client(base_url=keyed.url, trust_env=False) as http:
        assert http.post(COMPLETION, json=BODY, headers=headers).status_code == 200
    lines = [json.loads(line) for line in (keyed.folder / "scheduler.log").read_text().splitlines()]
    [line] = [line for line in lines if line.get("request_id") == "traced"]
    assert (line["message"], line["trace_id"], line["key"]) == ("request submitted", trace, "app")


async def test_only_its_own_key_resumes_a_killed_gateways_stream_at_another_gateway(
    keyed: Stack, secrets: dict[str, str]
) -> None:
    other = f"http://127.0.0.1:{keyed.gateway_ports['gateway-2'][0]}"
    whole = await events(other, bearer(secrets["app"], **{KEY: "k"}))
    began = await events(keyed.url, bearer(secrets["app"], **{KEY: "k"}), stop_after=3)
    await asyncio.to_thread(keyed.kill, "gateway")
    last = {KEY: "k", "Last-Event-ID": began[-1].id}
    async with load.client(other) as http:
        stolen = await http.post(COMPLETION, json=LONG, headers=bearer(secrets["other"], **last))
        assert "cannot_resume" in stolen.text
        assert '"text"' not in stolen.text
    rest = await events(other, bearer(secrets["app"], **last))
    assert told([*began, *rest]).texts == told(whole).texts
    keyed.start("gateway")
    await asyncio.to_thread(keyed.wait_ready)


async def test_a_revoked_key_starts_no_request_but_its_running_stream_finishes(
    keyed: Stack, file: KeyFile, secrets: dict[str, str]
) -> None:
    headers = bearer(secrets["gone"])
    async with load.client(keyed.url) as http:
        async with http.stream("POST", COMPLETION, json=LONG | {"max_tokens": 900}, headers=headers) as stream:
            assert stream.status_code == 200
            file.remove("gone")
            refused_s = time.monotonic()
            while (await http.post(COMPLETION, json=BODY, headers=headers)).status_code != 401:
                assert time.monotonic() - refused_s < 20
            lines = [line async for line in stream.aiter_lines()]
        assert told(parse_events(lines)).reasons == {0: ["length"]}
        file.new("gone-2")
        assert (await http.post(COMPLETION, json=BODY, headers=bearer(secrets["app"]))).status_code == 200


def test_a_flood_of_wrong_keys_delays_no_other_client(keyed: Stack, secrets: dict[str, str]) -> None:
    """The parse limiter counts no such request, and the gateway reads no such body."""
    stop = threading.Event()
    statuses: set[int] = set()

    def flood() -> None:
        with httpx.Client(base_url=keyed.url, trust_env=False, headers={"x-api-key": "wrong"}) as http:
            while not stop.is_set():
                statuses.add(http.post(COMPLETION, json=BODY).status_code)

    threads = [threading.Thread(target=flood) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        with httpx.Client(base_url=keyed.url, trust_env=False, headers=bearer(secrets["app"]), timeout=60) as http:
            assert [http.post(COMPLETION, json=BODY).status_code for _ in range(5)] == [200] * 5
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert statuses == {401}


def test_up_serves_with_keys_and_without_keys_on_loopback_only(file: KeyFile, secrets: dict[str, str]) -> None:
    port = free_port()
    argv = [sys.executable, "-m", "services.cli", "up", "--port", str(port), "--grpc-port", str(free_port())]
    ports = ["--scheduler-port", str(free_port()), "--cache-port", str(free_port()), "--metrics-port", "0"]
    argv += [*ports, "--workers", "0", "--host", "0.0.0.0"]
    for flags, there, asked in (
        (["--keys-file", str(file.path)], True, {"": 401, secrets["boss"]: 200}),
        ([], False, {"": 200}),
        (["--insecure"], True, {"": 200}),
    ):
        up = subprocess.Popen([*argv, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert up.stdout is not None
        said = ""
        try:
            for line in up.stdout:
                said += line
                if "Ctrl-C drains" in line:
                    break
            for secret, status in asked.items():
                headers = bearer(secret) if secret else {}
                answer = httpx.get(f"http://127.0.0.1:{port}/v1/models", headers=headers, trust_env=False)
                assert answer.status_code == status, said
            # 127.0.0.2 stands for the other addresses of this machine.
            try:
                assert httpx.get(f"http://127.0.0.2:{port}/health", trust_env=False).status_code == 200
                assert there, said
            except httpx.ConnectError:
                assert not there, said
        finally:
            up.send_signal(signal.SIGINT)
            up.communicate(timeout=60)
        assert ("no API keys: listens on 127.0.0.1 alone" in said) is not there
        assert ("$PACELINE_API_KEY" in said) is ("--keys-file" in flags)
