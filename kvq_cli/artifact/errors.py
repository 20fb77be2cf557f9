"""Tabulate the calibration errors of an artifact by layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def error_table(config: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows: one row per layer for keys and values each, or for each factorized weight."""
    layers = config["errors"]["layers"]
    if "captured" not in config:
        weights = {"k": "W_k", "v": "W_v", "x": "[W_k W_v]"}
        rows = [
            [index, weights[name], factor["rank"], factor["residual"], factor["energy"]]
            for index, layer in enumerate(layers)
            for name, factor in layer.items()
        ]
        return ["layer", "of", "rank", "residual", "energy of the first direction"], rows
    if config["method"]["name"] == "mixed":
        return _mixed_errors(config)
    if "bytes" in layers[0]["k"]:
        return _transform_errors(layers)
    shapes = list(layers[0]["k"]["shapes"])
    columns = ["layer", "of", "chosen", "fisher", "plain", *(f"fisher, {shape}" for shape in shapes), "correlation"]
    rows = []
    for index, layer in enumerate(layers):
        for kind, name in (("k", "keys"), ("v", "values")):
            measured = layer[kind]
            by_shape = [measured["shapes"][shape]["fisher"] for shape in shapes]
            chosen = [_choice_text(measured["choice"]), measured["chosen"]["fisher"], measured["chosen"]["plain"]]
            rows.append([index, name, *chosen, *by_shape, measured["adjacent_token_correlation"]])
    # Means over layers compare the chosen shapes with one shape for all layers.
    for name in ("keys", "values"):
        numbers = [row[3:] for row in rows if row[1] == name]
        rows.append(["mean", name, "", *(sum(column) / len(column) for column in zip(*numbers, strict=True))])
    return columns, rows


def _transform_errors(layers: list[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of transforms: bytes of a token, tokens that squared gradients are a mean of, and errors."""
    rows = []
    for index, layer in enumerate(layers):
        for kind, name in (("k", "keys"), ("v", "values")):
            measured, chosen = layer[kind], layer[kind]["chosen"]
            errors = (chosen[each] for each in ("loss", "fisher", "plain"))
            rows.append([index, name, measured["bytes"], measured["effective_tokens"], *errors])
    for name in ("keys", "values"):
        numbers = [row[2:] for row in rows if row[1] == name]
        rows.append(["mean", name, *(sum(column) / len(column) for column in zip(*numbers, strict=True))])
    return ["layer", "of", "bytes", "effective tokens", "loss", "fisher", "plain"], rows


def _mixed_errors(config: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of a mixed artifact: the method of each stream, and errors that all methods have."""
    rows = []
    for index, layer in enumerate(config["errors"]["layers"]):
        for kind, name in (("k", "keys"), ("v", "values")):
            chosen = layer[kind]["chosen"]
            rows.append([index, name, method_of(config, index, kind), chosen["fisher"], chosen["plain"]])
    return ["layer", "of", "method", "fisher", "plain"], rows


def method_of(config: Mapping[str, Any], layer: int, kind: str) -> str:
    """The method of a layer's keys ("k") or values ("v") in a mixed artifact, as its options name it."""
    names = config["method"]["keys" if kind == "k" else "values"].split()
    return names[0] if len(names) == 1 else names[layer]


def _choice_text(choice: list[str]) -> str:
    """The common choice of all heads, else the choice of each head."""
    return choice[0] if len(set(choice)) == 1 else " ".join(choice)
