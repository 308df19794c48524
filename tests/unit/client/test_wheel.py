"""The wheel `paceline-client`: it works without the server, and beside the distribution `paceline`."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.v1 import common_pb2, inference_pb2, inference_pb2_grpc

ROOT = Path(__file__).parent.parent.parent.parent
# What grpcio and protobuf install, and the module that they require.
REQUIRED = ("grpc", "google", "typing_extensions.py")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
ASK = """
import sys
from importlib.util import find_spec
from paceline.client import PacelineClient
with PacelineClient(sys.argv[1]) as client:
    print(client.generate("Once", max_tokens=1).text)
print(PacelineClient.__module__)
print([name for name in sys.argv[2:] if find_spec(name)])
"""
SERVER = ("services", "scheduler_svc", "cache_svc", "gpu_worker", "starlette", "torch", "numpy")


class Answering(inference_pb2_grpc.InferenceServiceServicer):
    """Answers each prompt with one token."""

    def Generate(self, request: Any, context: Any) -> Iterator[inference_pb2.GenerateResponse]:
        yield inference_pb2.GenerateResponse(
            text=f"{request.text} upon",
            token_ids=[7],
            finish_reason=common_pb2.FINISH_REASON_LENGTH,
            usage=inference_pb2.Usage(prompt_tokens=1, completion_tokens=1),
        )


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Answering(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


def built(project: Path, folder: Path) -> Path:
    """The wheel of a project."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=project, check=True, capture_output=True)
    return next(folder.iterdir())


@pytest.fixture(scope="module")
def client_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT / "deploy/client", tmp_path_factory.mktemp("client"))


@pytest.fixture(scope="module")
def server_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT, tmp_path_factory.mktemp("server"))


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The Python of an environment with nothing but grpcio and protobuf."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    here = Path(sysconfig.get_path("purelib"))
    there = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "env")}))
    for name in REQUIRED:
        (there / name).symlink_to(here / name)
    return tmp_path / "env/bin/python"


def install(python: Path, wheel: Path) -> None:
    command = [*PIP, "--python", str(python), "install", "-q", "--no-index", "--no-deps", str(wheel)]
    subprocess.run(command, check=True)


def asked(python: Path, target: str, *names: str) -> list[str]:
    """What the client prints: an answer, the client's module, and which of `names` can be imported."""
    command = [str(python), "-I", "-c", ASK, target, *names]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def test_the_client_needs_no_module_of_the_server(python: Path, client_wheel: Path, target: str) -> None:
    install(python, client_wheel)
    assert asked(python, target, *SERVER) == ["Once upon", "paceline.client.client", "[]"]


def test_client_and_server_can_be_installed_and_removed_apart(
    python: Path, client_wheel: Path, server_wheel: Path, target: str
) -> None:
    for wheel in (client_wheel, server_wheel):
        install(python, wheel)
    names = ("paceline.v1", "services")
    assert asked(python, target, *names) == ["Once upon", "paceline.client.client", str([*names])]
    both = "import paceline.client.v1.inference_pb2 as a, paceline.v1.inference_pb2 as b; print(a.Usage is b.Usage)"
    subprocess.run([str(python), "-I", "-c", both], check=True)
    subprocess.run([*PIP, "--python", str(python), "uninstall", "-q", "-y", "paceline-client"], check=True)
    assert asked(python, target, *names) == ["Once upon", "services.client.client", str([*names])]


def test_the_wheels_share_no_file(client_wheel: Path, server_wheel: Path) -> None:
    client, server = (set(zipfile.ZipFile(wheel).namelist()) for wheel in (client_wheel, server_wheel))
    assert client
    assert not client & server


def test_the_requirements_are_those_of_the_generated_code(client_wheel: Path) -> None:
    """Generated code refuses to be imported with an older grpcio or protobuf than that of its compiler."""
    with zipfile.ZipFile(client_wheel) as archive:
        metadata = next(archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    generated = (ROOT / "protos/paceline/v1/common_pb2.py").read_text()
    version = re.search(r"Domain\.PUBLIC,\s+(\d+),\s+(\d+),\s+(\d+)", generated)
    assert version
    assert re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE) == [
        f"grpcio>={inference_pb2_grpc.GRPC_GENERATED_VERSION}",
        f"protobuf>={'.'.join(version.groups())}",
    ]
