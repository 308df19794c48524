"""The `timings` of an answer: llama.cpp's fields, and more fields that show why a request took long."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from services.gateway.engine.generation import Generation

SERVER_TIMING = "server-timing"
_DIGITS = 3  # decimal places of milliseconds
# Entries of Server-Timing, and the time of each.
_SERVER_TIMING = (("queue", "queue_ms"), ("prompt", "prompt_ms"), ("predicted", "predicted_ms"))


def timings(generations: Sequence[Generation]) -> dict[str, Any]:
    """Over all sequences of an answer that has ended: sums of tokens and preemptions, the longest times, and the
    largest number of restarts.

    Names and meanings are those of llama.cpp's server (tools/server/README.md) up to `predicted_per_second`: `cache_n`
    counts prompt tokens with reused KV, `prompt_n` the computed ones, `predicted_n` output tokens. A time is null if no
    service knows it. A quotient is null if its time is null or its divisor is 0.
    """
    prompts = [g for g in generations if not g.job.sample] or generations  # samples of one prompt share it
    cached = sum(g.cached_tokens or 0 for g in prompts)
    cached_host = sum(min(g.run.timing.num_cached_host_tokens, g.cached_tokens or 0) for g in prompts if g.run.timing)
    prompt_n = sum(len(g.job.prompt_ids) for g in prompts) - cached
    predicted_n = sum(max(g.num_tokens - len(g.job.delivered), 0) for g in generations)
    times = [g.run.times for g in generations]
    prompt_ms = _longest_ms(one.prompt_s for one in times)
    predicted_ms = _longest_ms(one.output_s for one in times)
    reports = [g.run.timing for g in generations if g.run.timing is not None]
    losses = [g.run.num_resubmissions + (g.run.timing.num_losses if g.run.timing else 0) for g in generations]
    return {
        "cache_n": cached,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, prompt_n),
        "prompt_per_second": _ratio(1000 * prompt_n, prompt_ms),
        "predicted_n": predicted_n,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _ratio(predicted_ms, predicted_n),
        "predicted_per_second": _ratio(1000 * predicted_n, predicted_ms),
        "queue_ms": _longest_ms(one.queue_s for one in times),
        "cache_device_n": cached - cached_host,
        "cache_host_n": cached_host,
        "preemptions": sum(one.num_preemptions for one in reports),
        "restarts": max(losses, default=0),
    }


def server_timing(of_answer: Mapping[str, Any]) -> str:
    """The Server-Timing header (W3C) of an answer with these `timings`. Empty if no time is known."""
    known = ((name, of_answer[key]) for name, key in _SERVER_TIMING)
    return ", ".join(f"{name};dur={ms:g}" for name, ms in known if ms is not None)


def first_token_timing(generations: Sequence[Generation]) -> str:
    """The Server-Timing header of a stream. The headers are sent with the first token, so they contain the time until
    the first token: queue and prompt together. Empty if this gateway has read no first token."""
    first = [g.run.ttft_s for g in generations if g.run.ttft_s is not None]
    return f"ttft;dur={round(1000 * min(first), _DIGITS):g}" if first else ""


def _longest_ms(times_s: Iterable[float | None]) -> float | None:
    return max((round(1000 * time_s, _DIGITS) for time_s in times_s if time_s is not None), default=None)


def _ratio(over: float | None, under: float | None) -> float | None:
    return round(over / under, _DIGITS) if over is not None and under else None
