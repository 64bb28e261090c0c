"""Charts as inline SVG, drawn for a panel about 420 pixels wide; colours come from the page's style sheet.

Every chart is a `<figure>`. Line charts carry their scales as data attributes, so that the page's script can show the
values under the pointer.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from refplan.report.html import MINUS, UNKNOWN, Number

WIDTH = 420
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 10, 34
MOST_POINTS = 400
COLOURS = 8
ROW, MOST_LETTERS = 38, 40  # of a dot chart


class Size(NamedTuple):
    """Pixels of a chart; text stays readable when it is shown about this large."""

    width: int = WIDTH
    height: int = 230

    @property
    def right(self) -> int:
        """Where the plotted area ends."""
        return self.width - RIGHT

    @property
    def bottom(self) -> int:
        """Where the x axis lies."""
        return self.height - BOTTOM


LARGE, SMALL = Size(), Size(290, 180)


class Line(NamedTuple):
    """One line of a chart; `low` and `high` shade a band around it."""

    name: str
    x: np.ndarray
    y: np.ndarray
    colour: int = 0
    dash: str = ""  # "dashed", "dotted"
    low: np.ndarray | None = None
    high: np.ndarray | None = None


class Mark(NamedTuple):
    """One line of a dot chart: a value, perhaps with its interval, and the single values behind it."""

    label: str
    value: float
    low: float
    high: float
    text: str
    colour: int = 0
    single: tuple[float, ...] = ()


class Scale(NamedTuple):
    """From numbers to pixels."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: Number) -> float:
        """The pixel of a number."""
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


def number(value: Number | None, digits: int = 3) -> str:
    """A number as short as it can be read: 12 300 rather than 12345.678."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if size >= 6 or size < -3:
        mantissa, power = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(power)}".replace("-", MINUS)
    text = f"{value:.{max(0, digits - 1 - size)}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text.replace("-", MINUS)


def level(value: Number | None, plus: bool = False) -> str:
    """A score or a return, always with the same digits so that columns line up."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:{'+' if plus else ''}.{0 if abs(value) >= 1000 else 1}f}".replace("-", MINUS)


