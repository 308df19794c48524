"""What the engine contracts tell a router of the model and of the load."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from paceline.third_party.smg_common_pb2 import GetTokenizerChunk
from paceline.v1.inference_pb2 import SchedulerLoad
from services.gateway.text.model_files import ModelFiles, read_json_object, read_text

# Bytes of the archive in one message, as smg's own servicers send it.
_CHUNK_BYTES = 64 * 1024
# What a router needs to encode prompts and render chats.
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "special_tokens_map.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.json", "chat_template.jinja"),
)
# A token rate is measured over at least this many seconds.
_RATE_S = 1.0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as its configuration files describe it."""

    root: str  # its name on a hub, or the served name: a folder of this machine is of no use to a router
    model_type: str
    architectures: list[str]
    pad_token_id: int
    bos_token_id: int
    default_sampling_json: str  # of generation_config.json; "": it has none


def read_facts(files: ModelFiles, root: str) -> ModelFacts:
    """Read config.json. Raises OSError or ValueError."""
    config = read_json_object(files.folder / "config.json")
    architectures = config.get("architectures")
    return ModelFacts(
        root=root,
        model_type=str(config.get("model_type") or ""),
        architectures=[str(name) for name in architectures] if isinstance(architectures, list) else [],
        pad_token_id=_token_id(config, "pad_token_id"),
        bos_token_id=_token_id(config, "bos_token_id"),
        default_sampling_json=orjson.dumps(dict(files.defaults)).decode() if files.defaults else "",
    )


def _token_id(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) else 0


class TokenizerArchive:
    """The model's tokenizer files as a zip archive. It is made once, off the event loop."""

    def __init__(self, folder: Path, chat_template: str | None = None) -> None:
        """`chat_template`: a template or its path, which replaces the template of the folder."""
        self._make = partial(_archive, folder, chat_template)
        self._making: asyncio.Task[bytes] | None = None

    async def chunks(self) -> Iterator[GetTokenizerChunk]:
        """The archive in messages. The last one has its SHA-256. Raises FileNotFoundError if there is no tokenizer."""
        if self._making is None or (self._making.done() and self._making.exception() is not None):
            self._making = asyncio.create_task(asyncio.to_thread(self._make))
        return _chunks(await asyncio.shield(self._making))


def _chunks(data: bytes) -> Iterator[GetTokenizerChunk]:
    for start in range(0, len(data), _CHUNK_BYTES):
        is_last = start + _CHUNK_BYTES >= len(data)
        digest = hashlib.sha256(data).hexdigest() if is_last else ""
        yield GetTokenizerChunk(data=data[start : start + _CHUNK_BYTES], sha256=digest)


def _archive(folder: Path, chat_template: str | None) -> bytes:
    if not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError("this model has no tokenizer.json; send token ids")
    if chat_template and "{" not in chat_template:
        chat_template = read_text(Path(chat_template))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in _TOKENIZER_FILES:
            if name == "chat_template.jinja" and chat_template:
                archive.writestr(name, chat_template)
            elif (folder / name).is_file():
                archive.write(folder / name, name)
    return buffer.getvalue()


class Throughput:
    """Tokens per second since the last reading, over at least a second."""

    def __init__(self, count: Callable[[], int], now_s: float) -> None:
        self._count = count
        self._began_s, self._before = now_s, count()
        self._per_s = 0.0

    def per_s(self, now_s: float) -> float:
        """The rate now."""
        if (elapsed_s := now_s - self._began_s) >= _RATE_S:
            count = self._count()
            self._per_s = (count - self._before) / elapsed_s
            self._began_s, self._before = now_s, count
        return self._per_s


def load_fields(load: SchedulerLoad | None, *, tokens_per_s: float, hit_rate: float) -> dict[str, Any]:
    """The fields that the SchedulerLoad messages of the contracts have in common, from Paceline's own `load`. All
    workers together are one engine."""
    load = load or SchedulerLoad()
    usage = load.num_used_blocks / load.num_blocks if load.num_blocks else 0.0
    return {
        "num_running_reqs": load.num_running,
        "num_waiting_reqs": load.num_waiting,
        "num_total_reqs": load.num_running + load.num_waiting,
        "num_used_tokens": load.num_used_blocks * load.block_size,
        "max_total_num_tokens": load.num_blocks * load.block_size,
        "token_usage": usage,
        "gen_throughput": tokens_per_s,
        "cache_hit_rate": hit_rate,
        "utilization": load.num_running / load.num_slots if load.num_slots else 0.0,
        "max_running_requests": load.num_slots,
        # Before a request runs, nothing tells how much of its prompt is cached. This is the upper limit.
        "num_waiting_uncached_tokens": load.num_waiting_tokens,
    }


def timestamp() -> str:
    """Now, in ISO 8601."""
    return datetime.now(UTC).isoformat()
