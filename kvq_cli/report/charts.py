"""Draw plots as inline SVG; colors are classes of chart.css, so that they follow the page's light or dark theme."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvq_cli.report.axes import Axis, tick_text
from kvq_cli.report.labels import Box, place, text_width
from kvq_cli.report.markup import Markup, tag

COLORS = 10  # classes c0 ... c9 of chart.css
FONT = 11.0
_TOP, _RIGHT, _BOTTOM = 12.0, 12.0, 40.0
#: Paths of markers of about 9 pixels around (0, 0).
_MARKERS = (
    "M-4 0A4 4 0 1 0 4 0A4 4 0 1 0 -4 0Z",
    "M-3.6-3.6H3.6V3.6H-3.6Z",
    "M0-5L5 0L0 5L-5 0Z",
    "M0-4.8L4.6 3.6H-4.6Z",
    "M0 4.8L4.6-3.6H-4.6Z",
    "M-1.5-4.5H1.5V-1.5H4.5V1.5H1.5V4.5H-1.5V1.5H-4.5V-1.5H-1.5Z",
    "M0-5L1.6-1.6L5 0L1.6 1.6L0 5L-1.6 1.6L-5 0L-1.6-1.6Z",
)


@dataclass(frozen=True)
class Point:
    """error: half the length of the error bar, None for none. tip: text shown when the pointer is above. label: see
    `Plot.direct`."""

    x: float
    y: float
    tip: str
    error: float | None = None
    label: str = ""


@dataclass(frozen=True)
class Series:
    """Points joined by a line. style: number of its color and marker, the same in all plots of a page."""

    name: str
    style: int
    points: Sequence[Point]


@dataclass(frozen=True)
class Plot:
    """Series over one x axis.

    title:    what is plotted, read out instead of the picture.
    baseline: a horizontal line with its label: the score of the uncompressed cache.
    direct:   write each point's label beside it.
    frontier: join the points that no other point excels in both coordinates; -1: lower is better, 1: higher, 0: none.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    baseline: tuple[str, float] | None = None
    direct: bool = False
    frontier: int = 0
    x_ticks: Sequence[float] | None = None
    zero: bool = False


def marker(style: int, x: float, y: float) -> Markup:
    """A marker of this series at (x, y)."""
    path = _MARKERS[style % len(_MARKERS)]
    return tag("path", d=path, transform=f"translate({x:.1f} {y:.1f})", class_="marker")


def legend(series: Sequence[tuple[str, int]]) -> Markup:
    """The names with their markers, as a list that wraps. series: name and style."""
    entries = [
        tag("li", tag("svg", marker(style, 7, 7), viewBox="0 0 14 14", class_=_color(style), aria_hidden="true"), name)
        for name, style in series
    ]
    return tag("ul", entries, class_="legend")


def draw(plot: Plot, width: float = 400.0, height: float = 290.0, style: Markup | None = None) -> Markup:
    """The plot as an `<svg>` element that scales with its container. style: its style sheet, for a file of its own."""
    points = [point for series in plot.series for point in series.points]
    lows = [point.y - (point.error or 0) for point in points]
    lows = [low if low > 0 or not plot.log_y else point.y for low, point in zip(lows, points, strict=True)]
    heights = [*lows, *(point.y + (point.error or 0) for point in points)]
    heights += [plot.baseline[1]] if plot.baseline else []
    y = Axis.around([*heights, *([0.0] if plot.zero else [])], height - _BOTTOM, _TOP, plot.log_y)
    if plot.zero:
        y = Axis(0.0, y.high, y.start, y.end)
    ticks = y.ticks()
    left = 22 + max(text_width(tick_text(tick), FONT) for tick in ticks)
    x = Axis.around([point.x for point in points], left, width - _RIGHT, plot.log_x, 0.08)
    frame = Box(left, _TOP, width - _RIGHT, height - _BOTTOM)
    return tag(
        "svg",
        style,
        tag("title", plot.title),
        _grid(plot, x, y, frame, ticks),
        _frontier(plot, x, y),
        [_series(series, x, y) for series in plot.series],
        _labels(plot, x, y, frame) if plot.direct else None,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        class_="plot",
        xmlns=None if style is None else "http://www.w3.org/2000/svg",
        width=None if style is None else width,
        height=None if style is None else height,
    )


def draw_intervals(title: str, x_label: str, rows: Sequence[tuple[str, int, float, float, float, str]]) -> Markup:
    """Means with their intervals as horizontal bars, and a line at zero. rows: name, style, mean, low, high, tip."""
    step, left, width = 22.0, 14 + max(text_width(row[0], FONT) for row in rows), 400.0
    height = _TOP + step * len(rows) + _BOTTOM
    x = Axis.around([0.0, *(edge for row in rows for edge in row[3:5])], left, width - _RIGHT)
    frame = Box(left, _TOP, width - _RIGHT, height - _BOTTOM)
    drawn = [_x_axis(x.ticks(), x, frame, x_label)]
    drawn.append(_line(x.at(0), frame.y0, x.at(0), frame.y1, "zero"))
    for index, (name, style, mean, low, high, tip) in enumerate(rows):
        middle = _TOP + step * (index + 0.5)
        drawn.append(_text(left - 8, middle + 4, name, "end"))
        bar = _line(x.at(low), middle, x.at(high), middle, "error")
        drawn.append(tag("g", tag("title", tip), bar, marker(style, x.at(mean), middle), class_=_color(style)))
    return tag(
        "svg", tag("title", title), drawn, viewBox=f"0 0 {width:g} {height:g}", role="img", class_="plot intervals"
    )


