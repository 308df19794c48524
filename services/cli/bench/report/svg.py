"""Line charts as SVG. Colours come from the page's CSS, so that they follow dark and light mode. Lines also differ in
their dashes and markers, for readers that see few colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 560, 320
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 12, 46
MAX_SERIES = 6
DASHES = ("", "7 4", "2 3", "9 3 2 3", "12 4", "4 2")
MAX_TICKS = 8
# In the legend: the width of an entry without its name, the width of a character of the name, and the height of a row.
ENTRY_PX, CHARACTER_PX, ROW_PX = 34, 6.6, 17

Point = tuple[float, float]


class ChartLine(NamedTuple):
    """A line of points, with its name in the legend."""

    name: str
    points: list[Point]
    style: int  # of colour, dash and marker
    has_markers: bool = False
    has_line: bool = True


class ChartLimit(NamedTuple):
    """A line across the chart, such as a limit of the SLO."""

    name: str
    value: float
    is_vertical: bool = False


@dataclass(frozen=True, slots=True)
class LineChart:
    """The content of a chart. draw() makes the SVG."""

    title: str
    x_label: str
    y_label: str
    lines: list[ChartLine]
    log_x: bool = False
    log_y: bool = False
    limits: list[ChartLimit] = field(default_factory=list)
    note: str = ""


class _Scale(NamedTuple):
    """One axis: values to pixels."""

    low: float
    high: float
    start_px: float
    end_px: float
    is_log: bool

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        return round(self.start_px + share * (self.end_px - self.start_px), 1)

    def ticks(self) -> list[float]:
        if not self.is_log:
            step = _nice((self.high - self.low) / 5)
            return [i * step for i in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)]
        # The finest ticks that are not too many.
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        inside: list[float] = []
        for digits in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)):
            finer = [digit * 10.0**power for power in powers for digit in digits]
            finer = [tick for tick in finer if self.low * 0.999 <= tick <= self.high * 1.001]
            if len(finer) > MAX_TICKS:
                break
            inside = finer
        return inside


def draw(chart: LineChart) -> str:
    """An <svg> element. Empty if the chart has no points."""
    points = [point for line in chart.lines for point in line.points]
    if not points:
        return ""
    across = [limit.value for limit in chart.limits if limit.is_vertical]
    up = [limit.value for limit in chart.limits if not limit.is_vertical]
    rows, legend = _legend(chart)
    height = HEIGHT + rows * ROW_PX
    x = _scale([p[0] for p in points] + across, LEFT, WIDTH - RIGHT, chart.log_x)
    y = _scale([p[1] for p in points] + up, HEIGHT - BOTTOM, TOP, chart.log_y)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(chart.title)}">',
        *_axes(chart, x, y),
        *(_limit(limit, x, y) for limit in chart.limits),
    ]
    for line in chart.lines:
        parts += _line(line, x, y)
    return "\n".join([*parts, *legend, "</svg>"])


def _scale(values: list[float], start_px: float, end_px: float, is_log: bool) -> _Scale:
    if is_log:
        positive = [value for value in values if value > 0] or [1.0]
        low, high = min(positive), max(positive)
        return _Scale(low / 1.15, high * 1.15, start_px, end_px, True)
    high = max(*values, 0.0) or 1.0
    return _Scale(min(*values, 0.0), high * 1.05, start_px, end_px, False)


def _axes(chart: LineChart, x: _Scale, y: _Scale) -> Iterable[str]:
    for tick in x.ticks():
        yield f'<line class="grid" x1="{x(tick)}" y1="{TOP}" x2="{x(tick)}" y2="{HEIGHT - BOTTOM}"/>'
        yield f'<text x="{x(tick)}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{_tick(tick)}</text>'
    for tick in y.ticks():
        yield f'<line class="grid" x1="{LEFT}" y1="{y(tick)}" x2="{WIDTH - RIGHT}" y2="{y(tick)}"/>'
        yield f'<text x="{LEFT - 6}" y="{y(tick) + 4}" text-anchor="end">{_tick(tick)}</text>'
    middle_x, middle_y = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    yield f'<text class="label" x="{middle_x}" y="{HEIGHT - 10}" text-anchor="middle">{escape(chart.x_label)}</text>'
    turned = f'transform="rotate(-90 14 {middle_y})"'
    yield f'<text class="label" x="14" y="{middle_y}" text-anchor="middle" {turned}>{escape(chart.y_label)}</text>'


def _limit(limit: ChartLimit, x: _Scale, y: _Scale) -> str:
    if limit.is_vertical:
        at = x(limit.value)
        x1, y1, x2, y2 = at, float(TOP), at, float(HEIGHT - BOTTOM)
        text = f'<text x="{at - 4}" y="{HEIGHT - BOTTOM - 6}" text-anchor="end">{escape(limit.name)}</text>'
    else:
        at = y(limit.value)
        x1, y1, x2, y2 = float(LEFT), at, float(WIDTH - RIGHT), at
        text = f'<text x="{WIDTH - RIGHT - 4}" y="{at - 4}" text-anchor="end">{escape(limit.name)}</text>'
    return f'<g class="limit"><line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>{text}</g>'


def _line(line: ChartLine, x: _Scale, y: _Scale) -> Iterable[str]:
    style = line.style % MAX_SERIES
    if line.has_line:
        path = " ".join(f"{'L' if i else 'M'}{x(a)} {y(b)}" for i, (a, b) in enumerate(line.points))
        yield f'<path class="line s{style}" stroke-dasharray="{DASHES[style]}" d="{path}"/>'
    if line.has_markers:
        for a, b in line.points:
            hint = f"<title>{escape(line.name)}: {b:.4g} at {a:.4g}</title>"
            yield f'<path class="mark s{style}" d="{MARKERS[style](x(a), y(b))}">{hint}</path>'


def _legend(chart: LineChart) -> tuple[int, list[str]]:
    """Number of rows, and their elements."""
    parts: list[str] = []
    at, row = float(LEFT), 0
    for line in chart.lines:
        width = ENTRY_PX + CHARACTER_PX * len(line.name) + 12
        if at + width > WIDTH and at > LEFT:
            at, row = float(LEFT), row + 1
        y = HEIGHT + row * ROW_PX + 6
        style = line.style % MAX_SERIES
        if line.has_line:
            dash = f'stroke-dasharray="{DASHES[style]}"'
            parts.append(f'<path class="line s{style}" {dash} d="M{at:.1f} {y} h26"/>')
        if line.has_markers:
            parts.append(f'<path class="mark s{style}" d="{MARKERS[style](at + 13, y)}"/>')
        parts.append(f'<text x="{at + 31:.1f}" y="{y + 4}">{escape(line.name)}</text>')
        at += width
    return row + 1, parts


def _polygon(*corners: Point) -> Callable[[float, float], str]:
    def path(x: float, y: float) -> str:
        return "M" + " L".join(f"{x + dx:.1f} {y + dy:.1f}" for dx, dy in corners) + "Z"

    return path


def _circle(x: float, y: float) -> str:
    return f"M{x - 3.5:.1f} {y:.1f}a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0Z"


MARKERS: tuple[Callable[[float, float], str], ...] = (
    _circle,
    _polygon((-3.5, -3.5), (3.5, -3.5), (3.5, 3.5), (-3.5, 3.5)),
    _polygon((0, -4.5), (4.5, 3.5), (-4.5, 3.5)),
    _polygon((0, -5), (5, 0), (0, 5), (-5, 0)),
    _polygon((0, 4.5), (4.5, -3.5), (-4.5, -3.5)),
    _polygon((-5, -2), (5, -2), (5, 2), (-5, 2)),
)


def _nice(step: float) -> float:
    """The next larger 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= step * 0.999)


def _tick(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.4g}"
