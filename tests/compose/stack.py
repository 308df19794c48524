"""One compose project under test, and the HTTP client that asks it things. Standard library only."""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import ssl
import subprocess
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]


def wait_until(what: str, condition: Callable[[], bool], timeout_s: float, every_s: float = 0.2) -> float:
    """Seconds until the condition held. AssertionError if that takes longer than `timeout_s`."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < timeout_s, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(every_s)
    return time.monotonic() - began_s


def command(*args: str, check: bool = True, env: dict[str, str] | None = None) -> str:
    """The stdout of a command. With `check`, a failure raises AssertionError with the end of its stderr."""
    done = subprocess.run(args, cwd=ROOT, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if check:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-15:])
        assert done.returncode == 0, f"{shlex.join(args)}: exit status {done.returncode}\n{tail}"
    return done.stdout


def docker(*args: str, check: bool = True) -> str:
    """The Docker CLI."""
    return command("docker", *args, check=check).strip()


class Stack:
    """A compose project with a name and ports that no other project uses. Its images have the tag `ci`."""

    def __init__(self, compose: str) -> None:
        self.name = f"paceline-ci-{os.getpid()}"
        self.port, self.grpc_port = free_port(), free_port()
        self.balancer_port, self.balancer_grpc_port = free_port(), free_port()
        self._compose = [*shlex.split(compose), "-p", self.name]
        self._files: list[str] = []
        self._env = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")} | {
            "PACELINE_TAG": "ci",
            "PACELINE_PORT": str(self.port),
            "PACELINE_GRPC_PORT": str(self.grpc_port),
            "PACELINE_BALANCER_PORT": str(self.balancer_port),
            "PACELINE_BALANCER_GRPC_PORT": str(self.balancer_grpc_port),
            "PACELINE_BUILD_NETWORK": os.environ.get("PACELINE_BUILD_NETWORK", "host"),
        }

    def compose(self, *args: str, check: bool = True) -> str:
        """Run compose on this project."""
        return command(*self._compose, *self._files, *args, check=check, env=self._env)

    def override(self, *paths: str, **environment: str) -> None:
        """Later compose commands add these files to the compose file, and set these variables."""
        self._files = [argument for path in ("docker-compose.yml", *paths) for argument in ("-f", path)]
        self._env |= environment

    def containers(self, service: str) -> list[str]:
        """Ids of the service's containers, stopped ones included, lowest number first."""
        ids = docker(
            "ps", "-aq",
            "--filter", f"label=com.docker.compose.project={self.name}",
            "--filter", f"label=com.docker.compose.service={service}",
        ).split()  # fmt: skip
        number = "com.docker.compose.container-number"
        return sorted(ids, key=lambda container: int(inspect(container)["Config"]["Labels"][number]))

    def leftovers(self) -> str:
        """Containers, networks and volumes of the project that still exist."""
        label = f"label=com.docker.compose.project={self.name}"
        kinds = (("ps", "-aq"), ("network", "ls", "-q"), ("volume", "ls", "-q"))
        return " ".join(docker(*kind, "--filter", label) for kind in kinds).strip()


def inspect(container: str) -> dict[str, Any]:
    """What the engine knows of a container."""
    found: dict[str, Any] = json.loads(docker("inspect", container))[0]
    return found


def is_healthy(container: str) -> bool:
    """Whether the engine's last health check passed."""
    status: str = inspect(container)["State"]["Health"]["Status"]
    return status == "healthy"


def kill_process(container: str) -> None:
    """SIGKILL to the service's process, as by the OOM killer.

    `docker kill` would count as the user's wish, which a restart policy respects.
    """
    docker("exec", container, "sh", "-c", "kill -9 -1", check=False)


def metric(container: str, port: int, name: str) -> float:
    """Sum of a series over its labels, from inside the container (metrics ports are not published)."""
    fetch = f"import urllib.request as r; print(r.urlopen('http://127.0.0.1:{port}/metrics').read().decode())"
    text = docker("exec", container, "python", "-c", fetch)
    samples = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    assert samples, f"no series {name} on port {port}"
    return sum(map(float, samples))


