"""Checks of the model: its files, its tokenizer, and whether it fits into memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from services.cli.doctor.check import Check, CheckStatus
from services.runtime.memory.available import GIB

if TYPE_CHECKING:
    from gpu_worker.inspection import Inspection


def check_checkpoint(model: str, inspected: Inspection) -> Check:
    """A checkpoint that a worker accepts."""
    use = "embeddings" if inspected.makes_embeddings else f"context of {inspected.max_model_len} tokens"
    size = f"{_size(inspected.file_bytes)} of weights" if inspected.file_bytes else "no weights read"
    found = f"{model}: {inspected.architecture}, {size}, {use}"
    if inspected.absent:
        files = ", ".join(inspected.absent[:3])
        size, dtype = _size(inspected.download_bytes), inspected.dtype.partition("+")[0]
        advice = f"`up` downloads {files} first (about {size} as {dtype})"
        return Check("checkpoint", CheckStatus.SLOW, found, advice)
    return Check("checkpoint", CheckStatus.OK, found)


def check_disk(folder: Path, inspected: Inspection, free_bytes: int) -> Check:
    """The disk of the checkpoint. Only a download needs room on it."""
    found = f"{free_bytes / GIB:.1f} GiB free at {folder}"
    if inspected.absent and free_bytes < inspected.download_bytes:
        return Check(
            "disk", CheckStatus.FAILS, found, f"the download needs about {_size(inspected.download_bytes)}: make room"
        )
    return Check("disk", CheckStatus.OK, found)


def check_fit(inspected: Inspection, workers: int) -> Check:
    """The memory for all workers of the model. One worker fits: otherwise there would be no Inspection."""
    available = inspected.available
    there = f" of {available.num_bytes / GIB:.1f} GiB available" if available is not None else ""
    needs = _size(inspected.host_bytes if inspected.device == "cpu" else inspected.weights_bytes)
    found = f"needs {needs}{there} (weights as {inspected.dtype}, smallest KV pool)"
    if inspected.device != "cpu":
        return Check("memory for the model", CheckStatus.OK, f"needs {needs} on the GPU, which has room")
    if available is not None and workers * inspected.host_bytes > available.num_bytes:
        advice = f"{workers} workers do not fit: give --workers {available.num_bytes // inspected.host_bytes}"
        return Check("memory for the model", CheckStatus.FAILS, found, advice)
    if inspected.pool_bytes < inspected.wanted_pool_bytes:
        advice = f"only {_size(inspected.pool_bytes)} of KV instead of {_size(inspected.wanted_pool_bytes)}: "
        advice += "fewer requests run at a time"
        if inspected.dtype == "float32":
            advice += "; --dtype bfloat16 halves the KV, and weights that are not quantized"
        return Check("memory for the model", CheckStatus.SLOW, found, advice)
    return Check("memory for the model", CheckStatus.OK, found)


def check_tokenizer(folder: Path, makes_embeddings: bool) -> Check:
    """As the gateway reads it."""
    try:
        from services.gateway.text.model_files import read_model_files
        from services.gateway.text.tokenizer import TextTokenizer
    except ImportError as error:
        advice = (
            f"`up` cannot start a gateway: `make up` installs it, and so does pip install -e '.[gateway]' ({error})"
        )
        return Check("tokenizer", CheckStatus.FAILS, "cannot be imported", advice)
    try:
        vocabulary = read_model_files(folder).vocab_size
        if not (folder / "tokenizer.json").is_file():
            advice = "requests must send token ids: add the fast tokenizer's tokenizer.json to the folder"
            return Check("tokenizer", CheckStatus.NOTE, "no tokenizer.json", advice)
        tokenizer = TextTokenizer.from_folder(folder)
    except (OSError, ValueError) as error:
        return Check("tokenizer", CheckStatus.FAILS, "cannot be read", " ".join(str(error).split()))
    found = f"{tokenizer.vocab_size} tokens"
    if tokenizer.vocab_size > vocabulary:
        found += f" (the model has {vocabulary})"
    if makes_embeddings:
        return Check("tokenizer", CheckStatus.OK, found)
    if tokenizer.template_source is None:
        advice = "chats are refused, completions work: give the gateway a --chat-template, or add chat_template.jinja"
        return Check("tokenizer", CheckStatus.NOTE, f"{found}, no chat template", advice)
    return Check("tokenizer", CheckStatus.OK, f"{found}, with a chat template")


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= 0.1 * GIB else f"{num_bytes / 2**20:.0f} MiB"
