"""TLS between real processes: which clients are served, and what a renewal of certificates does."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from openai import DefaultHttpxClient, OpenAI

from services.client import PacelineClient, Unavailable
from services.runtime.healthcheck import check
from tests.support.certificates import (
    ask_https,
    authority_of,
    credentials,
    issue,
    make_certificates,
    other_authority,
    serial_of,
    trusting,
    wait_for,
)
from tests.support.ports import free_port
from tests.support.stack import Stack

PROMPT = "Once there was a fox"


def paceline(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "services.cli", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack with certificates of `paceline certs`. Each test leaves the stack serving."""
    folder = tmp_path_factory.mktemp("certificates") / "set"
    done = paceline("certs", str(folder))
    assert done.returncode == 0, done.stderr
    running = Stack(tmp_path_factory.mktemp("stack"), tls_dir=folder)
    try:
        yield running.up()
    finally:
        running.down()


@pytest.fixture(scope="module")
def certificates(stack: Stack) -> Path:
    assert stack.tls_dir is not None
    return stack.tls_dir


@contextmanager
def started(log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-m", "services.cli", *words], stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def test_clients_are_served_over_https_and_grpc(stack: Stack, certificates: Path) -> None:
    ca = certificates / "ca.pem"
    http = DefaultHttpxClient(verify=trusting(ca))
    with OpenAI(base_url=f"{stack.url}/v1", api_key="none", http_client=http) as client:
        answer = client.completions.create(model="paceline-demo", prompt=PROMPT, max_tokens=8, temperature=0)
        stream = client.completions.create(
            model="paceline-demo", prompt=PROMPT, max_tokens=8, temperature=0, stream=True
        )
        streamed = "".join(chunk.choices[0].text for chunk in stream)
    channel = grpc.ssl_channel_credentials(ca.read_bytes())
    with PacelineClient(f"127.0.0.1:{stack.grpc_port}", credentials=channel) as grpc_client:
        told = grpc_client.generate(PROMPT, max_tokens=8, temperature=0).text
    assert told == streamed == answer.choices[0].text != ""


def test_the_live_view_reads_scheduler_and_cache_with_tls(stack: Stack, certificates: Path) -> None:
    with DefaultHttpxClient(verify=trusting(certificates / "ca.pem")) as http:
        shown = http.get(f"{stack.url}/v1/live").json()
    assert shown["scheduler"]["cache_connected"]
    assert shown["cache"]["num_workers"] == 1


def test_a_client_trusts_only_a_gateway_of_a_known_ca(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(other_authority().pair.cert)
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        ask_https(stack.url, tmp_path / "ca.pem")


def test_commands_and_health_checks_show_their_certificate(stack: Stack, certificates: Path) -> None:
    told = paceline("policy", "get", "--scheduler", stack.scheduler, "--tls-dir", str(certificates))
    assert "in force" in told.stdout, told.stderr
    refused = paceline("policy", "get", "--scheduler", stack.scheduler)
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].endswith("it may demand TLS, and a certificate of its CA (--tls-dir)")
    for port in (stack.scheduler_port, stack.cache_port, stack.grpc_port):
        assert check(f"127.0.0.1:{port}", tls_dir=str(certificates)) is None
        assert "UNAVAILABLE" in str(check(f"127.0.0.1:{port}"))


async def test_a_renewal_breaks_no_stream_and_is_shown_to_new_connections(stack: Stack, certificates: Path) -> None:
    ca, ports = certificates / "ca.pem", (stack.http_port, stack.grpc_port)
    before = [await asyncio.to_thread(serial_of, port, ca) for port in ports]
    channel = grpc.ssl_channel_credentials(ca.read_bytes())
    with PacelineClient(f"127.0.0.1:{stack.grpc_port}", credentials=channel, retry_for_s=0) as client:
        stream = client.stream(PROMPT, max_tokens=400, temperature=0, ignore_eos=True)
        pieces = [next(stream)]
        done = await asyncio.to_thread(paceline, "certs", str(certificates), "--renew")
        assert done.returncode == 0, done.stderr
        after = [await asyncio.to_thread(serial_of, port, ca) for port in ports]
        pieces += list(stream)
    assert sum(len(piece.token_ids) for piece in pieces) == 400
    assert not {*before} & {*after}


def test_after_a_change_of_the_ca_all_links_come_back_without_a_restart(stack: Stack, certificates: Path) -> None:
    """The certificates of the first CA are invalid then: each link is dialled with new certificates."""
    old = (certificates / "ca.pem").read_bytes()
    assert paceline("certs", str(certificates), "--force").returncode == 0
    for service in ("cache", "scheduler"):
        stack.kill(service)
        stack.start(service)
        stack.wait_metric("paceline_scheduler_num_workers", 1)
        stack.wait_ready()
        assert ask_https(stack.url, certificates / "ca.pem")
    (certificates / "old.pem").write_bytes(old)
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        ask_https(stack.url, certificates / "old.pem")


def test_a_certificate_that_expires_while_it_is_used_is_refused_until_it_is_renewed(tmp_path: Path) -> None:
    folder, port = make_certificates(tmp_path / "set"), free_port()
    authority, server = authority_of(folder), folder / "cache"
    issue(authority, server, lifetime=dt.timedelta(seconds=8))
    target, flags = f"127.0.0.1:{port}", ["--port", str(port), "--metrics-port", "0", "--tls-dir", str(folder)]
    log = tmp_path / "cache.log"
    with started(log, "serve", "cache", *flags):
        wait_for(lambda: check(target, tls_dir=str(folder)) is None, log)
        wait_for(lambda: "certificate has expired" in str(check(target, tls_dir=str(folder))), log)
        issue(authority, server)
        assert check(target, tls_dir=str(folder)) is None
        assert "certificates read again" in log.read_text()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("expired", "cert.pem: is valid from "),
        ("missing", "cert.pem: No such file"),
        ("of another key", "key.pem: is not the key of "),
    ],
)
def test_a_service_says_at_its_start_which_file_cannot_be_used(tmp_path: Path, fault: str, reason: str) -> None:
    folder = make_certificates(tmp_path / "set")
    if fault == "expired":
        issue(authority_of(folder), folder / "cache", lifetime=dt.timedelta(hours=1), ago=dt.timedelta(days=1))
    elif fault == "missing":
        (folder / "cache" / "cert.pem").unlink()
    else:
        (folder / "cache" / "key.pem").write_bytes((folder / "worker" / "key.pem").read_bytes())
    done = paceline("serve", "cache", "--port", "0", "--metrics-port", "0", "--tls-dir", str(folder))
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if line.startswith("paceline serve cache: TLS: ")]
    assert reason in line


