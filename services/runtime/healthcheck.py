"""Asks a service for its grpc.health.v1 status: `python -m services.runtime.healthcheck HOST:PORT [--service NAME]`.

For container and Kubernetes probes. It runs every few seconds beside the service, so without TLS it imports nothing but
gRPC.
Exit status: 0 if SERVING. Otherwise 1, with the reason in one line on stderr: the service answers anything else, does
not answer in time, or the certificates cannot be used.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def check(
    target: str, service: str = "", timeout_s: float = 3.0, *, tls_dir: str = "", tls_cert: str = ""
) -> str | None:
    """None if `service` at `target` (host:port) is SERVING; otherwise the reason in one line. An empty
    `service` asks for the whole server. `tls_dir`, `tls_cert`: as the flags of main(). Raises TlsError or OSError if
    the certificates cannot be used."""
    with _open(target, tls_dir, tls_cert) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s
            )
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    status: str = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    return None if status == "SERVING" else status


def _open(target: str, tls_dir: str, tls_cert: str) -> grpc.Channel:
    if not tls_dir and not tls_cert:
        # A probe must reach its own container, whatever proxy the environment names.
        return grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)])
    # These imports take 0.2 s.
    from services.runtime.tls.credentials import channel_credentials, open_blocking_channel, pinned_credentials
    from services.runtime.tls.files import TlsFiles, TlsPaths

    own = TlsFiles(TlsPaths.of(Path(tls_dir), "cli")) if tls_dir else None
    if tls_cert:
        credentials, options = pinned_credentials(Path(tls_cert).read_bytes(), own)
        return open_blocking_channel(target, credentials, options)
    assert own is not None
    return open_blocking_channel(target, channel_credentials(own))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check of the command line, and return the exit status."""
    parser = argparse.ArgumentParser(prog="healthcheck", description="grpc.health.v1 status of a service")
    parser.add_argument("target", metavar="HOST:PORT")
    parser.add_argument("--service", default="", metavar="NAME", help="full gRPC service name; default: the server")
    parser.add_argument(
        "--timeout-s", type=float, default=3.0, help="seconds to wait for the answer; default %(default)s"
    )
    parser.add_argument(
        "--tls-dir",
        default=os.environ.get("PACELINE_TLS_DIR", ""),
        metavar="DIR",
        help="folder of certificates [env: PACELINE_TLS_DIR]",
    )
    parser.add_argument(
        "--tls-cert", default="", metavar="FILE", help="the only server certificate to trust, for any host name"
    )
    parser.add_argument(
        "--plain", action="store_true", help="no TLS; ignores --tls-dir, --tls-cert and PACELINE_TLS_DIR"
    )
    arguments = parser.parse_args(argv)
    tls_dir, tls_cert = ("", "") if arguments.plain else (arguments.tls_dir, arguments.tls_cert)
    try:
        reason = check(arguments.target, arguments.service, arguments.timeout_s, tls_dir=tls_dir, tls_cert=tls_cert)
    except Exception as error:  # with TLS: TlsError or OSError, if the certificates cannot be used
        if not tls_dir and not tls_cert:
            raise
        reason = str(error)
    if reason is None:
        return 0
    print(f"{arguments.target} {arguments.service or 'server'}: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
