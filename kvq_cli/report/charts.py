"""Draw the plots of a page with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvq_cli.figures import new_figure
from kvq_cli.report import svg
from kvq_cli.report.labels import Box, place, text_width
from kvq_cli.report.markup import Markup, tag

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FONT = 11.0
_COLORS = 10  # c0 ... c9 of chart.css
_MARKERS = "8sD^vP*"


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

    @property
    def points(self) -> list[Point]:
        """The points of all series."""
        return [point for series in self.series for point in series.points]


def legend(series: Sequence[tuple[str, int]]) -> Markup:
    """The names with their markers, as a list that wraps. series: name and style."""
    return tag("ul", [tag("li", _icon(style), name) for name, style in series], class_="legend")


def draw(plot: Plot, width: float = 400.0, height: float = 290.0, alone: bool = False) -> Markup:
    """The plot as an `<svg>` element that scales with its container. alone: for a file of its own."""
    with svg.drawing():
        figure, axes = _axes(width, height, plot.log_x, plot.log_y and all(point.y > 0 for point in plot.points))
        axes.set(xlabel=plot.x_label, ylabel=plot.y_label)
        _set_limits(axes, plot)
        _fit(figure, axes, plot.baseline[0] if plot.baseline else "")
        if plot.baseline:
            name, value = plot.baseline
            axes.axhline(value, **_faint(5, 3))
            # Beside the frame, where no point is.
            axes.text(1.01, value, name, transform=axes.get_yaxis_transform(), va="center", color=svg.colors()["faint"])
        if plot.frontier:
            axes.plot(*_places(best_points(plot.points, plot.frontier)), **_faint(2, 3))
        for series in plot.series:
            if len(series.points) > 1:
                ordered = sorted(series.points, key=lambda point: point.x)
                axes.plot(*_places(ordered), **_look(series.style, marker=""))
            for point in series.points:
                error = point.error or 0
                bar = [max(point.y - error, axes.get_ylim()[0]), point.y, point.y + error]
                look = _look(series.style, ls="-" if error else "", markevery=[1], gid=svg.TIP + point.tip)
                axes.plot([point.x] * 3, bar, **look)
        if plot.direct:
            _draw_labels(axes, plot)
        return svg.inline(figure, plot.title, alone)


def draw_intervals(title: str, x_label: str, rows: Sequence[tuple[str, int, float, float, float, str]]) -> Markup:
    """Means with their intervals as horizontal bars, and a line at zero. rows: name, style, mean, low, high, tip."""
    with svg.drawing():
        figure, axes = _axes(400, 52 + 22 * len(rows))
        axes.set_xlabel(x_label)
        axes.grid(visible=False, axis="y")
        axes.axvline(0, color=svg.colors()["ink"])
        for index, (_, style, mean, low, high, tip) in enumerate(rows):
            axes.plot([low, mean, high], [index] * 3, **_look(style, markevery=[1], gid=svg.TIP + tip))
        axes.set_yticks(range(len(rows)), [row[0] for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        _fit(figure, axes)
        return svg.inline(figure, title)


def best_points(points: Sequence[Point], better: int) -> list[Point]:
    """The points, by x, with a better y than all points of a lower x. better: 1 if higher is better, -1 if lower."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.x, -better * point.y)):
        if not best or better * point.y > better * best[-1].y:
            best.append(point)
    return best


def _icon(style: int) -> Markup:
    """A series's marker alone."""
    from matplotlib.lines import Line2D

    with svg.drawing():
        figure = _figure(14, 14)
        figure.add_artist(Line2D([0.5], [0.5], **_look(style, ls="")))
        return svg.inline(figure)


def _figure(width: float, height: float) -> Figure:
    """An empty figure of this size in units of SVG. Constrained layout would draw it four times."""
    figure = new_figure(width / 72, height / 72)
    figure.set_layout_engine("none")
    return figure


def _axes(width: float, height: float, log_x: bool = False, log_y: bool = False) -> tuple[Figure, Axes]:
    """A figure and its axes: a grid in a frame."""
    figure = _figure(width, height)
    axes = figure.subplots()
    axes.spines[:].set_visible(False)
    axes.patch.set(facecolor="none", edgecolor=svg.colors()["faint"], linewidth=0.8)
    axes.tick_params(which="both", length=0)
    axes.grid(color=svg.colors()["rule"], lw=0.7)
    axes.set(xscale="log" if log_x else "linear", yscale="log" if log_y else "linear", axisbelow=True)
    axes.minorticks_off()
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:.8g}")
    return figure, axes


def _set_limits(axes: Axes, plot: Plot) -> None:
    """Set ticks, and limits around all points, error bars and the baseline: nothing drawn later moves them."""
    from matplotlib.ticker import LogLocator

    values = [(point.x, point.y + sign * (point.error or 0)) for point in plot.points for sign in (-1, 0, 1)]
    levels = ([plot.baseline[1]] if plot.baseline else []) + ([0.0] if plot.zero else [])
    values += [(plot.points[0].x, level) for level in levels]
    axes.update_datalim([(x, y) for x, y in values if y > 0 or axes.get_yscale() == "linear"])
    axes.margins(0.08, 0.06)
    axes.autoscale_view()
    low, high = axes.get_ylim()
    axes.set(xlim=axes.get_xlim(), ylim=(0 if plot.zero else low, high))
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    if plot.x_ticks:
        axes.set_xticks(plot.x_ticks)


def _fit(figure: Figure, axes: Axes, right: str = "") -> None:
    """Place the frame, with room for the labels of both axes and for a text on its right."""
    texts = axes.yaxis.get_major_formatter().format_ticks(list(axes.get_yticks()))
    _, _, width, height = figure.bbox.bounds
    left = 12 + max(text_width(text, FONT) for text in texts) + (14 if axes.get_ylabel() else 0)
    room = left + 12 + text_width(right, FONT)
    axes.set_position((left / width, 40 / height, 1 - room / width, 1 - 46 / height))


def _draw_labels(axes: Axes, plot: Plot) -> None:
    """Write each point's label where there is room, with a line to its point if that is far away."""
    from matplotlib.transforms import IdentityTransform

    pixels, at = IdentityTransform(), axes.transData.transform
    ends = [[at((point.x, point.y + sign * (point.error or 0))) for sign in (-1, 0, 1)] for point in plot.points]
    bars = [Box(x - 2, low - 2, x + 2, high + 2) for (x, low), _, (_, high) in ends]
    places = [(float(x), float(y)) for _, (x, y), _ in ends]
    boxes = place(places, [point.label for point in plot.points], FONT, Box(*axes.bbox.extents), bars)
    colors = [_look(series.style)["color"] for series in plot.series for _ in series.points]
    for point, box, (x, y), color in zip(plot.points, boxes, places, colors, strict=True):
        near = min(max(x, box.x0), box.x1), min(max(y, box.y0), box.y1)
        if abs(near[0] - x) + abs(near[1] - y) > 14:
            axes.plot(*zip((x, y), near, strict=True), transform=pixels, color=color, lw=0.7)
        axes.text(*box.center, point.label, transform=pixels, ha="center", va="center")


def _places(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [point.x for point in points], [point.y for point in points]


def _look(style: int, **others: Any) -> dict[str, Any]:
    """Color and marker of the numbered series, and other properties of its line."""
    color, marker = svg.colors()[f"c{style % _COLORS}"], _MARKERS[style % len(_MARKERS)]
    return {"color": color, "marker": marker, "ms": 8, "mew": 0, "clip_on": False} | others


def _faint(*dashes: float) -> dict[str, Any]:
    return {"color": svg.colors()["faint"], "ls": (0, dashes)}
