"""Runs clients of other projects, unmodified and each in an environment of its own, against running services.

    make client-test [ARGS='openai litellm']

Each client has a script here, and its pinned requirements in requirements/. The first run installs them (minutes). A
client that cannot be installed is in the table, too. Prints the table, and writes it to bench/results/clients.md if
all clients were run.
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
from tests.support.stack import Stack

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / ".venv-peers" / "clients"
RESULTS = ROOT / "bench" / "results" / "clients.md"
MODEL = "paceline-demo"
INSTALL_S, CHECKS_S = 1500, 600
_ERROR_CHARS = 80


@dataclass(frozen=True, slots=True)
class Client:
    """`key` names its script (ask_KEY) and its requirements. `title`: as the table names it."""

    key: str
    title: str
    is_node: bool = False

    @property
    def requirements(self) -> Path:
        return HERE / "requirements" / (f"{self.key}.json" if self.is_node else f"{self.key}.txt")

    @property
    def script(self) -> Path:
        return HERE / f"ask_{self.key}.{'mjs' if self.is_node else 'py'}"

    @property
    def version(self) -> str:
        """The version of the client itself: its requirements name it first."""
        text = self.requirements.read_text()
        if self.is_node:
            return next(iter(json.loads(text)["dependencies"].values()))
        return text.splitlines()[0].partition("==")[2]


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
)


@dataclass(slots=True)
class Outcome:
    client: Client
    worked: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # the error by check
    trouble: str = ""  # why no check ran

    @property
    def all_worked(self) -> bool:
        return bool(self.worked) and not self.failed and not self.trouble


class CannotInstall(Exception):
    """With the last line of what the installer said."""


def install(client: Client) -> list[str]:
    """Make the client's environment, unless it exists already. Returns the command that runs its script."""
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


def _call(command: Sequence[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except FileNotFoundError as error:
        raise CannotInstall(str(error)) from None
    except subprocess.TimeoutExpired:
        raise CannotInstall(f"not installed within {INSTALL_S} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
        raise CannotInstall(lines[-1][:200])


def ask(client: Client, url: str, log: Path) -> Outcome:
    """Run the client's script against the server. Its output goes to the log."""
    outcome = Outcome(client)
    try:
        command = install(client)
    except CannotInstall as error:
        outcome.trouble = f"cannot be installed: {error}"
        return outcome
    # Nothing of this project is in the client's environment.
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    told = {
        "PACELINE_URL": url,
        "PACELINE_MODEL_NAME": MODEL,
        "PACELINE_CHECKPOINT": str(CHECKPOINT),
        "HF_HUB_OFFLINE": "1",
    }
    try:
        done = subprocess.run(
            command, env={**own, **told}, capture_output=True, text=True, timeout=CHECKS_S, check=False
        )
    except subprocess.TimeoutExpired:
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
    """Returns 1 if a check failed, or a client could not be asked."""
    by_key = {client.key: client for client in CLIENTS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"some of: {', '.join(by_key)} (default: all)")
    given = parser.parse_args().clients
    if unknown := sorted(set(given) - by_key.keys()):
        parser.error(f"unknown clients: {', '.join(unknown)}")
    chosen = [by_key[key] for key in given] or list(CLIENTS)
    folder = Path(tempfile.mkdtemp(prefix="paceline-clients-"))
    stack = Stack(folder)
    # The demo model's template shows no tools, so the format of calls is named.
    stack.gateway_flags = ["--tool-call-parser", "hermes"]
    try:
        stack.up()
        outcomes = [ask(client, stack.url, folder / f"{client.key}.txt") for client in chosen]
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
