"""Fixtures of results."""

from finished_targets import finished

__all__ = ["finished"]
