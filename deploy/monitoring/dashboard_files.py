"""Writes the Grafana dashboards of deploy/monitoring/dashboards: `python -m deploy.monitoring.dashboard_files`.

A test runs each query on a Prometheus beside running services.
"""

from __future__ import annotations

from pathlib import Path

from deploy.monitoring.grafana import Dashboard, Panel, text

FOLDER = Path(__file__).parent / "dashboards"
_GATEWAY = 'model_name=~"$model"'


def _rate(series: str, by: str = "", selector: str = "") -> str:
    grouped = f"sum by ({by})" if by else "sum"
    return f"{grouped} (rate({series}{{{selector}}}[$__rate_interval]))"


def _quantiles(histogram: str, selector: str = "", by: str = "") -> list[tuple[str, str]]:
    """p50, p90 and p99 of a histogram."""
    labels = f"le, {by}" if by else "le"
    buckets = _rate(f"{histogram}_bucket", labels, selector)
    suffix = f" {{{{{by}}}}}" if by else ""
    return [(f"histogram_quantile({q / 100}, {buckets})", f"p{q}{suffix}") for q in (50, 90, 99)]


def _mean(histogram: str, by: str) -> str:
    return f"{_rate(f'{histogram}_sum', by)} / {_rate(f'{histogram}_count', by)}"


def _by_state(series: str) -> tuple[str, str]:
    return f"sum by (state) ({series})", "{{state}}"


_LATENCY = [
    Panel("Time to first token", "s", _quantiles("paceline_gateway_time_to_first_token_seconds", _GATEWAY)),
    Panel("Inter-token latency", "s", _quantiles("paceline_gateway_inter_token_latency_seconds", _GATEWAY)),
    Panel("Request latency", "s", _quantiles("paceline_gateway_e2e_request_latency_seconds", _GATEWAY)),
]
_QUEUE = Panel(
    "Requests",
    "short",
    [
        ("max(paceline_scheduler_num_requests_running)", "running"),
        ("max(paceline_scheduler_num_requests_waiting)", "waiting"),
        ("max(paceline_scheduler_num_offline_requests_running)", "offline, running"),
        ("max(paceline_scheduler_num_offline_requests_waiting)", "offline, waiting"),
    ],
    "A standby scheduler has none, so max() shows the leader's.",
)
_HIT_RATE = (
    f"{_rate('paceline_cache_prefix_hit_tokens_total')} / {_rate('paceline_cache_prefix_query_tokens_total')}",
    "prompt tokens from the cache",
)

