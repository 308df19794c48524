"""The settings of TLS for clients, which the gateway and `paceline up` share."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from services.runtime.settings import ServiceSettings
from services.runtime.tls.files import TlsPaths


class ClientTlsSettings(ServiceSettings):
    """Which certificates the gateway shows its clients, and which it demands of them."""

    http_tls: bool = Field(
        True,
        description="encrypt clients' HTTP and gRPC if there are certificates (http_cert or tls_dir); turn this off if "
        "a local proxy terminates TLS",
    )
    http_cert: Path | None = Field(
        None, description="PEM file with the certificate and its chain for clients (default: of tls_dir)"
    )
    http_key: Path | None = Field(None, description="PEM file with the private key of http_cert")
    tls_client_ca: Path | None = Field(
        None, description="PEM file of a CA: clients must show a certificate of it, or of tls_dir's ca.pem"
    )

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.http_cert is None) != (self.http_key is None):
            raise ValueError("--http-cert and --http-key belong together: give both, or none")
        if not self.http_tls and (self.http_cert or self.tls_client_ca):
            raise ValueError("--no-http-tls contradicts --http-cert, --http-key and --tls-client-ca")
        if self.tls_client_ca and not (self.tls_dir or self.http_cert):
            raise ValueError("--tls-client-ca needs --tls-dir, or --http-cert and --http-key")
        return self

    @property
    def public_tls(self) -> TlsPaths | None:
        """The certificates for clients. None: clients speak without TLS."""
        own = TlsPaths.of(self.tls_dir, "gateway") if self.tls_dir else None
        cas: tuple[Path, ...] = (self.tls_client_ca,) if self.tls_client_ca else ()
        if cas and own:  # health checks show a certificate of tls_dir
            cas += own.cas
        if not self.http_tls:
            return None
        if self.http_cert and self.http_key:
            return TlsPaths(self.http_cert, self.http_key, cas)
        return TlsPaths(own.cert, own.key, cas) if own else None
