"""Asks a service for its grpc.health.v1 status: `python -m services.runtime.healthcheck HOST:PORT [--service NAME]`.

For container and Kubernetes probes. It runs every few seconds beside the service, so it imports nothing but gRPC.
Exit status: 0 if SERVING; 1 if the service answers anything else, or does not answer in time (one line on stderr).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def check(target: str, service: str = "", timeout_s: float = 3.0) -> str | None:
    """None if `service` at `target` (host:port) is SERVING; otherwise the reason in one line. "": the whole server."""
    # A probe must reach its own container, whatever proxy the environment names.
    options = [("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(target, options=options) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s
            )
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    status: str = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    return None if status == "SERVING" else status


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check of the command line, and return the exit status."""
    parser = argparse.ArgumentParser(prog="healthcheck", description="grpc.health.v1 status of a service")
    parser.add_argument("target", metavar="HOST:PORT")
    parser.add_argument("--service", default="", metavar="NAME", help="full gRPC service name; default: the server")
    parser.add_argument(
        "--timeout-s", type=float, default=3.0, help="seconds to wait for the answer; default %(default)s"
    )
    arguments = parser.parse_args(argv)
    reason = check(arguments.target, arguments.service, arguments.timeout_s)
    if reason is None:
        return 0
    print(f"{arguments.target} {arguments.service or 'server'}: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
