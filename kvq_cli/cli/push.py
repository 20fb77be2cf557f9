"""`kvq push`: upload an artifact to the Hugging Face Hub."""

from __future__ import annotations

from typing import Annotated

import typer

from kvq_cli.cli.inspect import ArtifactFolder
from kvq_cli.cli.options import Json, Quiet
from kvq_cli.cli.output import Output, human_bytes
from kvq_cli.errors import UsageError

Repository = Annotated[str, typer.Argument(metavar="USER/REPO", help="Repository on the Hub; made if it is missing.")]
Private = Annotated[bool, typer.Option("--private", help="Make a new repository private.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the artifact that the repository holds.")]


def push(
    artifact: ArtifactFolder,
    repository: Repository,
    private: Private = False,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Verify an artifact, upload it with its card to the Hugging Face Hub as one commit, and print its address.

    Token and server are those of huggingface_hub: `hf auth login` or HF_TOKEN, HF_ENDPOINT. Others then use it as
    `--artifact USER/REPO`, or `USER/REPO@REVISION`.
    """
    out = Output(as_json=as_json, quiet=quiet)
    from kvq_cli.artifact import local_folder, verified_config
    from kvq_cli.artifact.hub import push as upload

    if repository.count("/") != 1 or not all(repository.split("/")):
        raise UsageError(f"{repository}: give the repository as USER/REPO")
    config, folder = verified_config(artifact), local_folder(artifact)
    method, model = config["method"]["name"], config["model"]["name"]
    out.note(f"uploading {folder}: {method} for {model}, {human_bytes(config['sizes']['total'])} of tensors")
    title = f"{method} for {model}, by kvq {config['kvq']}"
    commit = upload(folder, repository, private=private, replace=force, message=title)
    address = commit.partition("/commit/")[0]
    out.text(address)
    out.result({"repository": repository, "url": address, "commit": commit, "digest": config["checksum"]})
