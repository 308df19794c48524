"""`paceline certs DIR`: makes a CA, and a certificate for each service, for development."""

from __future__ import annotations

import datetime as dt
import ipaddress
import re
import shlex
from pathlib import Path

from services.cli.arguments import Parser, console, usage_error
from services.cli.certs.folder import CA_KEY, CannotMake, make_set
from services.runtime.tls.files import CA

PROG = "paceline certs"
MAX_DAYS = 825  # Apple's clients refuse certificates that are valid for longer
_DNS_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_][A-Za-z0-9_-]{0,62}(\.[A-Za-z0-9_-]{1,63})*\.?")


def parser() -> Parser:
    parser = Parser(
        prog=PROG,
        description="Make a CA and a certificate for each service, for development. Files that exist are kept.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="for --tls-dir of the services")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="one more DNS name or IP address of this machine; may be repeated. The names of the compose file's "
        "services and of loopback are always included",
    )
    parser.add_argument(
        "--ca-key",
        type=Path,
        metavar="FILE",
        help=f"file of the CA's private key, to keep it where no service can read it; default DIR/{CA_KEY}",
    )
    parser.add_argument("--days", type=int, default=365, help=f"the certificates' lifetime, 1..{MAX_DAYS}; default 365")
    parser.add_argument("--renew", action="store_true", help="new certificates for all services, of the same CA")
    parser.add_argument("--force", action="store_true", help="a new CA, and new certificates for all services")
    return parser


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    arguments = parser().parse_args(argv)
    if not 1 <= arguments.days <= MAX_DAYS:
        return usage_error(PROG, f"--days: {arguments.days} is not within 1..{MAX_DAYS}")
    for host in arguments.host:
        if not _is_host(host):
            return usage_error(PROG, f"--host: {host!r} is neither a DNS name nor an IP address")
    folder, lifetime = arguments.folder, dt.timedelta(days=arguments.days)
    ca_key = arguments.ca_key or folder / CA_KEY
    try:
        made = make_set(
            folder, ca_key=ca_key, hosts=arguments.host, lifetime=lifetime, renew=arguments.renew, force=arguments.force
        )
    except CannotMake as error:
        return usage_error(PROG, str(error))
    except OSError as error:
        return usage_error(PROG, f"{error.filename or folder}: {error.strerror}")
    _say(folder, ca_key, made)
    return 0


def _is_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return len(host) <= 253 and _DNS_NAME.fullmatch(host) is not None
    return True


def _say(folder: Path, ca_key: Path, made: list[str]) -> None:
    shown = shlex.quote(str(folder))
    lines = [f"made in {folder}: {', '.join(made)}"] if made else [f"{folder} is complete, and nothing was changed"]
    lines += [
        "",
        "Serve with TLS:",
        f"  paceline up --tls-dir {shown}",
        "Ask, from this machine:",
        f"  curl --cacert {shlex.quote(str(folder / CA))} https://127.0.0.1:8000/v1/models",
        "Renew at any time; running services take the new certificates:",
        f"  {PROG} {shown}{'' if ca_key == folder / CA_KEY else f' --ca-key {shlex.quote(str(ca_key))}'} --renew",
        f"Keep {ca_key} private: its owner can make certificates that join the server.",
    ]
    for line in lines:
        console().print(line, soft_wrap=True)
