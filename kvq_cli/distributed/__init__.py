"""Tasks on the workers of a Ray cluster; one process is the default, and needs no Ray."""

from kvq_cli.distributed.workers import Workers, cluster_address, connected, threads_per_task

__all__ = ["Workers", "cluster_address", "connected", "threads_per_task"]
