"""Decides which client of a server an address belongs to, for limits per client."""

from __future__ import annotations

import ipaddress


def client_of(host: str) -> str:
    """The client that a connection counts for: the IPv4 address, or the /64 network of an IPv6 address."""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    mapped = address.ipv4_mapped
    return str(mapped) if mapped is not None else f"{ipaddress.IPv6Address(int(address) >> 64 << 64)}/64"
