"""A real Prometheus, where there is one: in the PATH, or where scripts/prometheus.sh puts it."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.ports import free_port

_FETCHED = Path(__file__).parents[2] / ".venv" / "prometheus"


def _find(name: str) -> Path | None:
    found = shutil.which(name)
    return Path(found) if found else (_FETCHED / name if (_FETCHED / name).exists() else None)


PROMTOOL, _SERVER = _find("promtool"), _find("prometheus")
needs_prometheus = pytest.mark.skipif(
    PROMTOOL is None or _SERVER is None, reason="no Prometheus: apt-get install prometheus, or scripts/prometheus.sh"
)


class Prometheus:
    """A running one."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **query: str) -> Any:
        """`data` of an API answer. Raises urllib.error.HTTPError, with Prometheus' reason in its body."""
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=20) as answer:
            return json.load(answer)["data"]

    def num_series(self, query: str) -> int:
        """How many series a query gives now."""
        return len(self.get("query", query=query)["result"])


@contextmanager
def prometheus(folder: Path, targets: Mapping[str, int], rule_files: Sequence[Path] = ()) -> Iterator[Prometheus]:
    """A Prometheus that scrapes these ports of loopback every second, under the job `paceline`. `targets`: ports by
    the name of the service; only the ports are used."""
    static = [{"targets": [f"127.0.0.1:{port}"]} for port in targets.values()]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in rule_files],
        "scrape_configs": [{"job_name": "paceline", "static_configs": static}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [str(_SERVER), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/prometheus"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        running = Prometheus(f"http://127.0.0.1:{port}")
        _wait_up(running, len(targets), folder)
        yield running
    finally:
        process.terminate()
        process.wait(20)


def _wait_up(running: Prometheus, num_targets: int, folder: Path) -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        try:
            if running.num_series("up == 1") == num_targets:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise AssertionError((folder / "prometheus.log").read_text()[-3000:])
