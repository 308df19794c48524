"""A model by its hub name, through worker and gateway, from a hub on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from demo import CHECKPOINT
from tests.support import embedding_checkpoints
from tests.support.hub import client_environment, fake_hub
from tests.support.stack import Stack

# All cases in one process: importing the hub's client takes long.
ASK = """
import sys
from services.runtime.model.hub import NoSuchModel, checkpoint_folder
for name in sys.argv[1:]:
    try:
        print("found", checkpoint_folder(name, ["config.json"]))
    except NoSuchModel as error:
        print(error)
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The demo model with other files that repositories have."""
    folder = tmp_path / "repository"
    shutil.copytree(CHECKPOINT, folder)
    (folder / "original").mkdir()
    for name in ("pytorch_model.bin", "model.gguf", "consolidated.safetensors", "original/params.json"):
        (folder / name).write_bytes(b"{}")
    return folder


def test_a_model_by_its_hub_name(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack(tmp_path, model="org/demo")
    try:
        with fake_hub({"org/demo": checkpoint}) as hub:
            for name, value in hub.environment(tmp_path / "cache").items():
                monkeypatch.setenv(name, value)
            stack.up()
            fetched = sorted(hub.fetched)
        assert fetched == [
            "org/demo/chat_template.jinja",
            "org/demo/config.json",
            "org/demo/generation_config.json",
            "org/demo/model.safetensors",
            "org/demo/tokenizer.json",
            "org/demo/tokenizer_config.json",
        ]
        assert ask(stack) == "3 + 4 = 7."
        # The hub has been stopped, so all files come from the cache.
        for name in ("gateway", "worker-1"):
            stack.kill(name)
            stack.start(name)
        stack.wait_ready()
        assert ask(stack) == "3 + 4 = 7."
    finally:
        stack.down()


def test_a_worker_gets_the_files_that_say_how_to_pool(checkpoint: Path, tmp_path: Path) -> None:
    """They may be in a subfolder. The config.json of another subfolder is not fetched."""
    embedding_checkpoints.add_modules(checkpoint, "last")
    (checkpoint / "original" / "config.json").write_text("{}")
    code = "from gpu_worker.models.loader import resolve_checkpoint; print(resolve_checkpoint('org/demo'))"
    with fake_hub({"org/demo": checkpoint}) as hub:
        environment = {**os.environ, **hub.environment(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200, check=True
        )
        fetched = sorted(hub.fetched)
    names = ("1_Pooling/config.json", "config.json", "generation_config.json", "modules.json", "tokenizer.json")
    assert fetched == [f"org/demo/{name}" for name in names]
    assert (Path(done.stdout.strip()) / "1_Pooling" / "config.json").exists()


def ask(stack: Stack) -> str:
    question = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "temperature": 0}
    answer = httpx.post(f"{stack.url}/v1/chat/completions", json={"model": "org/demo", **question}, timeout=200)
    text: str = answer.raise_for_status().json()["choices"][0]["message"]["content"]
    return text


def test_a_failed_download_gives_one_clear_line(checkpoint: Path, tmp_path: Path) -> None:
    with fake_hub({"org/gated": checkpoint}, gated=frozenset({"org/gated"})) as hub:
        gated, unknown, strange, path = asked(
            hub.environment(tmp_path), "org/gated", "org/none", "org/no name", "no/such/folder"
        )
    assert gated.startswith("org/gated is gated: ")
    assert unknown.startswith("there is no folder org/none, and the hub has no such model")
    assert strange.startswith("org/no name cannot be fetched from the hub: ")
    assert path == "there is no folder no/such/folder, and it is not a hub name like owner/model"
    (unreachable,) = asked(client_environment(hub.url, tmp_path), "org/gated")
    assert "the hub cannot be asked: " in unreachable


def asked(environment: dict[str, str], *names: str) -> list[str]:
    run = [sys.executable, "-c", ASK, *names]
    done = subprocess.run(run, env={**os.environ, **environment}, capture_output=True, text=True, timeout=200)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_services_end_at_once_when_there_is_no_such_model(tmp_path: Path) -> None:
    flags = ["--port", "0", "--model", "org/none", "--log-level", "warning"]
    with fake_hub({}) as hub:
        running = {
            service: subprocess.Popen(
                [sys.executable, "-m", "services.cli", "serve", service, *flags],
                env={**os.environ, **hub.environment(tmp_path)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for service in ("worker", "gateway")
        }
        ended = {
            service: (process.communicate(timeout=200)[0], process.returncode) for service, process in running.items()
        }
    for service, (output, status) in ended.items():
        assert status == 2, output
        (line,) = output.splitlines()
        assert line.startswith("paceline ")
        assert f"{service}: there is no folder org/none" in line


def test_a_signal_ends_a_service_that_waits_for_a_hub(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = client_environment(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path)
        process = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "serve", "gateway", "--port", "0", "--model", "org/demo"],
            env={**os.environ, **environment},
            stderr=subprocess.PIPE,
            text=True,
        )
        silent.settimeout(200)
        connection, _ = silent.accept()
        with connection:
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=200)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in errors
