"""Place the labels of points so that they overlap neither each other nor the points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot

#: Mean width of a character in units of the font size.
CHARACTER = 0.56
#: Offsets of a label's centre from its point, in units of half the label's size, and gaps to try, in pixels.
_SIDES = ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (-1, -1), (1, 1), (-1, 1))
_GAPS = (7.0, 14.0, 24.0, 36.0)


@dataclass(frozen=True)
class Box:
    x0: float
    y0: float
    x1: float
    y1: float

    def overlap(self, other: Box) -> float:
        """The common area of both boxes."""
        width = min(self.x1, other.x1) - max(self.x0, other.x0)
        height = min(self.y1, other.y1) - max(self.y0, other.y0)
        return max(width, 0.0) * max(height, 0.0)

    @property
    def area(self) -> float:
        return (self.x1 - self.x0) * (self.y1 - self.y0)

    @property
    def center(self) -> tuple[float, float]:
        return (self.x0 + self.x1) / 2, (self.y0 + self.y1) / 2


def text_width(text: str, size: float) -> float:
    """The approximate width of a text in pixels."""
    return CHARACTER * size * len(text)


def place(
    points: Sequence[tuple[float, float]], texts: Sequence[str], size: float, frame: Box, taken: Sequence[Box] = ()
) -> list[Box]:
    """The box of each point's label, inside the frame, next to the point where there is room.

    taken: boxes that labels should not cover, besides the points.
    """
    taken = [*taken, *(Box(x - 4, y - 4, x + 4, y + 4) for x, y in points)]
    boxes = []
    for (x, y), text in zip(points, texts, strict=True):
        box = min(
            _candidates(x, y, text_width(text, size), size * 1.15), key=lambda box: _cost(box, taken, frame, x, y)
        )
        taken.append(box)
        boxes.append(box)
    return boxes


def _candidates(x: float, y: float, width: float, height: float) -> list[Box]:
    found = []
    for gap in _GAPS:
        for across, down in _SIDES:
            cx = x + across * (width / 2 + gap * (0.7 if down else 1.0))
            cy = y + down * (height / 2 + gap * (0.7 if across else 0.8))
            found.append(Box(cx - width / 2, cy - height / 2, cx + width / 2, cy + height / 2))
    return found


def _cost(box: Box, taken: Sequence[Box], frame: Box, x: float, y: float) -> float:
    """Overlapped area, then distance: a free place far away is better than an overlap."""
    hidden = sum(box.overlap(other) for other in taken) + 3 * (box.area - box.overlap(frame))
    cx, cy = box.center
    nearest = hypot(max(box.x0 - x, x - box.x1, 0.0), max(box.y0 - y, y - box.y1, 0.0))
    return 10 * hidden + nearest + 0.02 * hypot(cx - x, cy - y)
