"""A calibrated method on disk: its configuration, its tensors, and the fingerprint of the model they belong to."""

from kvq_cli.artifact.fingerprint import Fingerprint, fingerprint
from kvq_cli.artifact.format import FORMAT, Artifact, check_replaceable, load_artifact, save_artifact

__all__ = ["FORMAT", "Artifact", "Fingerprint", "check_replaceable", "fingerprint", "load_artifact", "save_artifact"]
