"""Makes a certificate authority (CA), and certificates that it signs."""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

# The clocks of two machines may differ by this much.
BACKDATED = dt.timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key, in PEM."""

    cert: bytes
    key: bytes


class Authority:
    """A CA. All keys that it makes are ECDSA keys on P-256."""

    def __init__(self, pair: Pair) -> None:
        """Raises ValueError if the PEM cannot be read, or if the key is not ECDSA or not the certificate's. Raises
        TypeError if the key is encrypted."""
        self.pair = pair
        self._cert = x509.load_pem_x509_certificate(pair.cert)
        key = load_pem_private_key(pair.key, password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("the key of the CA is not an ECDSA key")
        if key.public_key() != self._cert.public_key():
            raise ValueError("the key is not the CA's")
        self._key = key

    @classmethod
    def make(cls, name: str, lifetime: dt.timedelta, now: dt.datetime | None = None) -> Authority:
        """A new CA, which can sign certificates but no other CA."""
        now = now or dt.datetime.now(dt.UTC)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(name)
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        cert = (
            _builder(subject, subject, key, now - BACKDATED, now + lifetime)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(identifier, critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(Pair(cert.public_bytes(Encoding.PEM), _pem(key)))

    @property
    def expires(self) -> dt.datetime:
        return self._cert.not_valid_after_utc

    def issue(self, name: str, hosts: Sequence[str], lifetime: dt.timedelta, now: dt.datetime | None = None) -> Pair:
        """A certificate with a new key, for both ends of a connection. `hosts`: DNS names and IP addresses.

        It ends with the CA at the latest."""
        now = now or dt.datetime.now(dt.UTC)
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        authority_key = self._cert.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        cert = (
            _builder(_name(name), self._cert.subject, key, now - BACKDATED, min(now + lifetime, self.expires))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(authority_key), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        return Pair(cert.public_bytes(Encoding.PEM), _pem(key))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, starts: dt.datetime, ends: dt.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(starts, ends - BACKDATED))
        .not_valid_after(ends)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
