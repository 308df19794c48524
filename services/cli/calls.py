"""Calls a running server for a command: how to dial it, and one line for each kind of failure."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable

import grpc

from services.cli.api_key import API_KEY_ENV, with_key
from services.cli.arguments import plain, usage_error
from services.cli.servers import NoAddress, Service, Target, certificates_for, target_of
from services.runtime.tls.credentials import channel_credentials, open_blocking_channel
from services.runtime.tls.files import TlsError

CODE = grpc.StatusCode
# gRPC codes of a mistake in the flags.
USAGE_CODES = (CODE.INVALID_ARGUMENT, CODE.ALREADY_EXISTS)
MAX_CAUSE = 200
# gRPC's messages for an answer in HTTP/1 (such as the gateway's) or in another protocol.
_OTHER_PROTOCOL = re.compile("SETTINGS frame|http1|ALPN")
# gRPC's messages for a server that speaks no TLS, or shows a certificate that is not to be trusted.
_TLS = re.compile("Tls handshake failed")
# A server with TLS gives no reason when it closes a connection without TLS, or without a certificate of its CA.
_CLOSED = re.compile("Socket closed|Secure read failed")
_ERRNO = re.compile(r"\s*\(\d+\)$")


def call(prog: str, arguments: argparse.Namespace, service: Service, command: Callable[[grpc.Channel], None]) -> int:
    """Run `command` on a channel to the service that the flags of servers.add_flags() name. Returns the exit status."""
    try:
        target = target_of(arguments, service)
        tls = certificates_for(arguments, target)
    except (NoAddress, TlsError) as error:
        return usage_error(prog, str(error))
    with open_blocking_channel(target.address, channel_credentials(tls) if tls else None) as channel:
        try:
            command(with_key(channel, arguments))
        except BrokenPipeError:
            raise
        except (ValueError, OSError) as error:
            return usage_error(prog, str(error))
        except grpc.RpcError as error:
            if error.code() in USAGE_CODES:
                return usage_error(prog, str(error.details()))
            print(f"{prog}: {plain(explained(target, error))}", file=sys.stderr)
            return 1
    return 0


def explained(target: Target, error: grpc.RpcError) -> str:
    """What failed, at which address, and what helps, in one line."""
    service, address, code = target.service, target.address, error.code()
    details = " ".join(str(error.details()).split())
    if code is CODE.UNAVAILABLE and _OTHER_PROTOCOL.search(details):
        return f"{address} does not speak gRPC, so it is no {service}{_hint(target)}"
    if code is CODE.UNAVAILABLE and _TLS.search(details):
        return f"{address}: no TLS connection, see --tls-dir: {details.partition('last error: ')[2][:MAX_CAUSE]}"
    if code is CODE.UNAVAILABLE and _CLOSED.search(details):
        return f"{address} closed the connection: it may demand TLS, and a certificate of its CA (--tls-dir)"
    if code is CODE.UNAVAILABLE:
        return f"no {service} answers at {address}{_cause(details)}{_hint(target)}"
    if code is CODE.DEADLINE_EXCEEDED:
        return f"{address} did not answer in time{_hint(target)}"
    if code is CODE.UNIMPLEMENTED:
        return f"{address} is no {service} of Paceline, or an older one: it does not know this call{_hint(target)}"
    if code is CODE.UNAUTHENTICATED:
        return f"{address}: {details}; set {API_KEY_ENV}, or give --api-key"
    if code in (CODE.NOT_FOUND, CODE.FAILED_PRECONDITION, CODE.PERMISSION_DENIED):
        return f"{address}: {details}"
    return f"{address}: {code.name}: {details[:MAX_CAUSE]}{_hint(target)}"


def _cause(details: str) -> str:
    """The innermost of the causes that gRPC joins with colons, in parentheses; empty if it is only an error number."""
    cause = _ERRNO.sub("", details.rpartition(": ")[2].rstrip("]"))
    return f" ({cause[:MAX_CAUSE]})" if cause else ""


def _hint(target: Target) -> str:
    if not target.named_by:
        return f"; no `paceline up` runs here: name the {target.service} with --{target.service} HOST:PORT"
    if target.named_by.startswith("server "):
        return f"; {target.named_by} runs, but its {target.service} may be starting"
    return "" if target.named_by.startswith("--") else f"; the address is that of {target.named_by}"
