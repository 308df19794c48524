"""Finds the key that a call shows."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence

from services.runtime.keys.entries import ApiKey, hash_of

# Longer texts are no keys. The limit bounds the work for a wrong key.
MAX_SECRET_CHARS = 512
_BEARER = "bearer "


class NoCredential(Exception):
    """A call shows no key, or shows it in a way that cannot be read. The message says what to send."""


class Keyring:
    """The keys that are in force. Never changed: a reload makes a new keyring."""

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        self.keys = tuple(keys)
        self._by_hash = {key.sha256: key for key in keys}

    def find(self, secret: str) -> ApiKey | None:
        """The key, None if there is none.

        The lookup compares hashes, so its time depends on no character of a key. To learn the first bytes of a stored
        hash, a client would have to find texts with hashes that begin with the bytes that it wants to try. The last
        comparison takes constant time.
        """
        if not 0 < len(secret) <= MAX_SECRET_CHARS:
            return None
        digest = hash_of(secret)
        key = self._by_hash.get(digest)
        return key if key is not None and hmac.compare_digest(key.sha256, digest) else None


def shown_secret(fields: Iterable[tuple[str | bytes, str | bytes]]) -> str:
    """The key in HTTP headers or gRPC metadata with lower-case names: `authorization: Bearer KEY`, or `x-api-key: KEY`.

    Raises NoCredential if there is none, or if two different keys are given.
    """
    found: set[str] = set()
    is_other_scheme = False
    for name, value in fields:
        if name in (b"x-api-key", "x-api-key"):
            found.add(_text(value).strip())
        elif name in (b"authorization", "authorization"):
            given = _text(value).strip()
            if given[: len(_BEARER)].lower() == _BEARER:
                found.add(given[len(_BEARER) :].strip())
            else:
                is_other_scheme = True
    found.discard("")
    if len(found) > 1:
        raise NoCredential("different keys in authorization or x-api-key headers; send one key")
    if found:
        return found.pop()
    if is_other_scheme:
        raise NoCredential("the authorization header must be: Bearer KEY")
    raise NoCredential("an API key is needed: send the header authorization: Bearer KEY, or x-api-key: KEY")


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
