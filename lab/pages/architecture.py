"""Draw docs/architecture.svg: the subpackages of kvq_cli and kvq_kernels, and which imports which.

    python -m lab.pages.architecture [FOLDER]    into FOLDER instead of docs/

Imports are read from the sources, those inside functions included. The graph is drawn without transitive edges, from
importers down to imported subpackages; a cycle of imports is an error.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import networkx

from lab.pages.drawing import Drawing, wrap

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "architecture.svg"
SOURCES = {"kvq_cli": ROOT, "kvq_kernels": ROOT / "kernels"}
FILLS = {"kvq_cli": "#e8f1fb", "kvq_kernels": "#fdf0dd"}

BOX, LANE, GAP = 280, 14, 26  # widths: of a box, of a passing arrow, between neighbours
PAD, TITLE, BODY, LEADING = 12, 15, 12, 16
BETWEEN, MARGIN, HEAD = 46, 30, 64  # heights between ranks, around the picture, of its title


def main() -> None:
    target = Path(sys.argv[1]) / PICTURE.name if len(sys.argv) > 1 else PICTURE
    target.write_text(picture(), encoding="utf-8")


def room_graph() -> networkx.DiGraph:
    """Return the graph of imports between subpackages, direct or through a plain module of the package."""
    modules = {name: path for package, root in SOURCES.items() for name, path in _modules(root, package)}
    graph = networkx.DiGraph()
    for name, path in modules.items():
        graph.add_node(_room(name))
        for imported in _imports(path, modules):
            if _room(imported) != _room(name):
                graph.add_edge(_room(name), _room(imported))
    graph.remove_nodes_from(list(SOURCES))  # __version__ and the lazy exports
    for node in sorted(graph):
        if modules[node].name == "__init__.py":
            continue
        graph.add_edges_from(itertools.product(list(graph.predecessors(node)), list(graph.successors(node))))
        graph.remove_node(node)
    return graph


def _modules(root: Path, package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((root / package).rglob("*.py")):
        yield ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"), path


def _room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def _imports(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of the two packages that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in SOURCES)


@dataclass(eq=False)
class Place:
    """A box, or the lane of an arrow that crosses a rank."""

    name: str
    width: float
    lines: list[str]
    x: float = 0.0  # of the centre

    @property
    def height(self) -> float:
        return 2 * PAD + TITLE + LEADING * len(self.lines) if self.lines else 0


def picture() -> str:
    """Return the text of docs/architecture.svg."""
    graph = room_graph()
    if not networkx.is_directed_acyclic_graph(graph):
        sys.exit(f"subpackages import each other: {networkx.find_cycle(graph)}")
    ranks, edges = _ranked(_reduced(graph))
    _order(ranks, edges)
    _spread(ranks, edges)
    return _draw(ranks, edges)


def _reduced(graph: networkx.DiGraph) -> networkx.DiGraph:
    """Return the transitive reduction within each package, and those edges to the other package that it leaves."""
    reduced = networkx.DiGraph()
    for package in SOURCES:
        inside = graph.subgraph(node for node in graph if node.split(".")[0] == package)
        part = networkx.transitive_reduction(inside)
        reduced.add_nodes_from(part)
        reduced.add_edges_from(part.edges)
        for source in inside:
            below = set().union(*(graph.successors(node) for node in networkx.descendants(inside, source)))
            outside = set(graph.successors(source)) - set(inside) - below
            reduced.add_edges_from((source, target) for target in outside)
    return reduced


def _ranked(graph: networkx.DiGraph) -> tuple[list[list[Place]], list[tuple[Place, Place]]]:
    """Return the places by rank, below all their importers, and the arrows cut into segments from rank to rank."""
    level: dict[str, int] = {}
    for node in networkx.lexicographical_topological_sort(graph):
        level[node] = max((level[p] + 1 for p in graph.predecessors(node)), default=0)
    ranks: list[list[Place]] = [[] for _ in range(max(level.values()) + 1)]
    boxes = {}
    for node in sorted(level):
        boxes[node] = Place(node, BOX, wrap(_description(node), BOX - 2 * PAD, BODY))
        ranks[level[node]].append(boxes[node])
    edges = []
    for source, target in sorted(graph.edges):
        path = [boxes[source]]
        for rank in range(level[source] + 1, level[target]):
            path.append(Place(f"{source}>{target}", LANE, []))
            ranks[rank].append(path[-1])
        edges += list(itertools.pairwise([*path, boxes[target]]))
    return ranks, edges


def _description(room: str) -> str:
    """Return the first sentence of a subpackage's docstring, without references in brackets."""
    package, name = room.split(".")
    source = (SOURCES[package] / package / name / "__init__.py").read_text(encoding="utf-8")
    first = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0]
    plain = re.sub(r"\s*\([^()]*(https:|Eq\.)[^()]*\)", "", " ".join(first.split())).replace("`", "")
    return plain.split(". ")[0].rstrip(".:")


