"""Prometheus metrics: one registry per process, served at /metrics for GET and HEAD."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from wsgiref.simple_server import WSGIServer, make_server

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import ThreadingWSGIServer, _get_best_family, _SilentHandler, choose_encoder
