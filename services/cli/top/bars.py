"""Numbers, times and bars as text of a fixed width."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import set_cell_size

from services.cli.arguments import plain

FULL, EMPTY = "█", "░"
_SPARKS = "▁▂▃▄▅▆▇█"


def fixed(text: str, width: int) -> str:
    """A text from outside, cut or filled to `width` cells, without characters that control a terminal."""
    text = plain(text)
    shown = set_cell_size(text, width)
    return shown if len(text) <= width or width < 2 else set_cell_size(text, width - 1) + "…"


def bar(part: float, whole: float, width: int) -> str:
    """A bar of `width` cells: empty only if `part` or `whole` is 0, full only if `part` reaches `whole`."""
    if whole <= 0 or part <= 0:
        return EMPTY * width
    filled = min(max(int(part / whole * width), 1), width if part >= whole else width - 1)
    return FULL * filled + EMPTY * (width - filled)


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values, the largest as a full cell."""
    shown = values[-width:]
    largest = max(shown, default=0.0)
    if largest <= 0:
        return _SPARKS[0] * len(shown)
    return "".join(_SPARKS[min(int(value / largest * len(_SPARKS)), len(_SPARKS) - 1)] for value in shown)


def stacked(parts: Sequence[tuple[float, str]], whole: float, width: int) -> str:
    """Draws the parts of a time, each with its own character, scaled so that `whole` seconds fill `width` cells. A
    border between two parts is at the nearest cell."""
    cells, upto = "", 0.0
    for seconds, character in parts:
        upto += max(seconds, 0.0)
        end = round(min(upto / whole, 1.0) * width) if whole > 0 else 0
        cells += character * (end - len(cells))
    return cells.ljust(width)


def seconds(value: float | None) -> str:
    """At most three digits and a unit; a dash without a value."""
    if value is None:
        return "-"
    if value < 0.9995e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 0.9995:
        scaled = value * 1e3
        return f"{scaled:.2f} ms" if scaled < 9.995 else f"{scaled:.1f} ms" if scaled < 99.95 else f"{scaled:.0f} ms"
    return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s" if value < 99.95 else duration(value)


def duration(value: float) -> str:
    """A long time: 100 s, 3 min, 5 h, 2 d."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if value >= 2 * size:
            return f"{value / size:.0f} {unit}"
    return f"{value:.0f} s"


def count(value: int) -> str:
    return f"{value:,}"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"
