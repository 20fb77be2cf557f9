"""A small SVG writer with deterministic output: boxes, text and arrows."""

from __future__ import annotations

import textwrap
from html import escape

INK, GREY, PAPER = "#1f2933", "#6b7785", "#ffffff"
#: Mean width of a character in units of the font size, with room for wide fonts.
CHARACTER = 0.56

STYLE = f"""\
text {{ font-family: "Helvetica Neue", Helvetica, Arial, "DejaVu Sans", sans-serif; fill: {INK}; }}
.bold {{ font-weight: 600; }}
.grey {{ fill: {GREY}; }}
.code {{ font-family: "SFMono-Regular", Consolas, "DejaVu Sans Mono", monospace; }}
"""


def wrap(text: str, width: float, size: float) -> list[str]:
    """Return `text` in lines that fit into `width` at a font size."""
    return textwrap.wrap(text, max(8, int(width / (size * CHARACTER))))


def shorten(text: str, width: float, size: float) -> str:
    """Return the beginning of `text` that fits into `width`, without Markdown's backticks."""
    return textwrap.shorten(text.replace("`", ""), int(width / (size * CHARACTER)), placeholder=" …") if text else ""


class Drawing:
    """A white page with shapes; `svg()` returns the file's text."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._shapes: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str, radius: int = 6) -> None:
        self._shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}" fill="{fill}" '
            f'stroke="{GREY}"/>'
        )

    def text(self, x: float, y: float, text: str, size: float, kind: str = "", anchor: str = "start") -> None:
        """kind: classes of the style sheet. anchor: start, middle or end of the text is at `x`."""
        place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}" class="{kind}"'
        self._shapes.append(f"<text {place}>{escape(text)}</text>")

    def line(self, x0: float, y0: float, x1: float, y1: float, colour: str, dash: str) -> None:
        style = f'stroke="{colour}" stroke-dasharray="{dash}"'
        self._shapes.append(f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" {style}/>')

    def arrow(self, path: str, head: bool = True) -> None:
        """path: SVG path data; the arrow's head is at its end."""
        style = ' marker-end="url(#head)"' if head else ""
        self._shapes.append(f'<path d="{path}" fill="none" stroke="{GREY}" stroke-width="1.4"{style}/>')

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:.0f} {self.height:.0f}" '
            f'width="{self.width:.0f}" height="{self.height:.0f}">'
        )
        marker = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            f'<path d="M0,0.5 L8,4 L0,7.5 z" fill="{GREY}"/></marker>'
        )
        paper = f'<rect width="{self.width:.0f}" height="{self.height:.0f}" fill="{PAPER}"/>'
        frame = f"<title>{escape(self.title)}</title>\n<style>{STYLE}</style>\n<defs>{marker}</defs>"
        return "\n".join([head, frame, paper, *self._shapes, "</svg>", ""])
