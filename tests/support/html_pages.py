"""Read the HTML pages of `kvq report`: their sections' tables, pictures and elements."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "img", "br"}


@dataclass
class Cell:
    text: str = ""
    value: float | None = None


@dataclass
class Page(HTMLParser):
    """tables: by section title, rows of cells, the titles first. elements: tag and attributes, in order."""

    tables: dict[str, list[list[Cell]]] = field(default_factory=dict)
    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[str] = []
        self._title = ""

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag in ("h2", "summary"):
            self._title = ""
        elif tag == "tr":
            self.tables.setdefault(self._title, []).append([])
        elif tag in ("td", "th"):
            value = dict(attrs).get("data-value")
            self.tables[self._title][-1].append(Cell(value=None if value is None else float(value)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, f"</{tag}> closes no element"

    def handle_data(self, data):
        if {"style", "script"} & {*self._open}:
            return
        self.text += data
        if {"h2", "summary"} & {*self._open}:
            self._title += data
        elif {"td", "th"} & {*self._open}:
            self.tables[self._title][-1][-1].text += data

    def rows(self, title: str) -> dict[str, dict[str, Cell]]:
        """Cells of a section's table by row name and column title, from the section whose title begins so."""
        [head, *rows] = next(rows for name, rows in self.tables.items() if name.startswith(title))
        return {row[0].text: {top.text: cell for top, cell in zip(head, row, strict=True)} for row in rows}


def read_page(html: str) -> Page:
    page = Page()
    page.feed(html)
    page.close()
    assert not page._open, f"not closed: {page._open}"
    return page


def loaded_urls(html: str) -> list[str]:
    """What a browser would load for this page, apart from data in the page itself."""
    page = read_page(html)
    named = [
        attributes.get(name) for _, attributes in page.elements for name in ("src", "href", "xlink:href", "srcset")
    ]
    remote = [url for url in named if url and not url.startswith(("#", "data:"))]
    return remote + [word for word in ("url(", "@import", "fetch(", "import(") if word in html]
