"""Section of the artifacts that a comparison used: their errors by layer, on held-out calibration text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq_cli.errors import KvqError
from kvq_cli.report.charts import Plot, Point, Series, draw, legend
from kvq_cli.report.comparison import Section
from kvq_cli.report.markup import Markup, join, tag
from kvq_cli.report.tables import pairs, table

if TYPE_CHECKING:
    from kvq_cli.artifact import Artifact

STREAMS = {"k": "keys", "v": "values"}
WEIGHTS = {"k": "W_k", "v": "W_v", "x": "[W_k W_v]"}


def sections(artifacts: Sequence[Artifact], methods: Mapping[str, Mapping[str, Any]]) -> Iterator[Section]:
    """Title and content of the section; nothing without artifacts. methods: result documents by label."""
    if not artifacts:
        return
    names = legend([(str(artifact.path.name), style) for style, artifact in enumerate(artifacts)])
    plots = [
        *_plots(artifacts, True, STREAMS, lambda error: error["chosen"]["fisher"], "relative error, Fisher-weighted"),
        *_plots(artifacts, False, WEIGHTS, lambda error: error["residual"], "relative error of the factors"),
    ]
    figures = [tag("figure", draw(plot), tag("figcaption", plot.title)) for plot in plots]
    details = [_details(artifact, methods) for artifact in artifacts]
    yield "Errors of the artifacts by layer", join(names, tag("div", figures, class_="plots"), details)


def used_artifacts(methods: Mapping[str, Mapping[str, Any]], given: Sequence[Path]) -> list[Artifact]:
    """The given artifacts, and those of the methods in their default folders, if they have the results' checksums.

    KvqError if a given one cannot be read.
    """
    from kvq_cli.artifact import load_artifact

    found = {artifact.digest: artifact for artifact in map(load_artifact, given)}
    for document in methods.values():
        digest = document["config"].get("artifact")
        if digest is None or digest in found:
            continue
        try:
            artifact = load_artifact(_default_folder(document["config"]))
        except (KvqError, KeyError):  # not here, or of a method that is not installed: the page goes without it
            continue
        if artifact.digest == digest:
            found[digest] = artifact
    return list(found.values())


def _default_folder(config: Mapping[str, Any]) -> Path:
    from kvq_cli.methods.registry import from_config
    from kvq_cli.paths import artifact_folder

    return artifact_folder(config["model_args"]["name"], from_config(config["method"]))


def _plots(
    artifacts: Sequence[Artifact], calibrated: bool, kinds: Mapping[str, str], value: Any, label: str
) -> Iterator[Plot]:
    """A plot per kind of numbers, with a line per artifact. calibrated: of artifacts with or without calibration."""
    for kind, name in kinds.items():
        series = []
        for style, artifact in enumerate(artifacts):
            layers = artifact.config["errors"]["layers"]
            if ("captured" in artifact.config) is not calibrated or not all(kind in layer for layer in layers):
                continue
            points = [
                Point(index, value(layer[kind]), f"{artifact.path.name}, layer {index}: {value(layer[kind]):.4g}")
                for index, layer in enumerate(layers)
            ]
            series.append(Series(artifact.path.name, style, points))
        if series:
            yield Plot(f"{name}: {label}", "layer", label, series, zero=True)


def _details(artifact: Artifact, methods: Mapping[str, Mapping[str, Any]]) -> Markup:
    from kvq_cli.artifact.errors import error_table

    config = artifact.config
    users = [label for label, one in methods.items() if one["config"].get("artifact") == artifact.digest]
    facts = {
        "used by": users or "none of these results",
        "model": config["model"]["name"],
        "options": config["method"],
        "data": config["calibration"] or "none: the method only factorizes weights",
        "bytes of tensors": config["sizes"]["total"],
        "kvq": config["kvq"],
        "versions": config.get("versions"),
        "checksum": artifact.digest,
        "errors": config["errors"]["measure"],
    }
    columns, rows = error_table(config)
    return tag(
        "details", tag("summary", artifact.path.name, ": errors of each layer"), pairs(facts), table(columns, rows)
    )
