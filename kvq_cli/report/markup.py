"""Build HTML and SVG from functions: text is escaped, elements are not."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TypeAlias

#: Elements without an end tag.
_VOID = {"br", "img", "link", "meta"}


class Markup(str):
    """HTML or SVG source. Text of any other type is escaped by `tag`."""


Child: TypeAlias = str | float | None | Iterable["Child"]


def tag(name: str, *children: Child, **attributes: str | float | None) -> Markup:
    """The element `name`. Attributes: `class_` is class, `stroke_width` stroke-width; None leaves one out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    end = "" if name in _VOID else f"{join(*children)}</{name}>"
    return Markup(f"<{name}{written}>{end}")


def join(*children: Child) -> Markup:
    """The children one after another: elements as they are, text escaped, None left out."""
    parts = []
    for child in children:
        if isinstance(child, Markup):
            parts.append(str(child))
        elif isinstance(child, str):
            parts.append(escape(child))
        elif isinstance(child, (int, float)):
            parts.append(_number(child))
        elif child is not None:
            parts.append(join(*child))
    return Markup("".join(parts))


def _number(value: str | float) -> str:
    """The text of an attribute; coordinates have two decimals."""
    return f"{round(value, 2):g}" if isinstance(value, float) else str(value)
