"""ORCA (Open Request Cost Aggregation): an answer's header tells a load balancer how busy the server is.

Envoy, gRPC and the Gateway API's inference extension read it. Names and format are those of vLLM 0.32.
"""

from __future__ import annotations

import orjson

from paceline.v1.inference_pb2 import SchedulerLoad

LOAD_REPORT = "endpoint-load-metrics"  # a header of the answer


def load_report(wanted_format: bytes, load: SchedulerLoad) -> bytes | None:
    """The value of LOAD_REPORT. None for a format other than TEXT and JSON: ORCA also has BIN."""
    named = {
        "kv_cache_usage_perc": load.num_used_blocks / load.num_blocks if load.num_blocks else 0.0,  # 1: all blocks
        "num_requests_waiting": float(load.num_waiting),
    }
    match wanted_format.upper():
        case b"TEXT":
            return b"TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items()).encode()
        case b"JSON":
            return b"JSON " + orjson.dumps({"named_metrics": named})
        case _:
            return None
