"""Checks of the compose file on a real Docker engine, in order. run.sh starts the Docker engine if none runs.

One line per check, then `N passed, N failed`. The first failure ends the run, because later checks need the state that
earlier ones leave. At the end of every run the project is taken down.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Event

from demo.corpus import held_out
from tests.compose.access import CONTROL_PLANE, HEALTH_PORTS, fails, keys, public
from tests.compose.stack import Api, Stack, docker, inspect, is_healthy, kill_process, metric, wait_until

WORKER = "paceline/worker:ci"
SCHEDULER_METRICS_PORT, WORKER_METRICS_PORT, GATEWAY_PORT = 9101, 9103, 8000
STORIES = ("Once upon a time", "One day", "A small fox", "The old king", "In the morning", "There was a bird")
STORY_TOKENS = 1600  # long enough that streams still run when a busy machine kills a process


class Streams:
    """Greedy streams that run at the same time, each in a thread, with what has come so far."""

    def __init__(self, read: Callable[..., Iterator[str]], pool: ThreadPoolExecutor) -> None:
        """`read`: Api.stream or Api.resuming_stream."""
        self.texts = [""] * len(STORIES)
        self._begun = [Event() for _ in STORIES]
        self._done: list[Future[None]] = [pool.submit(self._read, read, index) for index in range(len(STORIES))]

    def _read(self, read: Callable[..., Iterator[str]], index: int) -> None:
        for piece in read(STORIES[index], STORY_TOKENS, ignore_eos=True):
            self.texts[index] += piece
            if piece:
                self._begun[index].set()

    def wait_begun(self) -> None:
        """Waits until every stream has brought text."""
        for event in self._begun:
            assert event.wait(60), "a stream brought no token within 60 s"

    @property
    def running(self) -> int:
        """Streams that have not ended."""
        return sum(not future.done() for future in self._done)

    def finish(self) -> list[str]:
        """All the texts, when they are complete. Raises what a stream raised."""
        for future in self._done:
            future.result(timeout=120)
        return self.texts


class Checks:
    """What is checked, in this order. Each returns a remark for its line."""

    def __init__(self, stack: Stack, api: Api, pool: ThreadPoolExecutor, build: bool) -> None:
        self.stack, self.api, self.pool, self.build = stack, api, pool, build
        self.reference: list[str] = []

    def all(self) -> list[tuple[str, Callable[[], str]]]:
        """Every check with its title."""
        return [
            ("compose file is valid, with and without the gpu profile", self.config),
            ("images build", self.images),
            ("control-plane image has no torch, worker image has it for the CPU", self.torch),
            ("images run as uid 10001 and carry no compiler", self.user),
            ("compose up: gateway ready", self.up),
            ("every service healthy by grpc.health.v1", self.healthy),
            ("only the gateway is published, on 127.0.0.1", self.ports),
            ("completion: same greedy text among others and alone", self.completion),
            ("stream: same text as without streaming", self.streamed),
            ("chat: the demo model's answers are right", self.chat),
            ("compose up --scale worker=2: both registered", self.scale),
            ("two workers: both compute, texts as with one", self.both_serve),
            ("kill -9 of a worker under running streams: texts complete and right", self.kill_worker),
            ("a worker stops under running streams: it drains, texts right; --scale worker=1", self.drain_worker),
            ("kill -9 of the cache under running streams: texts complete and right", self.kill_cache),
            ("kill -9 of the scheduler under running streams: texts complete and right", self.kill_scheduler),
            ("two schedulers: the same texts when the leader is killed under running streams", self.two_schedulers),
            (
                "API keys: HTTP and admin calls need one, a new key needs no restart",
                partial(keys, self.stack, self.api),
            ),
            (
                "for other machines: clients need HTTPS and a key, strangers are refused, a renewal restarts nothing",
                partial(public, self.stack),
            ),
            ("two gateways behind a balancer: a killed one's streams go on at the other", self.two_gateways),
            ("monitoring: Prometheus finds every replica, and no alert fires", self.monitoring),
            ("compose stop: every process ends by itself", self.stop),
            ("compose down: nothing is left", self.down),
        ]

    # ── images ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def config(self) -> str:
        names = set(self.stack.compose("config", "--services").split())
        assert names >= {"scheduler", "cache", "worker", "gateway"}, f"services: {names}"
        assert "nvidia" in self.stack.compose("--profile", "gpu", "config"), "the gpu profile reserves no device"
        return ""

    def images(self) -> str:
        if self.build:
            self.stack.compose("build", "scheduler", "cache", "gateway", "worker")
        base = _size_mb("python:3.11-slim")
        own = ", ".join(f"{image} {_size_mb(image)} MB" for image in (CONTROL_PLANE, WORKER))
        return f"{own} ({base} MB of each is the base)"

    def torch(self) -> str:
        find = "import importlib.util as u; print(u.find_spec('torch') is not None)"
        assert _python(CONTROL_PLANE, find) == "False", "torch is in the control-plane image"
        version = _python(WORKER, "import torch; print(torch.__version__, torch.version.cuda)")
        assert version.endswith("None"), f"not a CPU build: {version}"
        return version.split()[0]

    def user(self) -> str:
        look = (
            "import os, shutil, sys; tools = ['gcc', 'cc', 'g++', 'make', 'git', 'nvcc'];"
            "print(os.getuid(), [t for t in tools if shutil.which(t)], os.access(sys.prefix, os.W_OK))"
        )
        for image in (CONTROL_PLANE, WORKER):
            seen = _python(image, look)
            assert seen == "10001 [] False", f"{image}: {seen}"
        return ""

    # ── serving ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def up(self) -> str:
        began_s = time.monotonic()
        self.stack.compose("up", "-d", "--no-build")
        wait_until("/ready", lambda: self.api.workers() == 1, 120)
        return f"{time.monotonic() - began_s:.1f} s"

    def healthy(self) -> str:
        for service, port in HEALTH_PORTS.items():
            (container,) = self.stack.containers(service)
            wait_until(f"{service} healthy", partial(is_healthy, container), 40)
            probe = ("exec", container, "python", "-m", "services.runtime.healthcheck", f"127.0.0.1:{port}")
            docker(*probe)
            assert fails(*probe, "--service", "no.Such"), f"{service}: healthy for no.Such"
        return ""

    def ports(self) -> str:
        for service in HEALTH_PORTS:
            bindings = inspect(self.stack.containers(service)[0])["NetworkSettings"]["Ports"]
            published = {host["HostIp"] for hosts in bindings.values() for host in hosts or ()}
            assert published == ({"127.0.0.1"} if service == "gateway" else set()), f"{service}: {bindings}"
        return ""

    def completion(self) -> str:
        self.reference = list(self.pool.map(self._story, STORIES))
        self._compare([self._story(STORIES[0]), *self.reference[1:]])
        return ""

    def streamed(self) -> str:
        self._compare(["".join(self.api.stream(STORIES[0], STORY_TOKENS, ignore_eos=True)), *self.reference[1:]])
        began_s = time.monotonic()
        self._compare(Streams(self.api.stream, self.pool).finish())
        rate = len(STORIES) * STORY_TOKENS / (time.monotonic() - began_s)
        return f"{len(STORIES)} streams at once: {rate:.0f} tokens/s"

    def chat(self) -> str:
        examples = [example for task in ("repeat", "lookup", "add") for example in held_out(task, 10)]
        said = list(self.pool.map(lambda example: self.api.chat(list(example.messages)), examples))
        right = sum(text.strip() == example.answer for text, example in zip(said, examples, strict=True))
        assert right >= 0.9 * len(examples), f"only {right} of {len(examples)} right; the first: {said[0]!r}"
        return f"{right} of {len(examples)} held-out prompts"

    # ── scaling and losses ───────────────────────────────────────────────────────────────────────────────────────────

    def scale(self) -> str:
        self.stack.compose("up", "-d", "--no-build", "--no-recreate", "--scale", "worker=2")
        waited_s = wait_until("two workers", lambda: self.api.workers() == 2, 90)
        return f"{waited_s:.1f} s"

    def both_serve(self) -> str:
        before = self._worker_tokens()
        self._compare(Streams(self.api.stream, self.pool).finish())
        shares = [after - earlier for after, earlier in zip(self._worker_tokens(), before, strict=True)]
        assert all(share > 0 for share in shares), f"tokens computed by each worker: {shares}"
        return " + ".join(f"{share:.0f}" for share in shares) + " tokens"

    def kill_worker(self) -> str:
        before = self._worker_tokens()
        streams = Streams(self.api.stream, self.pool)
        streams.wait_begun()
        shares = [after - earlier for after, earlier in zip(self._worker_tokens(), before, strict=True)]
        victim = self.stack.containers("worker")[shares.index(max(shares))]
        remark = self._kill(victim, streams)
        waited_s = wait_until("the worker is back", lambda: self.api.workers() == 2, 90)
        return f"{remark}; the worker registered again after {waited_s:.1f} s"

    def drain_worker(self) -> str:
        streams = Streams(self.api.stream, self.pool)
        streams.wait_begun()
        # Compose would stop this container at `--scale worker=1`. Here it stops while the streams run.
        leaver = self.stack.containers("worker")[-1]
        running = streams.running
        docker("stop", "-t", "40", leaver)
        assert running, "every stream had ended before the drain: it proved nothing"
        code = inspect(leaver)["State"]["ExitCode"]
        assert code == 0, f"exit status {code}"
        self._compare(streams.finish())
        self.stack.compose("up", "-d", "--no-build", "--no-recreate", "--scale", "worker=1")
        assert len(self.stack.containers("worker")) == 1, "scaling down left a container"
        wait_until("one worker", lambda: self.api.workers() == 1, 30)
        return f"{running} streams running"

    def kill_cache(self) -> str:
        return self._kill_and_recover("cache")

    def kill_scheduler(self) -> str:
        return self._kill_and_recover("scheduler")

    def two_schedulers(self) -> str:
        self.stack.override("deploy/docker/two-schedulers.yml")
        if self.build:
            self.stack.compose("build", "etcd")
        began_s = time.monotonic()
        self.stack.compose("up", "-d", "--no-build")
        wait_until("/ready", lambda: self.api.workers() == 1, 120)
        up_s = time.monotonic() - began_s
        containers = [self.stack.containers(service)[0] for service in ("scheduler", "scheduler-2")]
        for container in containers:  # a standby is healthy, too
            wait_until("scheduler healthy", partial(is_healthy, container), 40)
        leader, standby = sorted(containers, key=_is_leader, reverse=True)
        assert (_is_leader(leader), _is_leader(standby)) == (True, False)
        streams = Streams(self.api.stream, self.pool)
        streams.wait_begun()
        docker("kill", leader)  # counts as the user's wish, so no restart policy starts it again
        running, began_s = streams.running, time.monotonic()
        assert running, "every stream had ended before the kill: it proved nothing"
        waited_s = wait_until("another leader", lambda: _is_leader(standby), 30)
        self._compare(streams.finish())
        ended_s = time.monotonic() - began_s
        docker("start", leader)
        wait_until("it stands by", partial(is_healthy, leader), 40)
        assert (_is_leader(leader), _is_leader(standby)) == (False, True)
        return (
            f"up after {up_s:.1f} s; {running} streams running; another leader after {waited_s:.1f} s, "
            f"all ended after {ended_s:.1f} s"
        )

    def two_gateways(self) -> str:
        self.stack.override("deploy/docker/balancer.yml", PACELINE_PORT="0", PACELINE_GRPC_PORT="0")
        if self.build:
            self.stack.compose("build", "balancer")
        self.stack.compose("up", "-d", "--no-build", "--scale", "gateway=2")
        api = Api(self.stack.balancer_port)
        wait_until("/ready behind the balancer", lambda: api.workers() == 1, 120)
        gateways = self.stack.containers("gateway")
        for gateway in gateways:
            wait_until("gateway healthy", partial(is_healthy, gateway), 60)
        streams = Streams(api.resuming_stream, self.pool)
        streams.wait_begun()
        shares = [metric(gateway, GATEWAY_PORT, "paceline_gateway_live_requests") for gateway in gateways]
        assert sum(shares) >= streams.running, f"streams at each gateway: {shares}"
        victim = gateways[shares.index(max(shares))]
        docker("kill", victim)
        self._compare(streams.finish())
        assert api.resumed >= max(shares), f"{api.resumed} streams were resumed, {shares} ran"
        self._compare([api.complete(STORIES[0], STORY_TOKENS, ignore_eos=True), *self.reference[1:]])
        docker("start", victim)
        wait_until("the gateway is back", partial(is_healthy, victim), 60)
        return f"streams at each gateway: {shares}; {api.resumed} resumed"

    def monitoring(self) -> str:
        """Without Grafana: its image comes from a registry."""
        self.stack.override("deploy/docker/balancer.yml", "deploy/docker/monitoring.yml", PACELINE_PROMETHEUS_PORT="0")
        if self.build:
            self.stack.compose("build", "prometheus")
        self.stack.compose("up", "-d", "--no-build", "--no-deps", "prometheus")
        (container,) = self.stack.containers("prometheus")

        def num_series(query: str) -> int:
            asked = ("exec", container, "promtool", "query", "instant", "http://127.0.0.1:9090", query)
            return len(docker(*asked, check=False).splitlines())

        expected = sum(len(self.stack.containers(service)) for service in HEALTH_PORTS)
        waited_s = wait_until("Prometheus sees all", lambda: num_series('up{job="paceline"} == 1') == expected, 60)
        assert num_series("paceline_scheduler_is_master == 1") == 1
        firing = num_series('ALERTS{alertstate="firing"}')
        assert not firing, f"{firing} alerts fire"
        return f"{expected} targets after {waited_s:.1f} s"

    def _kill_and_recover(self, service: str) -> str:
        streams = Streams(self.api.stream, self.pool)
        streams.wait_begun()
        remark = self._kill(self.stack.containers(service)[0], streams)
        waited_s = wait_until("/ready", lambda: self.api.workers() == 1, 90)
        self._compare([self._story(STORIES[0]), *self.reference[1:]])
        return f"{remark}; ready again after {waited_s:.1f} s"

    def _kill(self, container: str, streams: Streams) -> str:
        restarts: int = inspect(container)["RestartCount"]
        began_s = time.monotonic()
        kill_process(container)
        running = streams.running
        assert running, "every stream had ended before the kill: it proved nothing"
        self._compare(streams.finish())
        ended_s = time.monotonic() - began_s
        wait_until("restart", lambda: inspect(container)["RestartCount"] > restarts, 30)
        return f"{running} streams running, all ended {ended_s:.1f} s later"

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def stop(self) -> str:
        services = [*HEALTH_PORTS, "balancer"]
        containers = {service: self.stack.containers(service) for service in services}
        began_s = time.monotonic()
        self.stack.compose("stop")
        codes = {service: [inspect(c)["State"]["ExitCode"] for c in ids] for service, ids in containers.items()}
        assert not any(code for found in codes.values() for code in found), f"exit statuses: {codes}"
        return f"{time.monotonic() - began_s:.1f} s"

    def down(self) -> str:
        self.stack.compose("down", "-v", "--remove-orphans")
        left = self.stack.leftovers()
        assert not left, f"left: {left}"
        return ""

    def _compare(self, texts: list[str]) -> None:
        for prompt, text, reference in zip(STORIES, texts, self.reference, strict=True):
            assert text == reference, f"{prompt!r}: {_difference(text, reference)}"

    def _story(self, prompt: str) -> str:
        return self.api.complete(prompt, STORY_TOKENS, ignore_eos=True)

    def _worker_tokens(self) -> list[float]:
        name = "paceline_worker_tokens_total"
        return [metric(container, WORKER_METRICS_PORT, name) for container in self.stack.containers("worker")]


def _is_leader(scheduler: str) -> bool:
    return metric(scheduler, SCHEDULER_METRICS_PORT, "paceline_scheduler_is_master") == 1


def _difference(text: str, reference: str) -> str:
    pairs = zip(text, reference, strict=False)
    at = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(text), len(reference)))
    return f"from character {at} of {len(reference)} on {text[at : at + 60]!r}, not {reference[at : at + 60]!r}"


def _python(image: str, code: str) -> str:
    said: str = docker("run", "--rm", "--read-only", "--network", "none", "--entrypoint", "python", image, "-c", code)
    return said


def _size_mb(image: str) -> int:
    return int(docker("image", "inspect", "-f", "{{.Size}}", image)) // 10**6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--skip-build", action="store_true", help="use the existing images")
    arguments = parser.parse_args()
    stack = Stack(os.environ.get("COMPOSE", "docker-compose"))
    passed = failed = 0
    began_s = time.monotonic()
    with ThreadPoolExecutor(len(STORIES)) as pool:
        try:
            for title, check in Checks(stack, Api(stack.port), pool, not arguments.skip_build).all():
                check_began_s = time.monotonic()
                try:
                    remark = check()
                except Exception as error:
                    failed += 1
                    print(f"FAIL {title}: {type(error).__name__}: {error}", flush=True)
                    print(stack.compose("ps", check=False), stack.compose("logs", "--tail=25", check=False), sep="\n")
                    break
                passed += 1
                print(f"ok   {title} [{time.monotonic() - check_began_s:.1f} s] {remark}".rstrip(), flush=True)
        finally:
            stack.compose("down", "-v", "--remove-orphans", "-t", "5", check=False)
    print(f"{time.monotonic() - began_s:.0f} s in all")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
