"""Decides on which address a server without API keys may listen, and which peers are on this machine."""

from __future__ import annotations

from urllib.parse import unquote

from services.runtime.tls.exposed import is_loopback


def safe_host(host: str, *, has_keys: bool, insecure: bool) -> tuple[str, str]:
    """The address to listen on, without brackets, and in one line why it is not `host` ("" if it is)."""
    host = host.strip("[]")
    if has_keys or insecure or is_loopback(host):
        return host, ""
    instead = "::1" if ":" in host else "127.0.0.1"
    why = f"no API keys: listens on {instead} alone, not on {host}; give keys (--keys-file), or --insecure"
    return instead, why


def is_local_peer(peer: str) -> bool:
    """Whether a peer, as gRPC names it (`ipv4:127.0.0.1:5000`, `ipv6:%5B::1%5D:5000`, `unix:…`), is on this machine."""
    kind, _, rest = unquote(peer).partition(":")
    if kind == "unix":
        return True
    host = rest.rpartition(":")[0].strip("[]")
    return kind in ("ipv4", "ipv6") and is_loopback(host)
