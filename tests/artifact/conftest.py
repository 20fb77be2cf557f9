"""The local stand-in of the Hub as a fixture."""

from hub_server import hub  # noqa: F401  # a fixture
