"""Write matplotlib's figures as SVG inside a page: colors of its light or dark theme, tooltips, no ids, no links."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from io import StringIO
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from kvq_cli.report.markup import Markup, join, tag

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Beginning of the gid of an artist with a tooltip.
TIP = "tip: "
_SVG = "{http://www.w3.org/2000/svg}"
_LINK = "{http://www.w3.org/1999/xlink}href"
#: A unit of SVG is a point of matplotlib; names with dollar signs are no formulas; the page is the background.
_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "figure.dpi": 72,
    "font.size": 11,
    "text.parse_math": False,
    "figure.frameon": False,
    "lines.solid_capstyle": "butt",
    "lines.linewidth": 1.3,
}
#: Styles that chart.css sets, or that are SVG's own.
_SET = {"fill:none", "stroke-width:1.3", "stroke-linejoin:miter", "stroke-dashoffset:0"}
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def style_sheet() -> Markup:
    """The style sheet of plots, chart.css."""
    return Markup(files(__package__).joinpath("chart.css").read_text(encoding="utf-8"))


@cache
def colors() -> dict[str, str]:
    """The light theme's colors by name: draw in these, and `inline` makes them follow the theme."""
    light, _, _ = style_sheet().partition("@media")
    return dict(re.findall(r"--(\w+): (#\w{6});", light))


@contextmanager
def drawing() -> Iterator[None]:
    """Draw with the same settings everywhere, whatever the user's matplotlibrc says."""
    from matplotlib import style

    with style.context(["default", _SETTINGS]), warnings.catch_warnings():
        # The browser's fonts are others than matplotlib's.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield


def inline(figure: Figure, title: str | None = None, alone: bool = False) -> Markup:
    """The figure as an `<svg>` element that scales with its container.

    An artist whose gid is `TIP` and a text shows the text when the pointer is above it.
    title: read out instead of the picture; None: a sign beside its name. alone: for a file of its own.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    written = StringIO()
    FigureCanvasSVG(figure).print_svg(written)  # savefig would draw it twice
    root = ElementTree.fromstring(_NOT_XML.sub("\ufffd", written.getvalue()))
    marks = {f"#{path.get('id')}": path.get("d", "") for path in root.iter(f"{_SVG}path")}
    box = root.get("viewBox", "")
    _, _, width, height = box.split()
    return tag(
        "svg",
        tag("style", style_sheet(), Markup("svg { background: var(--paper); }")) if alone else None,
        tag("title", title) if title else None,
        _drawn(root, marks),
        viewBox=box,
        role="img" if title else None,
        class_="plot" if title else None,
        aria_hidden=None if title else "true",
        **({"xmlns": _SVG.strip("{}"), "width": width, "height": height} if alone else {}),
    )


def _drawn(element: ElementTree.Element, marks: Mapping[str, str]) -> Markup | None:
    """What the element draws: paths, texts, and groups with a tooltip; nothing else that matplotlib writes.

    A marker is written where it is used, so that the plots of a page share no ids.
    """
    name, style = element.tag.removeprefix(_SVG), _style(element.get("style", ""))
    if name in ("svg", "g"):
        drawn = join(*(_drawn(child, marks) for child in element))
        kind, mark, tip = element.get("id", "").partition(TIP)
        return tag("g", tag("title", tip), drawn) if mark and not kind else drawn
    if name == "path":
        return tag("path", d=_short(element.get("d", "")), style=style)
    if name == "use":
        place = _short(f"translate({element.get('x')} {element.get('y')})")
        return tag("path", d=_short(marks[element.get(_LINK, "")]), transform=place, style=style)
    if name == "text":
        x, y, turn = (_short(element.get(key, "")) for key in ("x", "y", "transform"))
        return tag("text", element.text, x=x, y=y, style=style, transform=turn if "(-90" in turn else None)
    return None


def _style(text: str) -> str | None:
    """The style attribute with the theme's colors, without what chart.css sets; None if that is all."""
    names = {value: f"var(--{name})" for name, value in colors().items()}
    pairs = (part.strip().split(": ", 1) for part in text.split(";") if part.strip())
    kept = [f"{key}:{names.get(value, value)}" for key, value in pairs if not key.startswith("font")]
    return ";".join(part for part in kept if part not in _SET) or None


def _short(text: str) -> str:
    """Coordinates with one decimal, without spaces around letters."""
    rounded = re.sub(r"-?\d+\.\d+", lambda number: f"{round(float(number[0]), 1) + 0.0:g}", text)
    return re.sub(r"\s*([A-Za-z])\s*", r"\1", rounded).strip()
