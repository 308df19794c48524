"""The ports of `paceline up`: picks one for each service and each /metrics, and names their addresses."""

from __future__ import annotations

import errno
import socket

from services.cli.up.holder import holder_of
from services.cli.up.settings import UpSettings

# For traffic between the services of this machine. Other machines cannot connect, whatever --host is.
LOOPBACK = "127.0.0.1"
MAX_PORT = 65535
EVERY_ADDRESS = {"0.0.0.0", "::", ""}


class CannotServe(Exception):
    """The services cannot start. The message says why."""


def pick_port(host: str, port: int, explicit: bool, flag: str, taken: set[int]) -> int:
    """`port` if it is free and not in `taken`; otherwise a free port, unless `explicit`. Raises CannotServe."""
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                if explicit or port == 0:
                    holder = holder_of(port) if error.errno == errno.EADDRINUSE else ""
                    by = f" by {holder}" if holder else ""
                    why = f"{error.strerror}{by}{'; choose another port' if explicit and port else ''}"
                    raise CannotServe(f"--{flag}: {host}:{port} cannot be used: {why}") from error
            else:
                found = int(probe.getsockname()[1])
                if found not in taken:
                    return found
                if explicit and port != 0:
                    raise CannotServe(f"--{flag}: port {port} is already another service's")
        port = 0


def worker_names(count: int) -> list[str]:
    return [f"worker-{i + 1}" for i in range(count)]


class Ports:
    """The ports of one server, each of them free when it was picked. Raises CannotServe."""

    def __init__(self, settings: UpSettings) -> None:
        # The address for a client on this machine.
        self.address = LOOPBACK if settings.host in EVERY_ADDRESS else settings.host
        self._settings = settings
        self._taken: set[int] = set()
        self.http = self._pick_own("port", settings.host)
        self.grpc = self._pick_own("grpc_port", settings.host)
        self.scheduler = self._pick_own("scheduler_port", LOOPBACK)
        self.cache = self._pick_own("cache_port", LOOPBACK)
        self.workers = [self._pick(LOOPBACK, 0, False, "") for _ in range(settings.workers)]
        self.metrics = self._pick_metrics()  # by the name of the child

    @property
    def url(self) -> str:
        """The gateway's HTTP server, for a client on this machine."""
        scheme = "https" if self._settings.public_tls else "http"
        return f"{scheme}://{self.address}:{self.http}"

    @property
    def scheduler_address(self) -> str:
        return f"{LOOPBACK}:{self.scheduler}"

    @property
    def cache_address(self) -> str:
        return f"{LOOPBACK}:{self.cache}"

    def metrics_urls(self) -> dict[str, str]:
        """Metrics URLs by the name of the child."""
        inside = {name: f"http://{LOOPBACK}:{port}/metrics" for name, port in self.metrics.items()}
        return {"gateway": f"{self.url}/metrics"} | inside

    def _pick_own(self, name: str, host: str) -> int:
        """The port for a service with its own setting, such as `grpc_port`."""
        settings = self._settings
        explicit = name in settings.model_fields_set
        return self._pick(host, getattr(settings, name), explicit, name.replace("_", "-"))

    def _pick_metrics(self) -> dict[str, int]:
        first, explicit = self._settings.metrics_port, "metrics_port" in self._settings.model_fields_set
        ports: dict[str, int] = {}
        for offset, name in enumerate(["scheduler", "cache", *worker_names(self._settings.workers)]):
            wanted = first + offset if first else 0
            if wanted > MAX_PORT:
                raise CannotServe(f"--metrics-port: {name} would get port {wanted}; {MAX_PORT} is the highest")
            ports[name] = self._pick(LOOPBACK, wanted, explicit, "metrics-port")
        return ports

    def _pick(self, host: str, wanted: int, explicit: bool, flag: str) -> int:
        port = pick_port(host, wanted, explicit, flag, self._taken)
        self._taken.add(port)
        return port
