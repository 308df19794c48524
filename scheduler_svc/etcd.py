"""The requests to etcd that an election needs, over its JSON gateway (API v3, etcd 3.4 or newer). In that JSON, 64-bit
numbers are strings, keys and values are base64, and zero values are left out."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from services.runtime.tls.credentials import client_context
from services.runtime.tls.files import TlsFiles


class EtcdError(Exception):
    """The endpoint that was asked gave no answer in time, refused, or sent something else than etcd's answer. The
    message is one line."""


@dataclass(frozen=True, slots=True)
class LeaderRecord:
    """The leader as etcd records it at one revision."""

    revision: int
    lease: int | None  # of the leader; None if there is none
    address: str
    epoch: int  # of the latest leader; 0 if there never was one
    epoch_revision: int  # at which the epoch was written


class Etcd:
    """Asks one endpoint until it fails, then the next one.

    `key`: the leader's key is KEY/master, and lives as long as the leader's lease. KEY/epoch has the epoch of the
    latest leader, and KEY/cache-secret the schedulers' cache secret; both stay for ever. `timeout_s`: limit of one
    request. `tls`: for https endpoints; None: the system's CAs, and no certificate. Renewed certificates are used from
    the next request on.
    """

    def __init__(self, endpoints: Sequence[str], key: str, timeout_s: float, tls: TlsFiles | None = None) -> None:
        self._endpoints = list(endpoints)
        self._leader_key, self._epoch_key = _encode(f"{key}/master"), _encode(f"{key}/epoch")
        self._secret_key = _encode(f"{key}/cache-secret")
        self._timeout_s = timeout_s
        self._tls = tls
        self._certificates = tls.current() if tls is not None else None
        self._client = self._make_client()
        self._earlier: list[httpx.AsyncClient] = []  # of earlier certificates; a watch may still use them

    async def close(self) -> None:
        for client in (*self._earlier, self._client):
            await client.aclose()

    async def grant(self, ttl_s: int) -> tuple[int, float]:
        """A new lease, with its time to live. It may be longer than asked for."""
        answer = await self._ask("lease/grant", {"TTL": str(ttl_s)})
        with _parsing(answer):
            return int(answer["ID"]), float(answer["TTL"])

    async def renew(self, lease: int) -> float:
        """Seconds that the lease lives from now on; 0 if it has ended."""
        answer = await self._ask("lease/keepalive", {"ID": str(lease)})
        with _parsing(answer):
            return float(answer["result"].get("TTL", 0))

    async def revoke(self, lease: int) -> None:
        """End the lease, and delete its keys."""
        await self._ask("lease/revoke", {"ID": str(lease)})

    async def read_leader(self) -> LeaderRecord:
        ranges = [{"request_range": {"key": key}} for key in (self._leader_key, self._epoch_key)]
        answer = await self._ask("kv/txn", {"success": ranges})
        with _parsing(answer):
            leaders, epochs = (part["response_range"].get("kvs", []) for part in answer["responses"])
            leader, epoch = leaders[0] if leaders else None, epochs[0] if epochs else None
            return LeaderRecord(
                revision=int(answer["header"]["revision"]),
                lease=int(leader.get("lease", 0)) if leader else None,
                address=_decode(leader["value"])[:200] if leader else "",
                epoch=int(_decode(epoch["value"])) if epoch else 0,
                epoch_revision=int(epoch["mod_revision"]) if epoch else 0,
            )

    async def claim(self, seen: LeaderRecord, lease: int, address: str, epoch: int) -> bool:
        """Take the leader's key if it has been free since `seen`. After an EtcdError the key may be taken or not."""
        body = {
            "compare": [
                {"key": self._leader_key, "target": "CREATE", "create_revision": "0"},
                {"key": self._epoch_key, "target": "MOD", "mod_revision": str(seen.epoch_revision)},
            ],
            "success": [
                {"request_put": {"key": self._leader_key, "value": _encode(address), "lease": str(lease)}},
                {"request_put": {"key": self._epoch_key, "value": _encode(str(epoch))}},
            ],
        }
        return bool((await self._ask("kv/txn", body)).get("succeeded", False))

    async def shared_secret(self, offered: bytes) -> bytes:
        """The cache secret that all schedulers of this key share: the first one that any of them has offered."""
        key = self._secret_key
        body = {
            "compare": [{"key": key, "target": "CREATE", "create_revision": "0"}],
            "success": [{"request_put": {"key": key, "value": base64.b64encode(offered).decode()}}],
            "failure": [{"request_range": {"key": key}}],
        }
        answer = await self._ask("kv/txn", body)
        with _parsing(answer):
            if answer.get("succeeded", False):
                return offered
            return base64.b64decode(answer["responses"][0]["response_range"]["kvs"][0]["value"])

    async def wait_until_left(self, seen: LeaderRecord, at_most_s: float) -> None:
        """Wait until the leader's key is deleted after `seen`, for at most `at_most_s`. Returns early if the watch
        cannot continue (a revision that was compacted away), so look again. Raises EtcdError."""
        watch = {"key": self._leader_key, "start_revision": str(seen.revision + 1), "filters": ["NOPUT"]}
        endpoint = self._endpoints[0]
        try:
            async with asyncio.timeout(at_most_s):
                body = {"create_request": watch}
                async with self._http().stream("POST", f"{endpoint}/v3/watch", json=body) as answer:
                    async for line in answer.aiter_lines():
                        if line and _ends_watch(line):
                            return
        except TimeoutError:
            return
        except EtcdError:
            raise
        except Exception as error:  # as in _ask()
            raise self._failed(endpoint, error) from error

    def _make_client(self) -> httpx.AsyncClient:
        verify = client_context(self._tls) if self._tls is not None else True
        # etcd is called by address; a proxy from the environment is for external hosts
        return httpx.AsyncClient(timeout=None, trust_env=False, verify=verify)

    def _http(self) -> httpx.AsyncClient:
        """The client with the newest certificates."""
        if self._tls is not None and (certificates := self._tls.current()) is not self._certificates:
            client = self._make_client()
            self._earlier.append(self._client)
            self._client, self._certificates = client, certificates
        return self._client

    async def _ask(self, method: str, body: dict[str, Any]) -> Any:
        endpoint = self._endpoints[0]
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._http().post(f"{endpoint}/v3/{method}", json=body)
        except Exception as error:  # also other errors than httpx's: AttributeError if a connection is reset at once
            raise self._failed(endpoint, error) from error
        if answer.status_code != 200:
            # An endpoint without its cluster answers like this; another endpoint may work.
            raise self._failed(endpoint, f"{method}: {answer.status_code} {answer.text[:200]}")
        with _parsing(answer.text):
            return answer.json()

    def _failed(self, endpoint: str, reason: object) -> EtcdError:
        if self._endpoints[0] == endpoint:  # otherwise another request has failed there before
            self._endpoints.append(self._endpoints.pop(0))
        words = " ".join(str(reason).split()) or type(reason).__name__
        return EtcdError(f"{endpoint}: {words}")


def _ends_watch(line: str) -> bool:
    with _parsing(line):
        result = json.loads(line)["result"]
        return bool(result.get("canceled") or result.get("events"))


@contextmanager
def _parsing(answer: object) -> Iterator[None]:
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise EtcdError(f"not an answer of etcd: {str(answer)[:200]}") from error


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _decode(text: str) -> str:
    return base64.b64decode(text).decode(errors="replace")