DASHBOARDS = (
    Dashboard(
        "overview",
        "Paceline: overview",
        [
            (
                "Load",
                [
                    Panel(
                        "Tokens",
                        "short",
                        [
                            (_rate("paceline_gateway_generation_tokens_total", selector=_GATEWAY), "generated per s"),
                            (_rate("paceline_gateway_prompt_tokens_total", selector=_GATEWAY), "prompt per s"),
                            (_rate("paceline_gateway_prompt_tokens_cached_total", selector=_GATEWAY), "cached per s"),
                        ],
                    ),
                    _QUEUE,
                    Panel("Work in the queue", "s", [("max(paceline_scheduler_work_waiting_seconds)", "work waiting")]),
                ],
            ),
            ("Latency", _LATENCY),
            (
                "Capacity",
                [
                    Panel(
                        "KV blocks in use",
                        "percentunit",
                        [("max(paceline_scheduler_kv_cache_usage_ratio)", "in use"), _HIT_RATE],
                    ),
                    Panel(
                        "Ended requests",
                        "reqps",
                        [(_rate("paceline_gateway_requests_total", "finish_reason", _GATEWAY), "{{finish_reason}}")],
                        stacked=True,
                    ),
                    Panel(
                        "Services",
                        "short",
                        [
                            ("max(paceline_scheduler_num_workers)", "workers"),
                            ("sum(paceline_scheduler_is_master)", "leading schedulers"),
                            ("sum(paceline_gateway_scheduler_ready)", "ready gateways"),
                        ],
                    ),
                ],
            ),
        ],
    ),
    Dashboard(
        "scheduler",
        "Paceline: scheduler and steps",
        [
            (
                "Steps",
                [
                    Panel("Steps", "ops", [(_rate("paceline_scheduler_steps_total"), "plans per s")]),
                    Panel("Tokens of a step", "short", _quantiles("paceline_scheduler_step_tokens")),
                    Panel(
                        "Time in the core for a step",
                        "s",
                        [
                            (
                                f"{_rate('paceline_scheduler_core_seconds_total')} / "
                                f"{_rate('paceline_scheduler_steps_total')}",
                                "core",
                            )
                        ],
                    ),
                ],
            ),
            (
                "Requests",
                [
                    _QUEUE,
                    Panel(
                        "Arrivals and refusals",
                        "reqps",
                        [
                            (_rate("paceline_scheduler_requests_accepted_total"), "accepted"),
                            (_rate("paceline_scheduler_requests_rejected_total"), "rejected"),
                            (_rate("paceline_gateway_queue_refusals_total", "limit"), "429, limit of {{limit}}"),
                        ],
                    ),
                    Panel(
                        "Preemption",
                        "ops",
                        [
                            (_rate("paceline_scheduler_preemptions_total"), "preempted"),
                            (_rate("paceline_scheduler_swapped_out_total"), "swapped out"),
                            (_rate("paceline_scheduler_swapped_in_total"), "swapped in"),
                            (_rate("paceline_scheduler_requeued_requests_total"), "requeued after a loss"),
                        ],
                    ),
                ],
            ),
            (
                "Faults",
                [
                    Panel(
                        "Failures",
                        "ops",
                        [
                            (_rate("paceline_scheduler_step_failures_total"), "failed steps"),
                            (_rate("paceline_scheduler_retried_rows_total"), "retried rows"),
                            (_rate("paceline_scheduler_quarantined_requests_total"), "poisoned requests"),
                            (_rate("paceline_scheduler_policy_errors_total"), "steps with a failed policy"),
                        ],
                    ),
                    Panel("Epoch", "none", [("max(paceline_scheduler_epoch)", "epoch")], "Rises with each new leader."),
                    Panel(
                        "Restored after a loss of the cache",
                        "ops",
                        [
                            (_rate("paceline_scheduler_restored_requests_total"), "requests"),
                            (_rate("paceline_scheduler_refused_claims_total"), "refused entries"),
                        ],
                    ),
                ],
            ),
        ],
    ),
    Dashboard(
        "cache",
        "Paceline: KV cache",
        [
            (
                "Blocks",
                [
                    Panel(
                        "Device blocks",
                        "short",
                        [("sum by (state) (paceline_cache_blocks)", "{{state}}")],
                        stacked=True,
                    ),
                    Panel(
                        "Host blocks",
                        "short",
                        [("sum by (state) (paceline_cache_host_blocks)", "{{state}}")],
                        stacked=True,
                    ),
                    Panel(
                        "Blocks in use by worker",
                        "percentunit",
                        [
                            (
                                'sum by (worker) (paceline_cache_blocks{state="used"}) / '
                                "sum by (worker) (paceline_cache_blocks)",
                                "{{worker}}",
                            )
                        ],
                    ),
                ],
            ),
            (
                "Reuse",
                [
                    Panel("Hit rate", "percentunit", [_HIT_RATE]),
                    Panel(
                        "Evicted and moved blocks",
                        "ops",
                        [
                            (_rate("paceline_cache_evicted_blocks_total"), "evicted"),
                            (_rate("paceline_cache_demoted_blocks_total"), "to host memory"),
                            (_rate("paceline_cache_promoted_blocks_total"), "from host memory"),
                            (_rate("paceline_cache_copied_blocks_total"), "copied"),
                        ],
                    ),
                    Panel(
                        "Pins and watchers",
                        "short",
                        [
                            ("sum(paceline_cache_pins)", "pinned prefixes"),
                            ("sum(paceline_cache_event_watchers)", "watchers of events"),
                        ],
                    ),
                ],
            ),
            (
                "Exchanges with the scheduler",
                [
                    Panel("Exchanges", "ops", [(_rate("paceline_cache_exchanges_total"), "exchanges")]),
                    Panel("Core time", "s", _quantiles("paceline_cache_exchange_duration_seconds")),
                    Panel("Refused operations", "ops", [(_rate("paceline_cache_refused_ops_total"), "refused")]),
                ],
            ),
        ],
    ),
    Dashboard(
        "workers",
        "Paceline: workers",
        [
            (
                "Steps",
                [
                    Panel("Mean step time", "s", [(_mean("paceline_worker_step_seconds", "instance"), "{{instance}}")]),
                    Panel("Step time", "s", _quantiles("paceline_worker_step_seconds")),
                    Panel("Sequences in the last step", "short", [("paceline_worker_batch_size", "{{instance}}")]),
                ],
            ),
            (
                "Work and faults",
                [
                    Panel(
                        "Computed tokens",
                        "short",
                        [(_rate("paceline_worker_tokens_total", "instance, phase"), "{{instance}} {{phase}}")],
                    ),
                    Panel(
                        "Link to the scheduler",
                        "short",
                        [
                            ("paceline_worker_link_up", "{{instance}}"),
                            (_rate("paceline_worker_link_failures_total", "instance"), "{{instance}} failures per s"),
                        ],
                    ),
                    Panel(
                        "Failed steps",
                        "ops",
                        [(_rate("paceline_worker_failed_steps_total", "instance"), "{{instance}}")],
                    ),
                ],
            ),
        ],
    ),
    Dashboard(
        "gateways",
        "Paceline: gateways and tenants",
        [
            (
                "A request's time",
                [
                    Panel("In the queue", "s", _quantiles("paceline_gateway_request_queue_time_seconds", _GATEWAY)),
                    Panel("Prefill", "s", _quantiles("paceline_gateway_request_prefill_time_seconds", _GATEWAY)),
                    Panel("Decode", "s", _quantiles("paceline_gateway_request_decode_time_seconds", _GATEWAY)),
                    Panel("Prompt length", "short", _quantiles("paceline_gateway_request_prompt_tokens", _GATEWAY)),
                    Panel("Output length", "short", _quantiles("paceline_gateway_request_generation_tokens", _GATEWAY)),
                    Panel("Event-loop lag", "s", _quantiles("paceline_gateway_event_loop_lag_seconds", by="instance")),
                ],
            ),
            (
                "Tenants",
                [
                    Panel(
                        "Output tokens per second",
                        "short",
                        [(_rate("paceline_gateway_tenant_generation_tokens_total", "tenant", _GATEWAY), "{{tenant}}")],
                        stacked=True,
                    ),
                    Panel(
                        "Mean time to first token",
                        "s",
                        [(_mean("paceline_gateway_tenant_time_to_first_token_seconds", "tenant"), "{{tenant}}")],
                    ),
                    Panel(
                        "Mean time in the queue",
                        "s",
                        [(_mean("paceline_gateway_tenant_request_queue_time_seconds", "tenant"), "{{tenant}}")],
                    ),
                ],
            ),
            (
                "Clients",
                [
                    Panel(
                        "Live requests",
                        "short",
                        [
                            ("sum by (instance) (paceline_gateway_live_requests)", "{{instance}}"),
                            ("sum(paceline_gateway_detached_requests)", "without a client"),
                        ],
                    ),
                    Panel(
                        "Resumed and abandoned",
                        "ops",
                        [
                            (_rate("paceline_gateway_taken_up_requests_total"), "resumed"),
                            (_rate("paceline_gateway_gone_requests_total"), "client gone"),
                        ],
                    ),
                    Panel(
                        "Refused",
                        "ops",
                        [
                            (_rate("paceline_gateway_queue_refusals_total", "limit"), "queue full: {{limit}}"),
                            (_rate("paceline_gateway_quota_refusals_total", "quota"), "quota: {{quota}}"),
                            (_rate("paceline_gateway_unauthenticated_requests_total"), "without a valid key"),
                        ],
                    ),
                ],
            ),
        ],
    ),
)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for dashboard in DASHBOARDS:
        (FOLDER / f"{dashboard.name}.json").write_text(text(dashboard))


if __name__ == "__main__":
    main()
