"""A run as JSON: what `--json` writes and `compare` reads."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.cli.bench.load.arrivals import OfferedLoad
from services.cli.bench.stats.records import RequestRecord
from services.cli.bench.stats.summary import StageSummary

SCHEMA = "paceline.bench.v1"


class BadReport(ValueError):
    """The file is no report. The message is one line."""


@dataclass(frozen=True, slots=True)
class RampResult:
    """Rates in sessions per second. None: none was found."""

    holds: float | None
    breaks: float | None
    limit: float

    def __str__(self) -> str:
        if self.holds is None:
            return f"no rate holds the SLO, down to {self.breaks:.3g}/s" if self.breaks else "no rate was measured"
        upper = f"{self.breaks:.3g}/s breaks it" if self.breaks else f"the limit of the ramp, {self.limit:.3g}/s"
        return f"the highest rate that holds the SLO is {self.holds:.3g} sessions/s ({upper})"


@dataclass(frozen=True, slots=True)
class StageReport:
    """What one stage measured, under one load."""

    load: OfferedLoad
    summary: StageSummary
    cut_sessions: int
    client_cpu: float  # share of a core that the load generator used
    records: list[RequestRecord] = field(default_factory=list)  # empty in a report that was read

    def as_json(self) -> dict[str, Any]:
        return {
            "load": {"kind": self.load.kind, "value": self.load.value},
            "summary": self.summary.as_json(),
            "cut_sessions": self.cut_sessions,
            "client_cpu": self.client_cpu,
            "requests": [_row(record) for record in self.records],
        }


@dataclass(frozen=True, slots=True)
class BenchReport:
    """A whole run: what was asked of which server, and its stages. Written and read as JSON."""

    created: str
    paceline: str
    url: str
    model: str
    endpoint: str
    seed: int
    workload: str
    slo: str | None
    interrupted: bool
    notes: list[str]
    stages: list[StageReport]
    ramp: RampResult | None

    def as_json(self) -> dict[str, Any]:
        ramp = self.ramp
        plain = ("created", "paceline", "url", "model", "endpoint", "seed", "workload", "slo", "interrupted", "notes")
        return {
            "schema": SCHEMA,
            **{name: getattr(self, name) for name in plain},
            "ramp": ramp and {"holds": ramp.holds, "breaks": ramp.breaks, "limit": ramp.limit},
            "stages": [stage.as_json() for stage in self.stages],
        }

    def write(self, path: Path) -> None:
        """Raises OSError."""
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n", "utf-8")

    @classmethod
    def read(cls, path: Path) -> BenchReport:
        """Without the requests of the stages. Raises BadReport."""
        try:
            values = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise BadReport(f"{path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise BadReport(f"{path}: not JSON: {error}") from error
        if not isinstance(values, dict) or values.pop("schema", None) != SCHEMA:
            raise BadReport(f"{path}: not written by `paceline bench --json` (schema {SCHEMA})")
        try:
            stages = [
                StageReport(
                    OfferedLoad(**stage["load"]),
                    StageSummary.from_json(stage["summary"]),
                    stage["cut_sessions"],
                    stage["client_cpu"],
                )
                for stage in values.pop("stages")
            ]
            ramp = values.pop("ramp")
            return cls(**values, stages=stages, ramp=ramp and RampResult(**ramp))
        except (KeyError, TypeError) as error:
            raise BadReport(f"{path}: a field is missing or unknown: {error}") from error


def _row(record: RequestRecord) -> dict[str, Any]:
    def rounded(value: float | None) -> float | None:
        return None if value is None else round(value, 6)

    return {
        "kind": record.kind,
        "turn": record.turn,
        "sent_s": rounded(record.sent_s),
        "late_s": rounded(record.late_s),
        "ttft_s": rounded(record.ttft_s),
        "tpot_s": rounded(record.tpot_s),
        "itl_p99_s": rounded(record.itl_p99_s),
        "e2e_s": rounded(record.e2e_s),
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "finish_reason": record.finish_reason,
        "error": record.error or None,
    }
