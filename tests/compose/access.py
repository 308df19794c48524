"""Checks of the overlays of the compose file with keys and TLS: which clients are served, and which are not."""

from __future__ import annotations

import os
import tempfile
import time
from functools import partial

from tests.compose.stack import Api, Stack, docker, is_healthy, wait_until
from tests.support.ports import free_port

CONTROL_PLANE = "paceline/control-plane:ci"
HEALTH_PORTS = {"cache": 50052, "scheduler": 50051, "worker": 50053, "gateway": 8001}


def keys(stack: Stack, api: Api) -> str:
    """Checks the overlay with keys, then takes the project down. Returns a remark."""
    stack.compose("down", "-v", "--remove-orphans")  # left by Checks.two_schedulers
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # the containers' user reads it
        secret = _new_key(folder, "app")
        boss = _new_key(folder, "boss", "--admin")
        stack.override("deploy/docker/keys.yml", PACELINE_KEYS_DIR=folder)
        stack.compose("up", "-d", "--no-build")
        wait_until("/ready", lambda: api.workers() == 1, 120)
        found = {key: api.get("/v1/models", key)[0] for key in ("", "wrong", secret, boss)}
        assert found == {"": 401, "wrong": 401, secret: 200, boss: 200}, f"statuses: {[*found.values()]}"
        (scheduler,) = stack.containers("scheduler")
        policy = (scheduler, "paceline", "policy", "get")
        assert fails("exec", *policy), "an admin call needs no key"
        assert fails("exec", "-e", f"PACELINE_API_KEY={secret}", *policy), "any key is an admin key"
        docker("exec", "-e", f"PACELINE_API_KEY={boss}", *policy)
        new = _new_key(folder, "new")
        waited_s = wait_until("a new key", lambda: api.get("/v1/models", new)[0] == 200, 20)
        stack.compose("down", "-v", "--remove-orphans")
    return f"a new key was in force after {waited_s:.1f} s"


def public(stack: Stack) -> str:
    """Checks the overlay for clients on other machines, then takes the project down. Returns a remark."""
    stack.compose("down", "-v", "--remove-orphans")  # left by keys()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # the containers' user reads it
        return _serve_publicly(stack, folder, _new_key(folder, "app"))


def _serve_publicly(stack: Stack, folder: str, secret: str) -> str:
    port = free_port()
    stack.override(
        "deploy/docker/public.yml",
        PACELINE_KEYS_DIR=folder,
        PACELINE_PUBLIC_PORT=str(port),
        PACELINE_PUBLIC_GRPC_PORT=str(free_port()),
    )
    began_s = time.monotonic()
    stack.compose("up", "-d", "--no-build")
    containers = {service: stack.containers(service)[0] for service in HEALTH_PORTS}
    for service, container in containers.items():
        wait_until(f"{service} healthy", partial(is_healthy, container), 120)
    up_s = time.monotonic() - began_s
    api = Api(port, docker("exec", containers["gateway"], "cat", "/certs/ca.pem"))
    assert api.workers() == 1
    found = {key: api.get("/v1/models", key)[0] for key in ("", "wrong", secret)}
    assert found == {"": 401, "wrong": 401, secret: 200}, f"statuses: {[*found.values()]}"
    assert Api(port).workers() == 0, "served without TLS"
    # A client without TLS gets no answer from a service, even inside the services' network.
    for service, inner in HEALTH_PORTS.items():
        address = f"{service}:{inner}" if service != "worker" else f"127.0.0.1:{inner}"
        probe = ("exec", containers[service], "python", "-m", "services.runtime.healthcheck", address)
        docker(*probe)
        assert fails(*probe, "--plain"), f"{service}: answers without TLS"
    read = ("exec", containers["gateway"], "cat", "/certs/gateway/cert.pem")
    before = docker(*read)
    stack.compose("up", "-d", "--no-build", "--no-recreate")  # the service `certs` runs again
    wait_until("renewed", lambda: docker(*read) != before, 30)
    assert api.workers() == 1
    assert {service: stack.containers(service)[0] for service in HEALTH_PORTS} == containers
    stack.compose("down", "-v", "--remove-orphans")
    return f"healthy after {up_s:.1f} s"


def _new_key(folder: str, name: str, *flags: str) -> str:
    """A key in the folder's file, made by the image's command."""
    user = f"{os.getuid()}:{os.getgid()}"
    made = ("keys", "new", name, "--file", "/keys/keys.toml", *flags)
    return docker("run", "--rm", "--network", "none", "-u", user, "-v", f"{folder}:/keys", CONTROL_PLANE, *made)


def fails(*args: str) -> bool:
    """Whether this docker command fails."""
    try:
        docker(*args)
    except AssertionError:
        return True
    return False
