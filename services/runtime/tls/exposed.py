"""Tells whether a server's address can be reached from other machines, and warns about such a server without TLS."""

from __future__ import annotations

import ipaddress

from services.runtime.logs import get_logger

_log = get_logger(__name__)
# The names of loopback in /etc/hosts of Debian and Ubuntu.
_NAMES = frozenset({"localhost", "ip6-localhost", "ip6-loopback"})


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on `host`, an address or a name; and whether a peer of
    this address is on this machine. IPv6 may have brackets and a zone. False for an unknown name."""
    if host.lower() in _NAMES:
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def warn_without_tls(host: str, protocol: str, address: str) -> None:
    """Log a warning if other machines reach the port of a server that has no TLS. `host`: where the server listens.
    `protocol`: "http" or "grpc", the name of `address` in the line."""
    if not is_loopback(host):
        _log.warning(
            "not encrypted: anyone on the network can read and change all data (see --tls-dir)", **{protocol: address}
        )
