"""The tiny model's folder as a fixture."""

from tiny_folder import tiny_folder  # noqa: F401  # a fixture
