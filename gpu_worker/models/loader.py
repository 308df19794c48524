"""Loads weights from a Hugging Face checkpoint, or draws random weights for its config."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpu_worker.device import multiplies_bfloat16
from gpu_worker.errors import ModelError
from gpu_worker.models.config import DecoderConfig, read_config
from gpu_worker.models.embedding import EMBEDDING_FILES, EmbeddingConfig, read_embedding
from gpu_worker.models.weights import DecoderWeights, Pack, Source, assemble, expected_tensors
from services.runtime.logs import get_logger
from services.runtime.model.hub import NoSuchModel, checkpoint_folder, local_folder, more_files
from services.runtime.model.identity import INDEX, TOKENIZER, ModelIdentity, read_identity, weight_files

_log = get_logger(__name__)

# Arguments: bytes read so far, bytes in all.
Progress = Callable[[int, int], None]
# Raises ModelError for a model that does not fit into memory in this type.
SizeCheck = Callable[[DecoderConfig, torch.dtype], None]

LOADABLE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SERVED_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in LOADABLE_DTYPES.values()}
DUMMY_STD = 0.02
_PREFIX = "model."


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The weights and the config of a model."""

    name: str
    folder: Path
    config: DecoderConfig
    weights: DecoderWeights
    dtype: torch.dtype
    # Equal for two workers with the same model, in any type.
    fingerprint: str
    identity: ModelIdentity
    embedding: EmbeddingConfig | None = None  # None: the model generates


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Path
    name: str  # in the file
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return LOADABLE_DTYPES[self.dtype].itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """A checkpoint that passed all checks. The checks do not read the weights' values. If files are absent, its tensors
    are not checked yet."""

    folder: Path
    config: DecoderConfig
    dtype: torch.dtype  # to serve
    embedding: EmbeddingConfig | None
    entries: dict[str, _Entry]  # of every tensor; empty for dummy weights, and if files are absent
    absent: tuple[str, ...] = ()  # weight files that are still to be downloaded

    @property
    def num_bytes(self) -> int:
        """The size of the weights in the files."""
        return sum(entry.num_bytes for entry in self.entries.values())


def resolve_checkpoint(model: str) -> Path:
    """The folder of a local checkpoint, or of a hub snapshot, which may still lack its weights. Raises ModelError."""
    try:
        return checkpoint_folder(model, ["config.json", "generation_config.json", INDEX, TOKENIZER, *EMBEDDING_FILES])
    except NoSuchModel as error:
        raise ModelError(str(error)) from error


def load_model(
    model: str,
    *,
    load_format: str = "auto",
    dtype: str = "auto",
    pooling: Literal["auto", "last", "mean"] = "auto",
    device: torch.device,
    seed: int = 0,
    progress: Progress | None = None,
    check: SizeCheck | None = None,
    pack_for: Callable[[torch.dtype], Pack | None] = lambda _: None,
    quantized_embedding: bool = False,
) -> LoadedModel:
    """Load the model. `pooling`: see read_embedding. Raises ModelError, in one line, if the model cannot be served.
    `check` runs before any download of weights. `pack_for`: the `pack` of assemble() for a type.
    `quantized_embedding`: see assemble()."""
    opened = open_checkpoint(
        model, load_format=load_format, dtype=dtype, pooling=pooling, device=device, check=check, fetch=True
    )
    folder, config, served, embedding = opened.folder, opened.config, opened.dtype, opened.embedding
    expected, pack = expected_tensors(config), pack_for(served)
    if load_format == "dummy":
        source = _dummy_source(expected, served, device, seed)
        tensors: list[object] = ["dummy", seed]
    else:
        source = _file_source(opened.entries, expected, served, device, progress)
        tensors = [[name, entry.shape, entry.dtype] for name, entry in sorted(opened.entries.items())]
    weights = assemble(config, source, pack, quantized_embedding)
    identity = read_identity(folder, with_weights=load_format != "dummy")
    described = str(config) if embedding is None else f"{config}\n{embedding}"
    fingerprint = hashlib.sha256(f"{described}\n{json.dumps(tensors)}\n{identity.weights}".encode()).hexdigest()
    return LoadedModel(_display_name(model, folder), folder, config, weights, served, fingerprint, identity, embedding)


def open_checkpoint(
    model: str,
    *,
    load_format: str,
    dtype: str,
    pooling: Literal["auto", "last", "mean"],
    device: torch.device,
    check: SizeCheck | None = None,
    fetch: bool,
) -> OpenCheckpoint:
    """Read everything but the weights' values. `fetch`: download weights that are missing. Raises ModelError, in one
    line, if the model cannot be served."""
    folder = resolve_checkpoint(model)
    config = read_config(folder)
    if (embedding := read_embedding(folder, pooling)) is not None:
        config = replace(config, has_head=False)
    served = _served_dtype(dtype, config, device)
    if check is not None:
        check(config, served)
    if load_format == "dummy":
        return OpenCheckpoint(folder, config, served, embedding, {})
    # Here, because a model that is refused for its config must not cause a download of its weights.
    files = _weight_files(folder)
    if fetch:
        _fetch_weights(model, folder, files)
    elif local_folder(model) is None and (absent := sorted(file.name for file in files if not file.exists())):
        return OpenCheckpoint(folder, config, served, embedding, {}, tuple(absent))
    entries = _index(folder, files)
    if embedding is not None:
        entries = _with_prefix(entries)
    _check(entries, expected_tensors(config), config)
    return OpenCheckpoint(folder, config, served, embedding, entries)


