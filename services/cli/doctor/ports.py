"""Checks whether the ports, keys and certificates of `paceline up` can be used."""

from __future__ import annotations

from services.cli.doctor.check import Check, CheckStatus
from services.cli.up.health import Dialler
from services.cli.up.holder import holder_of
from services.cli.up.ports import LOOPBACK, CannotServe, Ports, pick_port
from services.cli.up.settings import UpSettings
from services.runtime.keys.listen import safe_host
from services.runtime.keys.source import open_keys
from services.runtime.service import CannotStart

_OWN_PORTS = ("port", "grpc_port", "scheduler_port", "cache_port")


def check_access(settings: UpSettings) -> Check:
    """API keys and certificates, and the address that follows from them."""
    try:
        keys = open_keys(settings.keys_file)
        Dialler(settings)
    except CannotStart as error:
        return Check("keys and TLS", CheckStatus.FAILS, "cannot be used", str(error))
    _, why = safe_host(settings.host, has_keys=keys is not None, insecure=settings.insecure)
    found = f"{'API keys' if keys is not None else 'no API keys'}, {'TLS' if settings.public_tls else 'no TLS'}"
    return Check("keys and TLS", CheckStatus.NOTE if why else CheckStatus.OK, found, why)


def _asks_for_keys(settings: UpSettings) -> bool:
    """True also if the keys cannot be used: check_access reports this."""
    try:
        return open_keys(settings.keys_file) is not None
    except CannotStart:
        return True


def check_ports(settings: UpSettings) -> list[Check]:
    """One check for each port of _OWN_PORTS. If none fails, but two ports are equal or a port for /metrics cannot be
    used: one more check, which fails."""
    host, _ = safe_host(settings.host, has_keys=_asks_for_keys(settings), insecure=settings.insecure)
    checks = []
    for name in _OWN_PORTS:
        address = host if name in ("port", "grpc_port") else LOOPBACK
        checks.append(_check_port(name, address, getattr(settings, name), name in settings.model_fields_set))
    if all(check.status is not CheckStatus.FAILS for check in checks):
        try:
            Ports(settings)
        except CannotServe as error:  # two flags name the same port, or a port for /metrics cannot be used
            checks.append(Check("ports", CheckStatus.FAILS, "not all free", str(error)))
    return checks


def _check_port(name: str, host: str, port: int, explicit: bool) -> Check:
    flag = name.replace("_", "-")
    title = "HTTP port" if name == "port" else f"{name.removesuffix('_port').replace('grpc', 'gRPC')} port"
    found = f"{host}:{port}" if port else "any free one"
    try:
        pick_port(host, port, True, flag, set())
    except CannotServe as error:
        if explicit:
            return Check(title, CheckStatus.FAILS, found, str(error))
        holder = holder_of(port)
        by = f" by {holder}" if holder else ""
        try:
            pick_port(host, port, False, flag, set())
        except CannotServe as failure:  # the address, not the port
            return Check(title, CheckStatus.FAILS, found, str(failure))
        return Check(title, CheckStatus.NOTE, found, f"in use{by}: `up` takes a free port instead")
    return Check(title, CheckStatus.OK, f"{found} is free" if port else found)