class Api:
    """The gateway's HTTP API. Methods that generate text raise AssertionError for a status other than 200.

    `resuming_stream` retries 502 and 503.
    """

    def __init__(self, port: int, ca: str = "") -> None:
        """`ca`: the PEM text of the gateway's CA, if it serves HTTPS."""
        self._port = port
        self._tls = ssl.create_default_context(cadata=ca) if ca else None
        self.resumed = 0  # how often a broken stream was asked for again

    def get(self, path: str, key: str = "") -> tuple[int, Any]:
        """Status and JSON body, with an API key if one is given; status 0 if no server answers."""
        connection = self._connect(10)
        try:
            connection.request("GET", path, headers={"authorization": f"Bearer {key}"} if key else {})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except (OSError, http.client.HTTPException):
            return 0, None
        finally:
            connection.close()

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._tls is not None:
            return http.client.HTTPSConnection("127.0.0.1", self._port, timeout=timeout_s, context=self._tls)
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout_s)

    def workers(self) -> int:
        """Workers that the scheduler knows; 0 while it is not ready."""
        status, body = self.get("/ready")
        return int(body["workers"]) if status == 200 else 0

    def complete(self, prompt: str, max_tokens: int, **more: Any) -> str:
        """A greedy completion's text."""
        body = {"model": self.model(), "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
        text: str = self._post("/v1/completions", body)["choices"][0]["text"]
        return text

    def chat(self, messages: list[dict[str, str]], max_tokens: int = 80) -> str:
        """A greedy answer."""
        body = {"model": self.model(), "messages": messages, "max_tokens": max_tokens, "temperature": 0}
        text: str = self._post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
        return text

    def stream(self, prompt: str, max_tokens: int, **more: Any) -> Iterator[str]:
        """The pieces of a greedy completion as they come; it must end with a finish reason and [DONE]."""
        done = yield from self._events(prompt, max_tokens, {}, more)
        assert done, "the stream broke off"

    def resuming_stream(self, prompt: str, max_tokens: int, **more: Any) -> Iterator[str]:
        """The text of a stream. The client sends an idempotency key and resumes a stream that breaks."""
        headers = {"Idempotency-Key": str(uuid.uuid4())}
        for _ in range(100):
            if (yield from self._events(prompt, max_tokens, headers, more)):
                return
            self.resumed += 1
            time.sleep(0.1)
        raise AssertionError("the stream broke off a hundred times")

    def _events(
        self, prompt: str, max_tokens: int, headers: dict[str, str], more: dict[str, Any]
    ) -> Generator[str, None, bool]:
        """Yields the text of one connection. Returns whether the stream is complete.

        `headers` gets the id of the last event.
        """
        body = {"model": self.model(), "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
        connection = self._connect(90)
        finish_reason = last_id = None
        try:
            connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}), _JSON | headers)
            response = connection.getresponse()
            if response.status in (502, 503) and headers:
                return False
            assert response.status == 200, f"HTTP {response.status}: {response.read()[:300]!r}"
            for line in response:
                if line.startswith(b"id: "):
                    last_id = line[4:].strip().decode()
                    continue
                assert line.startswith(b"data: ") or not line.strip(), f"not an event: {line!r}"
                if line.strip() == b"data: [DONE]":
                    assert finish_reason or headers, "the stream ended without a finish reason"
                    return True
                if not line.strip():
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, f"error in the stream: {event['error']}"
                choice = event["choices"][0]
                finish_reason = choice["finish_reason"] or finish_reason
                if last_id and headers:
                    headers["Last-Event-ID"] = last_id
                yield choice["text"]
        except (OSError, http.client.HTTPException):
            assert headers, "the connection broke"
        finally:
            connection.close()
        return False

    def model(self) -> str:
        """The model that is served."""
        name: str = self.get("/v1/models")[1]["data"][0]["id"]
        return name

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        connection = self._connect(90)
        try:
            connection.request("POST", path, json.dumps(body), _JSON)
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        assert response.status == 200, f"{path}: HTTP {response.status}: {text[:300]!r}"
        return json.loads(text)


_JSON = {"content-type": "application/json"}
