"""Tells whether a server's address can be reached from other machines, and warns about such a server without TLS."""

from __future__ import annotations

import ipaddress

from services.runtime.logs import get_logger

_log = get_logger(__name__)


def is_loopback(host: str) -> bool:
    """Whether a server that listens on `host` can be reached only from this machine. False for an unknown name."""
    if host in ("localhost", "ip6-localhost", "ip6-loopback"):
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return address.is_loopback


def warn_without_tls(host: str, protocol: str, address: str) -> None:
    """Log a warning if other machines reach the port of a server that has no TLS. `host`: where the server listens.
    `protocol`: "http" or "grpc", the name of `address` in the line."""
    if not is_loopback(host):
        _log.warning(
            "not encrypted: anyone on the network can read and change all data (see --tls-dir)", **{protocol: address}
        )
