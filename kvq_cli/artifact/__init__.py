"""Artifacts: calibrated methods on disk, with configuration, tensors and the fingerprint of their model."""

from kvq_cli.artifact.fingerprint import Fingerprint, fingerprint
from kvq_cli.artifact.format import (
    FORMAT,
    Artifact,
    check_replaceable,
    load_artifact,
    read_config,
    save_artifact,
    verified_config,
)

__all__ = [
    "FORMAT",
    "Artifact",
    "Fingerprint",
    "check_replaceable",
    "fingerprint",
    "load_artifact",
    "read_config",
    "save_artifact",
    "verified_config",
]
