"""The gateway's own figures for the live view. They are those of /metrics, with rates and percentiles over the
last seconds."""

from __future__ import annotations

from collections import deque

from services.gateway.live_view.schema import GatewayFigures, Percentiles
from services.gateway.openai.gateway import Gateway

# Percentiles and rates are over this many snapshots. There is one per second, so the last 11 span 10 s.
WINDOW = 11
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class RecentFigures:
    """Rates and percentiles since the oldest of the last WINDOW snapshots."""

    def __init__(self, gateway: Gateway) -> None:
        metrics = gateway.metrics
        self._gateway = gateway
        self._histograms = {
            "ttft_s": metrics.time_to_first_token_s,
            "itl_s": metrics.inter_token_latency_s,
            "e2e_s": metrics.e2e_latency_s,
            "event_loop_lag_s": metrics.event_loop_lag_s,
        }
        self._before: deque[tuple[float, int, dict[str, tuple[int, ...]]]] = deque(maxlen=WINDOW)

    def take(self, now_s: float) -> GatewayFigures:
        """The figures at `now_s` (any clock)."""
        gateway, metrics = self._gateway, self._gateway.metrics
        counts = {name: histogram.counts for name, histogram in self._histograms.items()}
        self._before.append((now_s, metrics.generation_tokens, counts))
        since_s, tokens, since = self._before[0]
        elapsed_s = now_s - since_s
        return GatewayFigures(
            ready=gateway.ready,
            draining=gateway.draining,
            model=gateway.model_name,
            live_requests=metrics.live_requests,
            prompt_tokens=metrics.prompt_tokens,
            generation_tokens=metrics.generation_tokens,
            tokens_per_s=(metrics.generation_tokens - tokens) / elapsed_s if elapsed_s else 0.0,
            window_s=elapsed_s,
            **{
                name: Percentiles(**{label: histogram.quantile(q, since[name]) for label, q in _QUANTILES.items()})
                for name, histogram in self._histograms.items()
            },
        )