def best_points(points: Sequence[Point], better: int) -> list[Point]:
    """The points, by x, with a better y than all points of a lower x. better: 1 if higher is better, -1 if lower."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.x, -better * point.y)):
        if not best or better * point.y > better * best[-1].y:
            best.append(point)
    return best


def _grid(plot: Plot, x: Axis, y: Axis, frame: Box, ticks: Sequence[float]) -> list[Markup]:
    drawn = [_x_axis(plot.x_ticks or x.ticks(), x, frame, plot.x_label)]
    for tick in ticks:
        drawn.append(_line(frame.x0, y.at(tick), frame.x1, y.at(tick), "grid"))
        drawn.append(_text(frame.x0 - 5, y.at(tick) + 4, tick_text(tick), "end"))
    middle = (frame.y0 + frame.y1) / 2
    drawn.append(_text(11, middle, plot.y_label, "middle", transform=f"rotate(-90 11 {middle:.1f})"))
    if plot.baseline:
        box = _baseline_box(plot, x, y, frame)
        drawn.append(_line(frame.x0, y.at(plot.baseline[1]), frame.x1, y.at(plot.baseline[1]), "baseline"))
        drawn.append(_text(box.x0, box.y1 - 3, plot.baseline[0], "start", class_="faint"))
    return drawn


def _baseline_box(plot: Plot, x: Axis, y: Axis, frame: Box) -> Box:
    """The place of the baseline's label: above or below the line, at the end where it covers no point."""
    name, value = plot.baseline or ("", 0.0)
    width, line = text_width(name, FONT), y.at(value)
    boxes = [
        Box(left, top, left + width, top + 14)
        for left in (frame.x1 - width - 3, frame.x0 + 4)
        for top in (line - 15, line + 2)
        if frame.y0 <= top and top + 14 <= frame.y1
    ]
    taken = _taken(plot, x, y)
    return min(boxes, key=lambda box: sum(box.overlap(other) for other in taken))


def _taken(plot: Plot, x: Axis, y: Axis) -> list[Box]:
    """The boxes of all points with their error bars."""
    points = [point for series in plot.series for point in series.points]
    ends = [(x.at(point.x), y.at(point.y + (point.error or 0)), y.at(point.y - (point.error or 0))) for point in points]
    return [Box(middle - 2, top - 2, middle + 2, bottom + 2) for middle, top, bottom in ends]


def _x_axis(ticks: Sequence[float], x: Axis, frame: Box, label: str) -> Markup:
    drawn = []
    for tick in ticks:
        drawn.append(_line(x.at(tick), frame.y0, x.at(tick), frame.y1, "grid"))
        drawn.append(_text(x.at(tick), frame.y1 + 15, tick_text(tick), "middle"))
    edge = tag("rect", x=frame.x0, y=frame.y0, width=frame.x1 - frame.x0, height=frame.y1 - frame.y0, class_="frame")
    return tag("g", drawn, edge, _text((frame.x0 + frame.x1) / 2, frame.y1 + 33, label, "middle"))


def _frontier(plot: Plot, x: Axis, y: Axis) -> Markup | None:
    if not plot.frontier:
        return None
    best = best_points([point for series in plot.series for point in series.points], plot.frontier)
    places = " ".join(f"{x.at(point.x):.1f},{y.at(point.y):.1f}" for point in best)
    return tag("polyline", points=places, class_="frontier")


def _series(series: Series, x: Axis, y: Axis) -> Markup:
    points = sorted(series.points, key=lambda point: point.x)
    places = [(x.at(point.x), y.at(point.y)) for point in points]
    line = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
    drawn = [tag("polyline", points=line, class_="line")] if len(points) > 1 else []
    for point, (px, py) in zip(points, places, strict=True):
        bar = None
        if point.error:
            bar = _line(px, y.at(point.y - point.error), px, y.at(point.y + point.error), "error")
        drawn.append(tag("g", tag("title", point.tip), bar, marker(series.style, px, py)))
    return tag("g", drawn, class_=_color(series.style))


def _labels(plot: Plot, x: Axis, y: Axis, frame: Box) -> list[Markup]:
    named = [(series, point) for series in plot.series for point in series.points]
    places = [(x.at(point.x), y.at(point.y)) for _, point in named]
    taken = _taken(plot, x, y) + ([_baseline_box(plot, x, y, frame)] if plot.baseline else [])
    boxes = place(places, [point.label for _, point in named], FONT, frame, taken)
    drawn = []
    for (series, point), box, (px, py) in zip(named, boxes, places, strict=True):
        cx, cy = box.center
        near_x, near_y = min(max(px, box.x0), box.x1), min(max(py, box.y0), box.y1)
        if abs(near_x - px) + abs(near_y - py) > 14:
            drawn.append(_line(px, py, near_x, near_y, f"leader {_color(series.style)}"))
        drawn.append(_text(cx, cy + 4, point.label, "middle", class_="label"))
    return drawn


def _color(style: int) -> str:
    return f"c{style % COLORS}"


def _line(x0: float, y0: float, x1: float, y1: float, kind: str) -> Markup:
    return tag("line", x1=round(x0, 1), y1=round(y0, 1), x2=round(x1, 1), y2=round(y1, 1), class_=kind)


def _text(
    x: float, y: float, text: str, anchor: str, class_: str | None = None, transform: str | None = None
) -> Markup:
    return tag("text", text, x=round(x, 1), y=round(y, 1), text_anchor=anchor, class_=class_, transform=transform)
