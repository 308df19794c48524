"""For all tests: no hub, no system certificates, one thread for torch, the repository on the path, and the same
examples in every run of the property tests. `pytest --hypothesis-profile default` draws new ones."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Triton reads this variable at import. Without a GPU, its kernels run only in its interpreter.
if not any(Path(driver).exists() for driver in ("/proc/driver/nvidia", "/dev/dxg")):
    os.environ["TRITON_INTERPRET"] = "1"
# Commands find neither a server that the developer runs nor those of other test processes.
os.environ["XDG_STATE_HOME"] = str(Path(tempfile.gettempdir()) / f"paceline-state-{os.getpid()}")
os.environ.pop("PACELINE_SERVER", None)
# No test needs the system's certificates, and a client needs 40 ms to read them. This folder has none.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)
sys.path.insert(0, str(Path(__file__).parent.parent))

import services.cli  # noqa: F401 - sets gRPC up, before it is imported, as in every service

# A shell starts commands in the background with SIGINT ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says more about the machine's other work than about us.
UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, **UNTIMED)
settings.load_profile("repeatable")

# One file that `make test` spreads over its processes: 2,000 seeds, which are to take two minutes of two cores.
SPREAD = "tests/simulation/test_world.py"

# The limit of a test that starts processes. On two busy cores the start of one process may take a minute, and a test
# may start a process several times.
PROCESSES_TIMEOUT_S = 600.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in ("e2e", "chaos") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(PROCESSES_TIMEOUT_S))


class AllButOneByFile(LoadFileScheduling):
    """Like `--dist loadfile`, all tests of a file run in one process, except the tests of SPREAD."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return nodeid if file == SPREAD else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return AllButOneByFile(config, log) if config.getoption("dist") == "loadfile" else None
