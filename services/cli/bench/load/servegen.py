"""Makes requests from a workload description of ServeGen (Alibaba, arXiv 2505.09999).

Each client has windows of some minutes with a rate, a distribution of the gaps between requests (Gamma or Weibull; the
scale is in seconds), and histograms of prompt and output lengths. Clients are independent.
"""

from __future__ import annotations

import ast
import csv
import heapq
import io
import json
import re
import tarfile
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import NamedTuple

from services.cli.bench.load.sessions import LoadSession, Segment, SessionTurn, TimedSession

_NAME = re.compile(r"(?:.*/)?chunk-(\d+)-(trace\.csv|dataset\.json)")


class NotServeGen(ValueError):
    """The archive is no workload description of ServeGen."""


class _Histogram:
    def __init__(self, text: str) -> None:
        weights: dict[int, float] = ast.literal_eval(text)
        self._values = list(weights)
        self._cumulative = list(accumulate(weights.values()))

    def __bool__(self) -> bool:
        return bool(self._values) and self._cumulative[-1] > 0

    def draw(self, random: Random) -> int:
        at = bisect_right(self._cumulative, random.random() * self._cumulative[-1])
        return max(1, self._values[min(at, len(self._values) - 1)])


class _Window(NamedTuple):
    start_s: float
    distribution: str
    shape: float
    scale_s: float


class _Lengths(NamedTuple):
    start_s: float
    prompt: _Histogram
    output: _Histogram


def read(path: Path, seed: int) -> Iterator[TimedSession]:
    """The sessions of all clients, in the order of their start. Raises NotServeGen, OSError."""
    parts: dict[int, dict[str, str]] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                match = _NAME.fullmatch(member.name)
                if match and (file := archive.extractfile(member)) is not None:
                    parts.setdefault(int(match[1]), {})[match[2]] = file.read().decode()
    except (tarfile.TarError, EOFError, UnicodeDecodeError) as error:
        raise NotServeGen(f"not an archive of ServeGen: {error}") from error
    clients = []
    try:
        for number, files in sorted(parts.items()):
            windows = list(_windows(files["trace.csv"]))
            lengths = list(_lengths(files["dataset.json"]))
            clients.append(_client(number, windows, lengths, Random(f"servegen/{seed}/{number}")))
    except (KeyError, ValueError, SyntaxError, IndexError) as error:
        raise NotServeGen(f"chunk-{number}: {error!r}") from error
    if not clients:
        raise NotServeGen("no chunk-N-trace.csv and chunk-N-dataset.json in the archive")
    return heapq.merge(*clients, key=lambda timed: timed.at_s)


def _windows(text: str) -> Iterator[_Window]:
    for start, _, _, distribution, shape, scale in csv.reader(io.StringIO(text)):
        if distribution not in ("", "Gamma", "Weibull"):
            raise ValueError(f"there is no distribution {distribution!r}")
        yield _Window(float(start), distribution, float(shape), float(scale))


def _lengths(text: str) -> Iterator[_Lengths]:
    for start, histograms in json.loads(text).items():
        prompt, output = _Histogram(histograms["input_tokens"]), _Histogram(histograms["output_tokens"])
        if prompt and output:
            yield _Lengths(float(start), prompt, output)


def _client(number: int, windows: list[_Window], lengths: list[_Lengths], random: Random) -> Iterator[TimedSession]:
    count = 0
    for window, following in zip(windows, [*windows[1:], None], strict=True):
        known = [entry for entry in lengths if entry.start_s <= window.start_s] or lengths[:1]
        if not window.distribution or not known:
            continue
        last = windows[-1].start_s + (windows[1].start_s - windows[0].start_s if len(windows) > 1 else 600)
        end_s = following.start_s if following else last
        at_s = window.start_s
        while True:
            if window.distribution == "Gamma":
                at_s += random.gammavariate(window.shape, window.scale_s)
            else:
                at_s += random.weibullvariate(window.scale_s, window.shape)
            if at_s >= end_s:
                break
            count += 1
            segment = Segment(f"client{number}.{count}", known[-1].prompt.draw(random))
            turn = SessionTurn((segment,), known[-1].output.draw(random))
            yield TimedSession(at_s, LoadSession((turn,), kind="trace"))
