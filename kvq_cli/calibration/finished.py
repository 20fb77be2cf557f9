"""Give a finished artifact to `--resume` only where nothing that it was made from has changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvq_cli.artifact import Artifact
from kvq_cli.errors import UsageError

Note = Callable[[str], None]
"""Prints a note."""
#: Entries of `inputs` in an artifact's config, by the option that sets them.
_NAMES = {
    "weights": "weights of --model",
    "text": "text of --dataset",
    "held_out": "text of --text",
    "results": "version of results",
    "clustering": "version of clustering",
    "device": "type of --device",
}


def named_inputs(inputs: Mapping[str, Any], versions: Mapping[str, str]) -> dict[str, Any]:
    """The `inputs` and `versions` of an artifact's config, by the names that messages use."""
    named = {_NAMES[key]: value for key, value in inputs.items()}
    return named | {f"version of {name}": version for name, version in versions.items()}


def check_unchanged(
    artifact: Artifact, request: Mapping[str, Any], made: Mapping[str, Any], inputs: Mapping[str, Any], note: Note
) -> None:
    """Raise UsageError, naming what differs, unless the artifact is the one that a calibration would make.

    request, made: options that are asked for, and those of the artifact. inputs: of `named_inputs`. note: told where
    an artifact of an earlier version does not record its inputs.
    """
    different = [name for name in request if made.get(name) != request[name]]
    if "inputs" in artifact.config:
        recorded = named_inputs(artifact.config["inputs"], artifact.config["versions"])
        different += [name for name in inputs if recorded.get(name) != inputs[name]]
    if different:
        raise UsageError(
            f"{artifact.path} was made with another {', '.join(different)}: choose another --out, or replace it with "
            "--force"
        )
    if "inputs" not in artifact.config:
        note(
            f"{artifact.path} does not record the text and the weights that it was made from: if they changed, replace "
            "it with --force"
        )