def _order(ranks: list[list[Place]], edges: list[tuple[Place, Place]]) -> None:
    """Sort each rank by the mean position of neighbours, in sweeps down and up, so that few arrows cross."""
    for sweep in range(24):
        above = sweep % 2 == 0
        for rank in ranks if above else ranks[::-1]:
            position = {id(place): i / max(1, len(r) - 1) for r in ranks for i, place in enumerate(r)}

            def mean(place: Place, position: dict[int, float] = position, above: bool = above) -> float:
                near = [a if above else b for a, b in edges if (b if above else a) is place]
                return sum(position[id(n)] for n in near) / len(near) if near else position[id(place)]

            rank.sort(key=mean)


def _spread(ranks: list[list[Place]], edges: list[tuple[Place, Place]]) -> None:
    """Set `x` of all places: near their neighbours, without overlap."""
    for rank in ranks:
        _separate(rank, {id(place): 0.0 for place in rank})
    for sweep in range(40):
        for rank in ranks if sweep % 2 else ranks[::-1]:
            wanted = {}
            for place in rank:
                near = [a if b is place else b for a, b in edges if place in (a, b)]
                wanted[id(place)] = sum(n.x for n in near) / len(near) if near else place.x
            _separate(rank, wanted)


def _separate(rank: list[Place], wanted: dict[int, float]) -> None:
    """Set `x` near the wanted positions, in the rank's order, without overlap and with the same mean."""
    x = -1e9
    for before, place in zip([None, *rank], rank, strict=False):
        distance = (before.width + place.width) / 2 + GAP if before else 0
        x = max(x + distance, wanted[id(place)])
        place.x = x
    shift = sum(wanted[id(place)] - place.x for place in rank) / len(rank)
    for place in rank:
        place.x += shift


def _draw(ranks: list[list[Place]], edges: list[tuple[Place, Place]]) -> str:
    left = min(place.x - place.width / 2 for rank in ranks for place in rank) - MARGIN
    right = max(place.x + place.width / 2 for rank in ranks for place in rank) + MARGIN
    tops: list[float] = []
    y: float = HEAD + MARGIN
    for rank in ranks:
        tops.append(y)
        y += max(place.height for place in rank) + BETWEEN
    drawing = Drawing(right - left, y - BETWEEN + MARGIN, "Subpackages of kvq and their imports")
    drawing.text(MARGIN, 36, "kvq: an arrow points at what is imported", 20, "bold")
    about = "drawn from the imports in the sources; arrows that follow from others are left out"
    drawing.text(MARGIN, 58, about, 13, "grey")
    rank_of = {id(place): i for i, rank in enumerate(ranks) for place in rank}
    for source, target in edges:
        i, j = rank_of[id(source)], rank_of[id(target)]
        floor = max(place.height for place in ranks[i])
        x0, x1 = _port(source, target, edges) - left, _port(target, source, edges) - left
        y0, y1 = tops[i] + source.height, tops[j]
        bend = f"V{tops[i] + floor:.1f} C{x0:.1f},{tops[i] + floor + BETWEEN / 2:.1f} {x1:.1f},{y1 - BETWEEN / 2:.1f}"
        drawing.arrow(f"M{x0:.1f},{y0:.1f} {bend} {x1:.1f},{y1:.1f}", head=bool(target.lines))
    for top, rank in zip(tops, ranks, strict=True):
        for place in (place for place in rank if place.lines):
            package, name = place.name.split(".")
            x = place.x - place.width / 2 - left
            drawing.box(x, top, place.width, place.height, FILLS[package])
            drawing.text(x + PAD, top + PAD + TITLE - 3, name, TITLE, "bold code")
            drawing.text(x + place.width - PAD, top + PAD + TITLE - 3, package, 11, "grey code", "end")
            for i, line in enumerate(place.lines):
                drawing.text(x + PAD, top + PAD + TITLE + LEADING * (i + 1) - 2, line, BODY)
    return drawing.svg()


def _port(place: Place, other: Place, edges: list[tuple[Place, Place]]) -> float:
    """Return where an arrow to or from `other` meets a place; the arrows of a side are evenly spaced in order."""
    down = any(a is place and b is other for a, b in edges)
    side = [b if down else a for a, b in edges if (a if down else b) is place]
    side.sort(key=lambda neighbour: neighbour.x)
    step = min(44.0, place.width / (len(side) + 1))
    index = next(i for i, neighbour in enumerate(side) if neighbour is other)
    return place.x + (index - (len(side) - 1) / 2) * step


if __name__ == "__main__":
    main()
