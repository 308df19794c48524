"""Rotary positions: the angles of every scaling type, and the rotation.

Checkpoints pair element i of a head with element i + head_dim/2. The loader reorders the rows of the q and k
projections (`interleave_heads`), so that a pair lies side by side. Attention scores do not change, because q and k
are reordered in the same way. The rotation is then one complex multiplication instead of four passes over memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpu_worker.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians per position of each pair, float32 [head_dim / 2], and the factor on cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.type == "linear":
        return plain / rope.factor, 1.0
    if rope.type == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.type == "yarn":
        return _yarn(rope, head_dim, plain), _yarn_attention_factor(rope)
    # `default` and `dynamic` differ only beyond the model's own length. The worker refuses sequences beyond it.
    return plain, 1.0


def angle_table(rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device) -> Tensor:
    """cos + i sin for every position: complex64 [max_positions, head_dim / 2]."""
    frequencies, factor = inverse_frequencies(rope, head_dim)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return torch.complex(angles.cos() * factor, angles.sin() * factor).to(device)


def rotate(heads: Tensor, turns: Tensor) -> Tensor:
    """Rotate each pair of elements by its angle.

    heads: [rows, heads, head_dim] with pairs side by side. turns: rows of angle_table(), complex64
    [rows, 1, head_dim / 2]."""
    wide = heads if heads.dtype == torch.float32 else heads.float()
    pairs = torch.view_as_complex(wide.view(*heads.shape[:-1], -1, 2))
    turned = torch.view_as_real(pairs * turns).view(heads.shape)
    return turned if heads.dtype == torch.float32 else turned.to(heads.dtype)


def interleave_heads(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder rows [heads * head_dim, ...] (or one head's [head_dim]) from half-and-half order to pairs side by
    side."""
    halves = weight.view(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    wavelengths = 2 * math.pi / plain
    low_wavelength = rope.original_max_positions / rope.low_freq_factor
    high_wavelength = rope.original_max_positions / rope.high_freq_factor
    scaled = torch.where(wavelengths > low_wavelength, plain / rope.factor, plain)
    smooth = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    smoothed = (1 - smooth) * scaled / rope.factor + smooth * scaled
    between = (wavelengths >= high_wavelength) & (wavelengths <= low_wavelength)
    return torch.where(between, smoothed, scaled)


def _yarn(rope: RopeConfig, head_dim: int, plain: Tensor) -> Tensor:
    def dimension(rotations: float) -> float:
        return (head_dim * math.log(rope.original_max_positions / (rotations * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return torch.lerp(plain, plain / rope.factor, ramp)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale()