def ticks(low: Number, high: Number, count: int = 5) -> list[Number]:
    """Round numbers between two bounds."""
    step = 10 ** math.floor(math.log10((high - low) / count))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= count)
    return [step * n for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def bounds(values: Sequence[np.ndarray], pad: float = 0.06, zero: bool = False) -> tuple[float, float]:
    """The range of all finite values with some air; (0, 1) where there is none."""
    pooled = np.concatenate([np.ravel(v) for v in values]) if values else np.zeros(0)
    pooled = pooled[np.isfinite(pooled)]
    if not len(pooled):
        return 0.0, 1.0
    low, high = float(pooled.min()), float(pooled.max())
    low = min(low, 0.0) if zero else low
    margin = pad * (high - low) if high > low else 0.5 * abs(high) or 0.5
    return (0.0 if zero and low == 0 else low - margin), high + margin


def figure(title: str, svg: str, legend: str = "", note: str = "") -> str:
    """A chart with its heading, its legend and a sentence about it."""
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<figure class="chart"><figcaption>{escape(title)}</figcaption>{legend}{svg}{below}</figure>'


def line_chart(
    title: str,
    lines: Sequence[Line],
    x_label: str,
    *,
    y_range: tuple[float, float] | None = None,
    guides: Sequence[float] = (),
    diagonal: bool = False,
    zero: bool = False,
    note: str = "",
    size: Size = LARGE,
) -> str:
    """Lines over a common x axis, with bands, horizontal guides, and the diagonal if asked for."""
    x_low, x_high = bounds([line.x for line in lines], pad=0.0)
    columns = [c for line in lines for c in (line.y, line.low, line.high) if c is not None]
    y_low, y_high = y_range or bounds(columns, zero=zero)
    x, y = Scale(x_low, x_high, LEFT, size.right), Scale(y_low, y_high, size.bottom, TOP)
    parts = [_axes(x, y, x_label)]
    parts += [f'<path class="guide" d="M{LEFT} {y(g):.1f}H{size.right}"/>' for g in guides]
    if diagonal:
        parts.append(f'<path class="guide" d="M{x(x_low):.1f} {y(x_low):.1f}L{x(x_high):.1f} {y(x_high):.1f}"/>')
    parts += [_band(line, x, y) for line in lines] + [_line(line, x, y) for line in lines]
    frame = f"{LEFT},{TOP},{size.right},{size.bottom}"
    scales = f'data-x="{x_low},{x_high}" data-y="{y_low},{y_high}" data-frame="{frame}"'
    svg = _svg("".join(parts), size, title, f'class="lines" {scales}')
    return figure(title, svg, legend_of(lines), note)


def legend_of(lines: Sequence[Line]) -> str:
    """What each line is; nothing for a single line."""
    if len(lines) < 2:
        return ""
    items = "".join(
        f'<span><svg class="key" viewBox="0 0 18 8" aria-hidden="true"><path class="line c{line.colour % COLOURS} '
        f'{line.dash}" d="M0 4H18"/></svg>{escape(line.name)}</span>'
        for line in lines
    )
    return f'<div class="legend">{items}</div>'


def dot_chart(title: str, marks: Sequence[Mark], unit: str, *, log: bool = False, note: str = "") -> str:
    """One line per mark: its label above, a dot with its interval below; `log` for times."""
    known = [v for m in marks for v in (m.value, m.low, m.high, *m.single)]
    place = (lambda v: math.log10(max(v, 1e-6))) if log else (lambda v: v)
    low, high = bounds([np.array([place(v) for v in known])])
    if log:
        low, high = math.floor(low), max(math.ceil(high), math.floor(low) + 1)
    height = ROW * len(marks) + 36
    x = Scale(low, high, 10, WIDTH - 14)
    parts = []
    for tick in range(int(low), int(high) + 1) if log else ticks(low, high):
        parts.append(f'<path class="grid" d="M{x(tick):.1f} 4V{height - 30}"/>')
        parts.append(_text("tick", x(tick), height - 16, "middle", number(10.0**tick if log else tick)))
    parts.append(_text("axis", WIDTH / 2, height - 2, "middle", unit))
    for index, mark in enumerate(marks):
        placed = mark._replace(
            value=place(mark.value), low=place(mark.low), high=place(mark.high), single=tuple(map(place, mark.single))
        )
        parts.append(_mark(placed, x, ROW * index + 28))
    return figure(title, _svg("".join(parts), Size(WIDTH, height), title), note=note)


def _mark(mark: Mark, x: Scale, y: Number) -> str:
    colour = f"c{mark.colour % COLOURS}"
    label = mark.label if len(mark.label) <= MOST_LETTERS else mark.label[: MOST_LETTERS - 1] + "…"
    parts = [_text("label", 10, y - 12, "start", label), _text("value", WIDTH - 14, y - 12, "end", mark.text)]
    parts += [f'<circle class="faint {colour}" cx="{x(v):.1f}" cy="{y}" r="3"/>' for v in mark.single]
    if mark.low < mark.high:
        parts.append(f'<path class="whisker {colour}" d="M{x(mark.low):.1f} {y}H{x(mark.high):.1f}"/>')
    parts.append(f'<circle class="dot {colour}" cx="{x(mark.value):.1f}" cy="{y}" r="5.5"/>')
    return "".join(parts)


def scatter_chart(title: str, x_values: np.ndarray, y_values: np.ndarray, x_label: str, y_label: str) -> str:
    """Points, and the diagonal where both would agree."""
    low, high = bounds([x_values, y_values])
    x, y = Scale(low, high, LEFT, LARGE.right), Scale(low, high, LARGE.bottom, TOP)
    parts = [_axes(x, y, x_label), f'<path class="guide" d="M{LEFT} {LARGE.bottom}L{LARGE.right} {TOP}"/>']
    for a, b in zip(x_values, y_values, strict=True):
        if math.isfinite(a) and math.isfinite(b):
            parts.append(f'<circle class="point c0" cx="{x(a):.1f}" cy="{y(b):.1f}" r="2.2"/>')
    middle = (TOP + LARGE.bottom) / 2
    turned = _text("axis", 0, 0, "middle", y_label)
    parts.append(f'<g transform="translate(9 {middle}) rotate(-90)">{turned}</g>')
    return figure(title, _svg("".join(parts), LARGE, title))


def _svg(body: str, size: Size, title: str, attributes: str = "") -> str:
    box = f"0 0 {size.width} {size.height}"
    return f'<svg viewBox="{box}" role="img" aria-label="{escape(title)}" {attributes}>{body}</svg>'


def _text(kind: str, x: Number, y: Number, anchor: str, text: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _axes(x: Scale, y: Scale, x_label: str) -> str:
    """Grid lines at round numbers; the scales know where the plotted area is."""
    parts = []
    for tick in ticks(y.low, y.high):
        parts.append(f'<path class="grid" d="M{x.begin} {y(tick):.1f}H{x.end}"/>')
        parts.append(_text("tick", x.begin - 6, y(tick) + 4, "end", number(tick)))
    marks = ticks(x.low, x.high, 5 if x.end > 300 else 4)
    parts += [_text("tick", x(tick), y.begin + 15, "middle", number(tick)) for tick in marks]
    parts.append(f'<path class="base" d="M{x.begin} {y.begin}H{x.end}"/>')
    parts.append(_text("axis", (x.begin + x.end) / 2, y.begin + BOTTOM - 3, "middle", x_label))
    return "".join(parts)


def _thin(count: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, min(count, MOST_POINTS)).round().astype(int))


def _line(line: Line, x: Scale, y: Scale) -> str:
    rows = _thin(len(line.x))
    style = f'class="line c{line.colour % COLOURS} {line.dash}" data-name="{escape(line.name)}"'
    if len(rows) == 1 and np.isfinite(line.y[0]):
        return f'<circle class="dot c{line.colour % COLOURS}" cx="{x(line.x[0]):.1f}" cy="{y(line.y[0]):.1f}" r="3"/>'
    return f'<path {style} d="{_path(line.x[rows], line.y[rows], x, y)}"/>'


def _path(xs: np.ndarray, ys: np.ndarray, x: Scale, y: Scale) -> str:
    """A path that is interrupted where a value is not finite."""
    parts, pen = [], "M"
    for a, b in zip(xs.tolist(), ys.tolist(), strict=True):
        if not (math.isfinite(a) and math.isfinite(b)):
            pen = "M"
            continue
        parts.append(f"{pen}{x(a):.1f} {y(b):.1f}")
        pen = "L"
    return "".join(parts)


def _band(line: Line, x: Scale, y: Scale) -> str:
    if line.low is None or line.high is None or not len(line.x):
        return ""
    there = _path(line.x, line.high, x, y)
    back = _path(line.x[::-1], line.low[::-1], x, y).replace("M", "L", 1)
    return f'<path class="band c{line.colour % COLOURS}" d="{there}{back}Z"/>'
