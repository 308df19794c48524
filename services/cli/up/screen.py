"""What `paceline up` shows to its user."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Collection

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from services.cli.servers import running_servers
from services.cli.up.child import Child
from services.cli.up.ports import Ports
from services.cli.up.settings import UpSettings
from services.runtime.keys.source import are_configured
from services.runtime.model.hub import local_folder
from services.runtime.tls.files import TlsPaths

# Output lines of a service while it reads weights, captures graphs, or downloads a model.
PROGRESS = re.compile(r"(?P<what>loading|capturing CUDA graphs).*: (?P<percent>\d+) % of (?P<total>.+)$")
DOWNLOAD = re.compile(r"fetching .+: \d+ MiB so far$")
BAR_CHARACTERS = 30
COLOURS = {"cache": "cyan", "scheduler": "magenta", "worker": "green", "gateway": "blue"}


class Screen:
    """The output of `up`: its own lines, and those of its children."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.status: Status | None = None  # the progress line of the start, on a terminal
        self._began_s = time.monotonic()
        self._progress: dict[str, str] = {}  # by the name of the child, as markup

    def say(self, child: Child, line: str) -> None:
        """Show a line about the child."""
        self.console.print(f"[{COLOURS[child.service]}]{child.name:>10}[/] {line}", highlight=False, soft_wrap=True)

    def relay(self, child: Child, line: str) -> None:
        """Show a line of the child. While `up` starts on a terminal, progress is a part of the status line. A JSON line
        names its service, and stays unchanged for programs."""
        if line.startswith('{"timestamp":'):
            self.console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)
            return
        progress = _as_progress(line)
        if not progress or self.status is None or not self.console.is_terminal:
            self.say(child, escape(line))
        else:
            self._progress[child.name] = progress

    def show_pending(self, names: Collection[str]) -> None:
        """Update the status line of the start: the services that are not ready yet, and for how long `up` has
        waited."""
        if self.status is None:
            return
        waited_s = time.monotonic() - self._began_s
        pending = [f"{name} {self._progress.get(name, '')}".strip() for name in names]
        self.status.update(f"starting {', '.join(pending)} ({waited_s:.0f} s)")

    def show_server(self, settings: UpSettings, ports: Ports, model: str) -> None:
        """Show how to use the server, which serves now."""
        path = "chat/completions"
        asked: dict[str, object] = {"messages": [{"role": "user", "content": "What is 3 + 4?"}]}
        if _makes_embeddings(settings):
            path, asked = "embeddings", {"input": ["a fox", "a bear"]}
        body = json.dumps({"model": model, **asked})
        self.console.print(
            f"\n[bold green]Paceline serves {escape(model)}[/] at [bold]{ports.url}/v1[/]", highlight=False
        )
        self.console.print(f"  gRPC at {ports.address}:{ports.grpc}. Try:\n", highlight=False)
        key = ' -H "Authorization: Bearer $PACELINE_API_KEY"' if are_configured(settings.keys_file) else ""
        curl = f"curl {self._curl_flags(settings)}{ports.url}/v1/{path}"
        example = f"{curl} -H 'Content-Type: application/json'{key} \\\n    -d '{body}'"
        self.console.print(f"  {escape(example)}\n", highlight=False, soft_wrap=True)
        if path == "chat/completions":
            which = ["--server", str(ports.http)] if len(running_servers()) > 1 else []
            chat = shlex.join([own_command(sys.argv[0]), "chat", *which])
            self.console.print(f"  Or talk to it: [bold]{escape(chat)}[/]\n", highlight=False, soft_wrap=True)
        self.console.print("  Metrics:", highlight=False)
        for name, url in ports.metrics_urls().items():
            self.console.print(f"    {name:<10} {url}", highlight=False, soft_wrap=True)
        if settings.workers == 0:
            said = "No worker was started: nothing is computed until a worker joins."
            self.console.print(f"  [yellow]{said}[/]", highlight=False)
        # A further worker needs these settings, too. The scheduler refuses another model, data type or block size.
        same = settings.flags("model", "load_format", "dtype", "quantization", "pooling")
        same += settings.flags("block_size", "max_model_len", "tls_dir")
        more = [own_command(sys.argv[0]), "worker", "--scheduler", ports.scheduler_address, *same]
        self.console.print(f"  One more worker: [bold]{escape(shlex.join(more))}[/]", highlight=False, soft_wrap=True)
        if len(running_servers()) > 1:
            line = f"  Other servers run here: the other commands, such as chat, need --server {ports.http}."
            self.console.print(line, highlight=False, soft_wrap=True)
        self.console.print("  Ctrl-C drains and stops.\n", highlight=False)

    @staticmethod
    def _curl_flags(settings: UpSettings) -> str:
        """What curl needs to trust a certificate that is not of a public CA."""
        if settings.tls_dir is None or settings.http_cert or not settings.http_tls:
            return ""
        (ca,) = TlsPaths.of(settings.tls_dir, "gateway").cas
        return f"--cacert {shlex.quote(str(ca))} "


def _as_progress(line: str) -> str:
    """A service's line about its progress, as markup for the status line; empty for another line."""
    if (found := PROGRESS.match(line)) is not None:
        done = BAR_CHARACTERS * int(found["percent"]) // 100
        bar = f"[green]{'━' * done}[/][dim]{'━' * (BAR_CHARACTERS - done)}[/]"
        return f"{found['what']} {bar} {found['percent']} % of {escape(found['total'])}"
    return escape(line) if DOWNLOAD.match(line) else ""


def own_command(script: str) -> str:
    """The command that starts this program again. A new shell's PATH may not contain this environment."""
    if os.path.basename(script) != "paceline":
        return "paceline"
    relative = os.path.relpath(script)
    return relative if os.sep in relative and not relative.startswith(os.pardir) else script


def _makes_embeddings(settings: UpSettings) -> bool:
    """As far as the settings and a local folder tell. The files of a hub's model are known to its worker alone."""
    folder = local_folder(settings.model) if settings.model else None
    return settings.pooling != "auto" or (folder is not None and (folder / "modules.json").is_file())
