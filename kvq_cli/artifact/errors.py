"""Tabulate the calibration errors of an artifact by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def cached_layers(config: Mapping[str, Any]) -> Sequence[int]:
    """The model's index of each layer in the artifact's `errors.layers`."""
    return config["model"]["fingerprint"].get("attention") or range(len(config["errors"]["layers"]))


def error_table(config: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows: one row per layer for keys and values each, or for each factorized weight."""
    layers = config["errors"]["layers"]
    named = dict(zip(cached_layers(config), layers, strict=True))
    if "captured" not in config:
        rotated = "k.rotation" in config["sizes"]
        weights = {"k": "keys", "v": "values"} if rotated else {"k": "W_k", "v": "W_v", "x": "[W_k W_v]"}
        rows = [
            [index, weights[name], factor["rank"], factor["residual"], factor["energy"]]
            for index, layer in named.items()
            for name, factor in layer.items()
        ]
        return ["layer", "of", "rank", "residual", "energy of the first direction"], rows
    if config["method"]["name"] == "mixed":
        return _mixed_errors(config)
    if "bytes" in layers[0]["k"]:
        return _transform_errors(named)
    shapes = list(layers[0]["k"]["shapes"])
    columns = ["layer", "of", "chosen", "fisher", "plain", *(f"fisher, {shape}" for shape in shapes), "correlation"]
    rows = []
    for index, layer in named.items():
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


def _transform_errors(layers: Mapping[int, Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of transforms: bytes of a token, tokens that squared gradients are a mean of, and errors."""
    rows = []
    for index, layer in layers.items():
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
    indices = cached_layers(config)
    for place, layer in enumerate(config["errors"]["layers"]):
        for kind, name in (("k", "keys"), ("v", "values")):
            chosen = layer[kind]["chosen"]
            rows.append([indices[place], name, method_of(config, place, kind), chosen["fisher"], chosen["plain"]])
    return ["layer", "of", "method", "fisher", "plain"], rows


def method_of(config: Mapping[str, Any], layer: int, kind: str) -> str:
    """The method of a layer's keys ("k") or values ("v") in a mixed artifact, as its options name it. layer: its place
    in `errors.layers`."""
    names = config["method"]["keys" if kind == "k" else "values"].split()
    return names[0] if len(names) == 1 else names[layer]


def _choice_text(choice: list[str]) -> str:
    """The common choice of all heads, else the choice of each head."""
    return choice[0] if len(set(choice)) == 1 else " ".join(choice)
