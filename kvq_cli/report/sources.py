"""Find and read the result files of a folder: comparisons, studies, benchmarks, and the record of a reproduction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvq_cli.errors import KvqError
from kvq_cli.evaluation.runs import COMPARISON, RESULTS, ShownResults, shown_results
from kvq_cli.files import load_json, read_text

#: Files of a reproduction's folder (kvq_cli/papers) that are not results themselves.
RECORD, DIFFERENCES, SCORES, CLAIMS = "target.json", "differences.json", "scores.json", "claims.md"
_PARTS = (COMPARISON, RESULTS, RECORD, DIFFERENCES, SCORES)


@dataclass(frozen=True)
class ResultFolder:
    """What a folder contains.

    methods:     result documents of a comparison by label; empty if there is none.
    failed:      why further methods of it have no results, by label.
    documents:   other results by file stem: studies, benchmarks, counted sizes.
    record:      the command, version and artifacts of a reproduced table or figure.
    differences: paired differences that the reproduction computed, with their baseline.
    claims:      its table of claims, in Markdown.
    """

    path: Path
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    documents: Mapping[str, Any] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)
    differences: Mapping[str, Any] = field(default_factory=dict)
    claims: str = ""

    @property
    def name(self) -> str:
        return self.path.resolve().name


def find_results(folder: Path) -> list[ResultFolder]:
    """The results in `folder`, or else in its subfolders; KvqError if there are none or one cannot be read."""
    if not folder.is_dir():
        raise KvqError(
            f"{folder}: no such folder; give one that `kvq eval`, `reproduce`, `analyze` or `bench` wrote to"
        )
    if _has_results(folder):
        return [_read(folder)]
    found = [_read(path) for path in sorted(folder.iterdir()) if path.is_dir() and _has_results(path)]
    if not found:
        raise KvqError(
            f"{folder}: no results here; give a folder that `kvq eval`, `reproduce`, `analyze` or `bench` wrote"
        )
    return found


def read_json(path: Path) -> Any:
    """The content of a JSON file; KvqError if it cannot be read."""
    try:
        return load_json(read_text(path))
    except OSError as error:
        raise KvqError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise KvqError(f"{path}: not JSON ({error}); make it again") from None


def is_file_of(folder: Path, path: Path) -> bool:
    """Whether the path is a regular file in the folder, also through a link: a page that is passed on must not contain
    what a link of a received folder leads to."""
    return path.is_file() and path.resolve().is_relative_to(folder.resolve())


def _has_results(folder: Path) -> bool:
    return any(path.name != RECORD for path in folder.glob("*.json"))


def _read(folder: Path) -> ResultFolder:
    compared = any((folder / name).is_file() for name in (COMPARISON, RESULTS))
    shown = shown_results(folder) if compared else ShownResults({})
    others = [path for path in sorted(folder.glob("*.json")) if path.name not in _PARTS]
    claims = folder / CLAIMS
    return ResultFolder(
        folder,
        methods=shown.methods,
        failed=shown.failed,
        documents={path.stem: read_json(path) for path in others},
        record=_mapping(folder / RECORD),
        differences=_mapping(folder / DIFFERENCES),
        claims=claims.read_text(encoding="utf-8", errors="replace") if is_file_of(folder, claims) else "",
    )


def _mapping(path: Path) -> Mapping[str, Any]:
    document = read_json(path) if path.is_file() else {}
    if not isinstance(document, Mapping):
        raise KvqError(f"{path}: not a result of kvq; make it again")
    return document
