"""Lower bounds of pyproject.toml as exact versions, for `pip install`: python tools/oldest.py [EXTRA ...]"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def oldest(requirement: str) -> str:
    """`torch>=2.11,<3; MARKER` as `torch==2.11; MARKER`: `==` pads the version with zeros, upper bounds go."""
    bounds, *marker = requirement.split(";")
    lower, *upper = bounds.split(",")
    if lower.count(">=") != 1 or any(not bound.startswith("<") for bound in upper):
        raise ValueError(f"{requirement}: expected one lower bound, then upper bounds")
    return ";".join([lower.replace(">=", "=="), *marker])


if __name__ == "__main__":
    extras = [requirement for extra in sys.argv[1:] for requirement in PROJECT["optional-dependencies"][extra]]
    print("\n".join(oldest(requirement) for requirement in [*PROJECT["dependencies"], *extras]))
