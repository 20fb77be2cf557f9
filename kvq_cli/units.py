"""Sizes in bytes as text, both ways."""

from __future__ import annotations

from kvq_cli.errors import UsageError

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def human_bytes(count: float) -> str:
    """Format a number of bytes: 1536 as `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def parse_bytes(text: str, flag: str) -> int:
    """Parse a size such as `80GB`, `16 GiB` or `2e9 B` into bytes; UsageError naming `flag`, also without a unit."""
    compact = text.replace(" ", "").lower()
    number = compact.rstrip("kmgtib")
    try:
        size = float(number)
        if number == compact and size > 0:
            raise UsageError(f"{flag} {text}: has no unit; {text.strip()}GB?")
        size = int(size * _UNITS[compact[len(number) :]])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        raise UsageError(f"{flag} {text}: must be a size above 0 like 80GB, 24GiB or 512MB")
    return size