def test_the_gateway_may_show_another_certificate_and_demand_one(
    stack: Stack, certificates: Path, tmp_path: Path
) -> None:
    public, clients = other_authority(), other_authority()
    shown = issue(public, tmp_path / "public")
    customer = issue(clients, tmp_path / "customer", trusted=public.pair.cert)
    (tmp_path / "clients.pem").write_bytes(clients.pair.cert)
    http, rpc = free_port(), free_port()
    flags = [
        "--port",
        str(http),
        "--grpc-port",
        str(rpc),
        "--scheduler",
        stack.scheduler,
        "--tls-dir",
        str(certificates),
    ]
    flags += ["--http-cert", str(shown / "cert.pem"), "--http-key", str(shown / "key.pem")]
    flags += ["--tls-client-ca", str(tmp_path / "clients.pem")]
    log, url, ca = tmp_path / "gateway.log", f"https://127.0.0.1:{http}", shown / "ca.pem"
    with started(log, "serve", "gateway", *flags):
        inside, pinned = str(certificates), str(shown / "cert.pem")
        wait_for(lambda: check(f"127.0.0.1:{rpc}", tls_dir=inside, tls_cert=pinned) is None, log)
        assert ask_https(url, ca, customer)
        for certificate in (None, shown):
            with pytest.raises(OSError) as refused:  # noqa: PT011 - an alert of TLS, or a closed connection
                ask_https(url, ca, certificate)
            assert not isinstance(refused.value, urllib.error.HTTPError)
        with PacelineClient(f"127.0.0.1:{rpc}", credentials=credentials(customer)) as client:
            assert client.generate(PROMPT, max_tokens=4).text
        trusted = grpc.ssl_channel_credentials(ca.read_bytes())
        with (
            PacelineClient(f"127.0.0.1:{rpc}", credentials=trusted, retry_for_s=0) as client,
            pytest.raises(Unavailable),
        ):
            client.generate(PROMPT, max_tokens=4)


def test_behind_a_proxy_the_gateway_serves_plain_http_and_dials_with_tls(
    stack: Stack, certificates: Path, tmp_path: Path
) -> None:
    http, rpc = free_port(), free_port()
    flags = [
        "--port",
        str(http),
        "--grpc-port",
        str(rpc),
        "--scheduler",
        stack.scheduler,
        "--tls-dir",
        str(certificates),
    ]
    log = tmp_path / "gateway.log"
    with started(log, "serve", "gateway", "--no-http-tls", *flags):
        wait_for(lambda: check(f"127.0.0.1:{rpc}") is None, log)
        with urllib.request.urlopen(f"http://127.0.0.1:{http}/v1/models", timeout=30) as answer:
            assert json.load(answer)["data"]


def test_up_gives_tls_to_all_its_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder, log = make_certificates(tmp_path / "set"), tmp_path / "up.log"
    http, rpc, scheduler, cache = (free_port() for _ in range(4))
    flags = [
        "--port",
        str(http),
        "--grpc-port",
        str(rpc),
        "--scheduler-port",
        str(scheduler),
        "--cache-port",
        str(cache),
    ]
    with started(log, "up", "--threads", "1", "--metrics-port", "0", *flags, "--tls-dir", str(folder)):
        wait_for(lambda: "Ctrl-C" in log.read_text(), log, 120)
        said = log.read_text()
        assert f"https://127.0.0.1:{http}/v1" in said
        assert f"--cacert {folder / 'gateway' / 'ca.pem'}" in said
        assert f"--tls-dir {folder}" in said
        assert ask_https(f"https://127.0.0.1:{http}", folder / "ca.pem")
        for port in (rpc, scheduler, cache):
            assert "UNAVAILABLE" in str(check(f"127.0.0.1:{port}"))
        # Commands of this machine find the certificates by themselves.
        assert "in force" in paceline("policy", "get").stdout
        assert "blocks of 16 tokens" in paceline("cache", "stats").stdout


def test_without_tls_a_service_that_others_can_reach_says_that_it_is_not_encrypted(tmp_path: Path) -> None:
    for host, says_so in (("0.0.0.0", True), ("127.0.0.1", False)):
        log, port = tmp_path / f"{host}.log", free_port()
        with started(log, "serve", "cache", "--host", host, "--port", str(port), "--metrics-port", "0"):
            wait_for(lambda port=port: check(f"127.0.0.1:{port}") is None, log)  # type: ignore[misc]
            lines = [line for line in log.read_text().splitlines() if "not encrypted" in line]
            assert len(lines) == says_so
