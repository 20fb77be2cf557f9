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
from kvq_cli.artifact.hub import local_folder
from kvq_cli.artifact.names import is_artifact

__all__ = [
    "FORMAT",
    "Artifact",
    "Fingerprint",
    "check_replaceable",
    "fingerprint",
    "is_artifact",
    "load_artifact",
    "local_folder",
    "read_config",
    "save_artifact",
    "verified_config",
]
