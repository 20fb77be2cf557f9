"""How to install the optional packages that a command lacks."""

from __future__ import annotations


def install_command(*extras: str) -> str:
    """Return the command that installs extras. The package is on no index; the one named kvq on PyPI is another
    project's."""
    commands = " or ".join(f"pip install '.[{extra}]'" for extra in extras)
    return f"{commands} in kvq's source folder (kvq on PyPI is another project)"