def _display_name(model: str, folder: Path) -> str:
    """The model's name: a hub name unchanged, or the name of the folder. For a folder `checkpoint`, that of its
    parent."""
    if not Path(model).expanduser().is_dir():
        return model
    folder = folder.resolve()
    return folder.parent.name if folder.name == "checkpoint" else folder.name


def _served_dtype(dtype: str, config: DecoderConfig, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else config.dtype
    if dtype not in SERVED_DTYPES:
        raise ModelError(f"checkpoint dtype {dtype} is not supported; supported: {', '.join(SERVED_DTYPES)}")
    if device.type == "cpu" and dtype == "bfloat16" and not multiplies_bfloat16():
        _log.warning("this CPU has no instructions to multiply bfloat16 matrices: --dtype float32 is faster")
    return SERVED_DTYPES[dtype]


# ── random weights ───────────────────────────────────────────────────────────────────────────────────────────────────


def _dummy_source(expected: dict[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device, seed: int) -> Source:
    def tensor(name: str) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(expected[name], dtype=dtype, device=device)
        # Each tensor has its own random stream, so the order in which tensors are drawn does not matter.
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
        return torch.randn(expected[name], generator=generator, device=device).mul_(DUMMY_STD).to(dtype)

    return tensor


# ── safetensors ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _weight_files(folder: Path) -> set[Path]:
    try:
        files = weight_files(folder)
    except ValueError as error:
        raise ModelError(str(error)) from error
    if not any(file.exists() for file in files) and any(folder.glob("*.gguf")):
        raise ModelError(f"{folder} has its weights as GGUF, which is not supported: safetensors files are needed")
    return files


def _fetch_weights(model: str, folder: Path, files: set[Path]) -> None:
    try:
        more_files(model, folder, sorted(file.name for file in files))
    except NoSuchModel as error:
        raise ModelError(str(error)) from error


def _index(folder: Path, files: set[Path]) -> dict[str, _Entry]:
    """The index of all tensors of the checkpoint. It reads no tensor."""
    missing = sorted(file.name for file in files if not file.exists())
    if missing:
        others = " (it has pytorch_model.bin, which is not read)" if list(folder.glob("pytorch_model*.bin")) else ""
        raise ModelError(f"{folder} lacks {_some(missing)}{others}")
    entries = {}
    for file in sorted(files):
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                piece = tensors.get_slice(name)
                entries[name] = _Entry(file, name, tuple(piece.get_shape()), piece.get_dtype())
    return entries


def _with_prefix(entries: dict[str, _Entry]) -> dict[str, _Entry]:
    """The entries with the names that a model with a head has: they begin with `model.`.

    A model that was saved without a head lacks this prefix, even if config.json says ...ForCausalLM.
    """
    if any(name.startswith(_PREFIX) for name in entries):
        return entries
    return {name if name == "lm_head.weight" else _PREFIX + name: entry for name, entry in entries.items()}


def _check(entries: dict[str, _Entry], expected: dict[str, tuple[int, ...]], config: DecoderConfig) -> None:
    missing = sorted(expected.keys() - entries.keys())
    if missing:
        raise ModelError(f"checkpoint lacks {_some(missing)}")
    unexpected = sorted(name for name in entries.keys() - expected.keys() if not _ignorable(name, config))
    if unexpected:
        raise ModelError(f"checkpoint has tensors that {config.architecture} does not know: {_some(unexpected)}")
    for name, shape in expected.items():
        entry = entries[name]
        if entry.shape != shape:
            raise ModelError(f"tensor {name} has shape {list(entry.shape)}, config.json asks for {list(shape)}")
        if entry.dtype not in LOADABLE_DTYPES:
            raise ModelError(f"tensor {name} is {entry.dtype}; supported: {', '.join(LOADABLE_DTYPES)}")


def _ignorable(name: str, config: DecoderConfig) -> bool:
    # A head that is tied or not used, and buffers that old versions of transformers saved.
    reads_head = config.has_head and not config.tie_embeddings
    return (name == "lm_head.weight" and not reads_head) or name.endswith("rotary_emb.inv_freq")


def _file_source(
    entries: dict[str, _Entry],
    expected: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
) -> Source:
    total = sum(entries[name].num_bytes for name in expected)
    done = 0
    handles = {file: _open(file) for file in {entry.file for entry in entries.values()}}

    def tensor(name: str) -> Tensor:
        nonlocal done
        entry = entries[name]
        # A copy, because safetensors may return a view of the mapped file.
        loaded: Tensor = handles[entry.file].get_tensor(entry.name).to(device=device, dtype=dtype, copy=True)
        done += entry.num_bytes
        if progress is not None:
            progress(done, total)
        return loaded

    return tensor


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read as safetensors: {error}") from error


def _some(names: list[str]) -> str:
    """The first few names, and the number of the others."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
