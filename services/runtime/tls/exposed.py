"""Tells whether an address can be reached from other machines."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether a server that listens on `host` can be reached only from this machine. False for an unknown name."""
    if host in ("localhost", "ip6-localhost", "ip6-loopback"):
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return address.is_loopback
