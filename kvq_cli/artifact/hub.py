"""Artifacts on the Hugging Face Hub: a repository holds the files of one.

`huggingface_hub` reads the token, the endpoint and the cache folder: HF_TOKEN, HF_ENDPOINT, HF_HUB_CACHE.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvq_cli.artifact.names import CARD_FILE, CONFIG_FILE, TENSOR_FILE, TUNING_FILE, is_artifact_file
from kvq_cli.errors import KvqError, UsageError, reason

#: Patterns of the files of `is_artifact_file`.
_FILES = [CONFIG_FILE, TENSOR_FILE, CARD_FILE, "*.png"]
_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w./-]+))?")
#: Seconds to wait for an answer before the cached snapshot is taken.
_TIMEOUT = 10


def local_folder(name: str | os.PathLike) -> Path:
    """Return the folder of an artifact: `name` where that exists, else the snapshot of that repository of the Hub
    ("user/repo", "user/repo@revision"), downloaded unless the newest one is in the cache.

    Without the Hub, it is the snapshot in the cache. A name that is neither is returned as it is, and so is one without
    a revision whose first part is a folder: a path that is mistyped, as of `artifacts/MODEL`. Raises KvqError where
    the Hub has no such repository or revision, or none that may be read, and where it holds no artifact.
    """
    path = Path(name)
    found = _ID.fullmatch(os.fspath(name))
    if found is None or path.exists() or (found["revision"] is None and path.parent.is_dir()):
        return path
    import huggingface_hub

    with _named(name, found["repo"]):
        folder = huggingface_hub.snapshot_download(
            found["repo"], revision=found["revision"], allow_patterns=_FILES, etag_timeout=_TIMEOUT
        )
    for file in (CONFIG_FILE, TENSOR_FILE):
        if not (Path(folder) / file).is_file():
            raise KvqError(f"{name} on the Hugging Face Hub holds no artifact of kvq: it has no {file}")
    return Path(folder)


@contextmanager
def of_snapshot(name: str | os.PathLike, folder: Path) -> Iterator[Path]:
    """Name the artifact in the errors of reading its `folder`, and for a snapshot of the Hub how to get another one.

    Yields the name of the files that were read: of a snapshot, with its commit.
    """
    if folder == Path(name):
        yield folder
        return
    own = Path(f"{os.fspath(name).partition('@')[0]}@{folder.name}")
    try:
        yield own
    except KvqError as error:
        said = str(error).removesuffix(": calibrate again").replace(str(folder), str(own))
        raise type(error)(
            f"{said}: remove {folder} to download it again, or ask its author to push it again"
        ) from error


def push(folder: Path, repo: str, *, private: bool = False, replace: bool = False, message: str) -> str:
    """Upload an artifact's files as one commit of a repository of the Hub, which is made if it is missing; returns the
    commit's address.

    private: of a new repository; UsageError for one that is public. replace: also where the repository holds an
    artifact. Raises UsageError for such a repository without `replace`, and for one with other files, or with some of
    an artifact's only: a model has a `config.json`, too.
    """
    import huggingface_hub

    api = huggingface_hub.HfApi()
    with _named(repo, repo, "write"):
        api.create_repo(repo, private=private or None, exist_ok=True)
        info = api.model_info(repo, timeout=_TIMEOUT)
        if private and not info.private:
            raise UsageError(f"{repo} exists and is public: make it private on the Hub, or leave out --private")
        held = {file.rfilename for file in info.siblings or ()} - {".gitattributes"}
        others = sorted(name for name in held if not is_artifact_file(name))
        if others := others or sorted(() if held >= {CONFIG_FILE, TENSOR_FILE} else held):
            raise UsageError(f"{repo} is no artifact, and is not replaced (it holds {others[0]!r}): take another name")
        if held and not replace:
            raise UsageError(f"{repo} holds an artifact already: take another name, or pass --force to replace it")
        with warnings.catch_warnings():  # the Hub warns of cards without metadata
            warnings.simplefilter("ignore", UserWarning)
            commit = api.upload_folder(
                repo_id=repo,
                folder_path=folder,
                allow_patterns=_FILES,
                ignore_patterns=["*/*"],
                delete_patterns=[TUNING_FILE],  # others are not of kvq
                commit_message=message,
                parent_commit=info.sha,
            )
    return commit.commit_url


@contextmanager
def _named(name: Any, repo: str, doing: str = "read") -> Iterator[None]:
    """Raise KvqError, naming what to do, for errors of the Hub and of the way to it."""
    from huggingface_hub import errors

    try:
        yield
    except KvqError:
        raise
    except errors.GatedRepoError as error:
        raise KvqError(
            f"{name} is gated: accept its terms on the Hugging Face Hub, and log in (`hf auth login`)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise KvqError(f"{name}: {repo} has no such revision: give a branch, a tag or a commit") from error
    except errors.RepositoryNotFoundError as error:
        raise KvqError(
            f"no artifact at {name}: neither a folder nor a repository of the Hugging Face Hub that you may {doing}: "
            "correct the name, or log in if it is private (`hf auth login`, HF_TOKEN)"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise KvqError(
            f"no artifact at {name}: not a folder, never downloaded, and the Hugging Face Hub is not reached "
            f"({reason(error.__cause__ or error)}): connect, or give a folder"
        ) from error
    except Exception as error:  # every HTTP backend has its own class for network errors
        status = getattr(getattr(error, "response", None), "status_code", None)
        login = f": take a token that may {doing} there (`hf auth login`, HF_TOKEN)" if status in (401, 403) else ""
        raise KvqError(f"{name}: the Hugging Face Hub: {reason(error)}{login}") from error
