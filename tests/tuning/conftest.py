"""The tiny model."""

from __future__ import annotations

from tiny_folder import tiny, tiny_folder  # noqa: F401  # fixtures
