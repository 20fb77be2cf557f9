"""Tasks on the workers of a Ray cluster; one process is the default, and needs no Ray."""

from kvq_cli.distributed.workers import Workers, connected

__all__ = ["Workers", "connected"]
