"""gRPC's credentials, and Python's TLS contexts, from the certificates of one end of a connection."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from services.runtime.tls.files import Certificates, TlsError, TlsFiles, name_of

# A channel that cannot connect looks this often for renewed certificates.
RENEWAL_CHECK_S = 2.0


class Renewed(Exception):
    """The certificates have changed since the channel was opened."""


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials of a gRPC server. gRPC asks for the certificates at each handshake, so a renewal needs no restart.

    With CAs in `files`, a client must show a certificate of one of them.
    """
    told: list[Certificates] = []

    def configuration() -> grpc.ServerCertificateConfiguration:
        told[:] = [files.current()]
        (certificates,) = told
        pairs = [(certificates.key, certificates.cert)]
        return grpc.ssl_server_certificate_configuration(pairs, certificates.ca or None)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        return None if files.current() in told else configuration()

    # None means that nothing has changed: gRPC then keeps its context. The stubs do not know it.
    first, needs_client = configuration(), bool(files.paths.cas)
    return grpc.dynamic_ssl_server_credentials(first, fetch, needs_client)  # type: ignore[arg-type]


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Credentials of one gRPC channel, with the certificates of this moment. A channel that reconnects by itself goes
    on with them, so a link that is to follow a renewal needs a new channel for each attempt."""
    certificates = files.current()
    return grpc.ssl_channel_credentials(certificates.ca, certificates.key, certificates.cert)


def pinned_credentials(cert: bytes, own: TlsFiles | None) -> tuple[grpc.ChannelCredentials, list[tuple[str, Any]]]:
    """Credentials for a health check, and the channel options that they need. They trust only the certificate `cert`,
    under any name of the server. `own`: shown to a server that demands a certificate."""
    pair = (own.current().key, own.current().cert) if own is not None else (None, None)
    options = [("grpc.ssl_target_name_override", name_of(cert))]
    return grpc.ssl_channel_credentials(cert, *pair), options


def pinned_context(cert: bytes, own: TlsFiles | None) -> ssl.SSLContext:
    """pinned_credentials() for HTTP. Raises TlsError."""
    context = ssl.create_default_context(cadata=cert.decode("ascii"))
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a certificate that is no CA may be trusted
    context.check_hostname = False
    if own is not None:
        _load_pair(context, own)
    return context


def open_blocking_channel(
    target: str, credentials: grpc.ChannelCredentials | None, options: Sequence[tuple[str, Any]] = ()
) -> grpc.Channel:
    """A channel for the calls of a command; not encrypted without credentials."""
    # A service is dialled by its address. A proxy in the environment is for the internet.
    options = [("grpc.enable_http_proxy", 0), *options]
    if credentials is None:
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, credentials, options=options)


async def until_connected(channel: grpc.aio.Channel, files: TlsFiles | None, opened: Certificates | None) -> None:
    """Wait until the channel is connected. `opened`: the certificates of `files` when the channel was opened. Raises
    Renewed if `files` has changed since: the channel keeps its old certificates, so open a new channel."""
    while True:
        if files is not None and files.current() is not opened:
            raise Renewed
        try:
            async with asyncio.timeout(None if files is None else RENEWAL_CHECK_S):
                return await channel.channel_ready()
        except TimeoutError:
            pass


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """A context for HTTP/1.1. With CAs in `files`, a client must show a certificate of one of them. Raises TlsError."""
    certificates = files.current()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    _load_pair(context, files)
    if certificates.ca:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=certificates.ca.decode("ascii"))
        # A resumed session is not checked again: an expired certificate would go on for hours.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
    return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """A context for a client that trusts only the CAs of `files`. Raises TlsError."""
    context = ssl.create_default_context(cadata=files.current().ca.decode("ascii"))
    _load_pair(context, files)
    return context


def _load_pair(context: ssl.SSLContext, files: TlsFiles) -> None:
    paths = files.paths
    try:
        context.load_cert_chain(paths.cert, paths.key)
    except (OSError, ssl.SSLError) as error:  # the files on disk have changed since `files` read them
        raise TlsError(f"{paths.cert}, {paths.key}: {error}") from error
