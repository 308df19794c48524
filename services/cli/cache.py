"""`paceline cache`: shows and changes what a running cache holds and pins, and prints its events."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from rich.table import Table

from paceline.v1 import cache_pb2 as pb
from paceline.v1.admin_pb2 import GetCacheNamespaceRequest
from paceline.v1.admin_pb2_grpc import AdminServiceStub
from paceline.v1.cache_pb2_grpc import CacheAdminServiceStub, CacheServiceStub
from services.cli.arguments import Parser, console, plain
from services.cli.calls import call
from services.cli.servers import add_flags

if TYPE_CHECKING:
    from services.gateway.text.tokenizer import TextTokenizer

PROG = "paceline cache"
TIMEOUT_S = 10.0
MAX_TOKEN_ID = 2**31 - 1
MAX_TTL_S = 2**32 - 1


def parser() -> Parser:
    top = Parser(prog=PROG, description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    stats = commands.add_parser("stats", help="blocks by worker and state, and how much was reused")
    pins = commands.add_parser("pins", help="the pinned prefixes")
    pin = commands.add_parser("pin", help="protect the cached blocks of a prefix from eviction")
    pin.add_argument("name", help="name of the pin")
    what = pin.add_mutually_exclusive_group(required=True)
    what.add_argument("--tokens", metavar="IDS", help="token ids, with commas")
    what.add_argument("--tokens-file", type=Path, metavar="FILE", help="token ids, with commas or white space")
    what.add_argument("--text-file", type=Path, metavar="FILE", help="text; needs --model, for its tokenizer")
    what.add_argument(
        "--messages-file",
        type=Path,
        metavar="FILE",
        help="JSON: messages with which chats begin, such as a system prompt; --model as above",
    )
    pin.add_argument(
        "--model", metavar="MODEL", help="checkpoint folder, or name on a model hub, for --text-file or --messages-file"
    )
    pin.add_argument("--chat-template", metavar="TEXT", help="the gateway's --chat-template, for --messages-file")
    pin.add_argument(
        "--worker", type=int, action="append", default=[], metavar="ID", help="only on this worker; may be repeated"
    )
    pin.add_argument(
        "--ttl-s",
        type=int,
        default=0,
        metavar="S",
        help="seconds; 0: no limit. A pin ends with its worker, or with the scheduler's link to the cache",
    )
    unpin = commands.add_parser("unpin", help="allow eviction again")
    unpin.add_argument("name")
    reset = commands.add_parser("reset", help="drop all cached blocks that are neither used nor pinned")
    pin.add_argument("--fingerprint", default="", help="of the model; needed if there are several")
    reset.add_argument("--fingerprint", help="only blocks of the model with this fingerprint (default: of all models)")
    for command, default in ((pin, ""), (reset, None)):
        command.add_argument("--lora", default=default, help="name of an adapter")
        command.add_argument("--tenant", default=default, help="a tenant; the scheduler is asked for its namespace")
        command.add_argument("--salt", default=default, help="cache_salt of requests; needs the scheduler")
        command.add_argument(
            "--scheduler", metavar="HOST:PORT", help="for --tenant and --salt [env: PACELINE_SCHEDULER]"
        )
    events = commands.add_parser("events", help="stored and removed blocks as JSON lines: a snapshot, then each change")
    events.add_argument("--after", type=int, default=0, metavar="NUMBER", help="the last known event")
    for command in (stats, pins, pin, unpin, reset, events):
        add_flags(command, "cache")
    return top


def main(argv: list[str]) -> int:
    arguments = parser().parse_args(argv)
    commands: dict[str, Callable[[grpc.Channel, argparse.Namespace], None]] = {
        "stats": _stats,
        "pins": _pins,
        "pin": _pin,
        "unpin": _unpin,
        "reset": _reset,
        "events": _events,
    }
    command = commands[arguments.command]
    if getattr(arguments, "tenant", None) or getattr(arguments, "salt", None):
        status = call(PROG, arguments, "scheduler", lambda channel: _find_namespace(channel, arguments))
        if status:
            return status
    return call(PROG, arguments, "cache", lambda channel: command(channel, arguments))


def _find_namespace(channel: grpc.Channel, arguments: argparse.Namespace) -> None:
    """Replace the salt by the name of the cache namespace for this tenant and salt. Only the scheduler can compute the
    name."""
    request = GetCacheNamespaceRequest(tenant=arguments.tenant, cache_salt=arguments.salt)
    arguments.salt = AdminServiceStub(channel).GetCacheNamespace(request, timeout=TIMEOUT_S).cache_salt


def _stats(channel: grpc.Channel, _: argparse.Namespace) -> None:
    answer = CacheAdminServiceStub(channel).GetCacheStats(pb.GetCacheStatsRequest(), timeout=TIMEOUT_S)
    table = Table(box=None, pad_edge=False)
    titles = ("worker", "free", "cached", "used", "pinned", "may be pinned", "evicted")
    for title in (*titles, "host free", "host cached", "host used"):
        table.add_column(title, justify="right")
    for worker in answer.workers:
        pool = worker.pool
        cells = (pool.worker, pool.free_blocks, pool.cached_blocks, pool.used_blocks, worker.pinned_blocks)
        more = (worker.max_pinned_blocks, pool.evicted_blocks_total)
        host = (pool.free_host_blocks, pool.cached_host_blocks, pool.used_host_blocks)
        table.add_row(*map(str, cells + more + host))
    out = console()
    out.print(table if answer.workers else "no worker")
    queried, hit = answer.prefix_query_tokens, answer.prefix_hit_tokens
    share = f" ({hit / queried:.1%})" if queried else ""
    out.print(f"blocks of {answer.block_size} tokens; {hit} of {queried} prompt tokens reused{share}", soft_wrap=True)
    out.print(f"{answer.num_namespaces} namespaces, {answer.num_event_watchers} event watchers", soft_wrap=True)


def _pins(channel: grpc.Channel, _: argparse.Namespace) -> None:
    pins = CacheAdminServiceStub(channel).ListPins(pb.ListPinsRequest(), timeout=TIMEOUT_S).pins
    table = Table(box=None, pad_edge=False)
    for title in ("name", "tokens by worker", "seconds left", "lora", "model"):
        table.add_column(title, overflow="fold")
    for pin in pins:
        left = f"{pin.expires_in_s:.0f}" if pin.expires_in_s else "-"
        names = map(plain, (pin.name, _tokens_by_worker(pin), left, pin.namespace.lora, pin.namespace.model))
        table.add_row(*names)
    console().print(table if pins else "nothing is pinned")


def _pin(channel: grpc.Channel, arguments: argparse.Namespace) -> None:
    if not 0 <= arguments.ttl_s <= MAX_TTL_S:
        raise ValueError(f"--ttl-s: {arguments.ttl_s} is not within 0..{MAX_TTL_S}")
    if any(not 0 <= worker < 2**32 for worker in arguments.worker):
        raise ValueError(f"--worker: {arguments.worker} are not all ids of workers")
    request = pb.PinPrefixRequest(
        name=arguments.name,
        token_ids=_token_bytes(_token_ids(arguments)),
        namespace=pb.CacheNamespace(model=arguments.fingerprint, lora=arguments.lora, cache_salt=arguments.salt),
        workers=arguments.worker,
        ttl_s=arguments.ttl_s,
    )
    answer = CacheAdminServiceStub(channel).PinPrefix(request, timeout=TIMEOUT_S)
    console().print(f"pinned: {_tokens_by_worker(answer.pin)}", soft_wrap=True)


def _unpin(channel: grpc.Channel, arguments: argparse.Namespace) -> None:
    CacheAdminServiceStub(channel).UnpinPrefix(pb.UnpinPrefixRequest(name=arguments.name), timeout=TIMEOUT_S)
    console().print(f"unpinned: {arguments.name}", soft_wrap=True)


def _reset(channel: grpc.Channel, arguments: argparse.Namespace) -> None:
    request = pb.ResetCacheRequest(model=arguments.fingerprint, lora=arguments.lora, cache_salt=arguments.salt)
    answer = CacheAdminServiceStub(channel).ResetCache(request, timeout=TIMEOUT_S)
    forgotten = ", ".join(f"{worker.num_blocks} blocks of worker {worker.worker}" for worker in answer.workers)
    console().print(f"forgotten: {forgotten or 'nothing'}", soft_wrap=True)


def _events(channel: grpc.Channel, arguments: argparse.Namespace) -> None:
    if not 0 <= arguments.after < 2**64:
        raise ValueError(f"--after: {arguments.after} is not the number of an event")
    for event in CacheServiceStub(channel).WatchEvents(pb.WatchEventsRequest(after=arguments.after)):
        print(json.dumps(event_fields(event)), flush=True)


def event_fields(event: pb.WatchEventsResponse) -> dict[str, Any]:
    """The fields for JSON. Prefix ids have 16 hexadecimal digits, because many JSON readers round large numbers."""
    kind = event.WhichOneof("event") or ""
    fields: dict[str, Any] = {"number": event.sequence_number, "event": kind}
    if kind == "snapshot":
        fields["complete"] = event.snapshot.complete
    elif kind == "cleared":
        fields["worker"] = event.cleared.worker
    elif kind in ("stored", "removed"):
        run = event.stored if kind == "stored" else event.removed
        fields |= {
            "worker": run.worker,
            "tier": pb.CacheTier.Name(run.tier).removeprefix("CACHE_TIER_").lower(),
            "block_ids": list(run.block_ids),
            "prefix_ids": [f"{prefix:016x}" for prefix in run.prefix_ids],
        }
    if kind == "stored":
        stored = event.stored
        fields |= {
            "parent_prefix_id": f"{stored.parent_prefix_id:016x}",
            "start_block": stored.start_block,
            "block_size": stored.block_size,
            **({"token_ids": _from_bytes(stored.token_ids)} if stored.token_ids else {}),
            "model": stored.namespace.model,
            "lora": stored.namespace.lora,
        }
    return fields


def _tokens_by_worker(pin: pb.Pin) -> str:
    return ", ".join(f"{place.num_tokens} tokens on worker {place.worker}" for place in pin.workers)


def _token_ids(arguments: argparse.Namespace) -> list[int]:
    """The token ids of the flags. Raises ValueError or OSError."""
    if arguments.text_file is not None:
        if arguments.model is None:
            raise ValueError("--text-file: --model is needed, for its tokenizer")
        return _tokenizer(arguments).encode(arguments.text_file.read_text("utf-8"))
    if arguments.messages_file is not None:
        if arguments.model is None:
            raise ValueError("--messages-file: --model is needed, for its tokenizer and chat template")
        return _chat_prefix(_tokenizer(arguments), arguments.messages_file.read_text("utf-8"))
    given = arguments.tokens if arguments.tokens is not None else arguments.tokens_file.read_text("utf-8")
    token_ids = []
    for word in given.replace(",", " ").split():
        if not (word.isascii() and word.isdecimal() and int(word) <= MAX_TOKEN_ID):
            raise ValueError(f"--tokens: {word!r} is not a token id, 0..{MAX_TOKEN_ID}")
        token_ids.append(int(word))
    return token_ids


def _tokenizer(arguments: argparse.Namespace) -> TextTokenizer:
    """The gateway's tokenizer for the model. Raises ValueError or OSError."""
    from services.gateway.text.model_files import resolve_folder
    from services.gateway.text.tokenizer import TextTokenizer
    from services.runtime.model.hub import NoSuchModel

    try:
        return TextTokenizer.from_folder(resolve_folder(arguments.model), arguments.chat_template)
    except NoSuchModel as error:
        raise ValueError(f"--model: {error}") from error


def _chat_prefix(tokenizer: TextTokenizer, written: str) -> list[int]:
    """The common first tokens of all chats that begin with these messages and continue with a user's message.

    The template's output for the messages alone may not be such a prefix, so two chats are compared. Raises ValueError.
    """
    from services.gateway.errors import ApiError
    from services.gateway.fields.messages import ChatMessage

    try:
        messages = [ChatMessage.model_validate(one).for_template() for one in json.loads(written)]
        chats = [tokenizer.encode_chat([*messages, {"role": "user", "content": word}]) for word in ("a", "7")]
    except (TypeError, ValueError, ApiError) as error:
        raise ValueError(f"--messages-file: {error}") from error
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*chats, strict=False))
    return [token for token, _ in pairs]


def _token_bytes(token_ids: list[int]) -> bytes:
    packed = array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _from_bytes(token_ids: bytes) -> list[int]:
    packed = array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()
