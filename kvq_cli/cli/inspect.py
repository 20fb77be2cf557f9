"""`kvq inspect`: an artifact's options, origin, sizes and errors on held-out text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvq_cli.cli.options import Json
from kvq_cli.cli.output import Output, human_bytes

ArtifactFolder = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="Folder of an artifact.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Plot the errors by layer into a .png, .pdf or .svg file.")
]


def inspect(artifact: ArtifactFolder, plot: Plot = None, as_json: Json = False) -> None:
    """Verify an artifact and show its options, model, calibration data, sizes and the error of each layer."""
    out = Output(as_json=as_json)
    from kvq_cli.artifact import load_artifact

    config = load_artifact(artifact).config
    if plot is not None:
        from kvq_cli.calibration.plot import plot_errors

        plot_errors(config, plot)
        out.note(f"wrote {plot}")
    _print_origin(out, config)
    out.table(["tensors", "bytes", "size"], [[kind, size, human_bytes(size)] for kind, size in config["sizes"].items()])
    out.table(*_errors(config), title=f"error {config['errors']['measure'].replace(';', chr(10))}")
    out.result({"artifact": str(artifact), **config})


def _print_origin(out: Output, config: Mapping[str, Any]) -> None:
    method, model, data = dict(config["method"]), config["model"], config["calibration"]
    fingerprint = model["fingerprint"]
    out.text(f"method     {method.pop('name')}")
    out.text(f"options    {', '.join(f'{key}={value}' for key, value in method.items())}")
    revision = f" at {model['revision']}" if model["revision"] else ""
    out.text(
        f"model      {model['name']}{revision}: {fingerprint['model_type']}, {fingerprint['layers']} layers, "
        f"{fingerprint['kv_heads']} kv heads of {fingerprint['head_dim']}, {model['dtype']}"
        + (", trusted remote code" if model.get("trust_remote_code") else "")
    )
    if not data:
        return out.text("data       none: the method only factorizes weights")
    captured = config["captured"]
    out.text(
        f"data       {data['dataset']}, {data['samples']} samples of {data['seqlen']} tokens, seed {data['seed']}; "
        f"{captured['tokens_with_gradients']:,} tokens with gradients, {captured['tokens_held_out']:,} of them held out"
    )


def _errors(config: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows: one row per layer for keys and values each, or for each factorized weight."""
    layers = config["errors"]["layers"]
    if not config["calibration"]:
        weights = {"k": "W_k", "v": "W_v", "x": "[W_k W_v]"}
        rows = [
            [index, weights[name], factor["rank"], factor["residual"], factor["energy"]]
            for index, layer in enumerate(layers)
            for name, factor in layer.items()
        ]
        return ["layer", "of", "rank", "residual", "energy of the first direction"], rows
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


def _choice_text(choice: list[str]) -> str:
    """The common choice of all heads, else the choice of each head."""
    return choice[0] if len(set(choice)) == 1 else " ".join(choice)
