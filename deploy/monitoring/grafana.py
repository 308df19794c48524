"""Grafana's JSON model of a dashboard: rows of panels, each with a title, a unit and queries."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_COLUMNS, _HEIGHT = 24, 8  # of Grafana's grid
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Okabe and Ito's palette: it can be told apart by colour-blind people.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")


@dataclass(frozen=True)
class Panel:
    """`queries`: PromQL and the legend, which may name labels as {{label}}. `unit` is one of Grafana's."""

    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    help: str = ""
    stacked: bool = False


@dataclass(frozen=True)
class Dashboard:
    """`name` is the file's. `rows`: title and panels, three of them side by side."""

    name: str
    title: str
    rows: Sequence[tuple[str, Sequence[Panel]]]


def model(dashboard: Dashboard) -> dict[str, Any]:
    """The model, in version 39 of its schema."""
    return {
        "uid": f"paceline-{dashboard.name}",
        "title": dashboard.title,
        "tags": ["paceline"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["paceline"], "title": "Paceline", "asDropdown": True}],
        "templating": {"list": list(_variables())},
        "panels": list(_panels(dashboard)),
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}
    yield {
        "name": "model",
        "type": "query",
        "label": "Model",
        "datasource": _DATASOURCE,
        "query": {"query": "label_values(paceline_gateway_generation_tokens_total, model_name)", "refId": "model"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panels(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    number, y = 1, 0
    for title, panels in dashboard.rows:
        yield {"id": number, "type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1}}
        number, y = number + 1, y + 1
        width = _COLUMNS // min(len(panels), 3)
        for index, panel in enumerate(panels):
            line, column = divmod(index, 3)
            place = {"x": column * width, "y": y + line * _HEIGHT, "w": width, "h": _HEIGHT}
            yield {"id": number, "gridPos": place, **_panel(panel)}
            number += 1
        y += (len(panels) + 2) // 3 * _HEIGHT


def _panel(panel: Panel) -> dict[str, Any]:
    colours = [
        {
            "matcher": {"id": "byFrameRefID", "options": chr(ord("A") + index)},
            "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": _COLOURS[index]}}],
        }
        for index in range(len(panel.queries))
    ]
    stacking = {"mode": "normal" if panel.stacked else "none"}
    one_series_each = all("{{" not in legend for _, legend in panel.queries)
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": _DATASOURCE,
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "color": {"mode": "palette-classic"},
                "custom": {"lineWidth": 2, "fillOpacity": 40 if panel.stacked else 8, "stacking": stacking},
            },
            "overrides": colours if one_series_each else [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _DATASOURCE, "expr": query, "legendFormat": legend}
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }


def text(dashboard: Dashboard) -> str:
    """The file of a dashboard."""
    return json.dumps(model(dashboard), indent=1) + "\n"
