"""`kvq inspect`: an artifact's options, origin, sizes and errors on held-out text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvq_cli.cli.options import Json
from kvq_cli.cli.output import Output, human_bytes

ArtifactFolder = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="Artifact: a folder, or an id on the Hub.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Plot the errors by layer into a .png, .pdf or .svg file.")
]


def inspect(artifact: ArtifactFolder, plot: Plot = None, as_json: Json = False) -> None:
    """Verify an artifact and show its options, model, calibration data, sizes and the error of each layer."""
    out = Output(as_json=as_json)
    from kvq_cli.artifact import verified_config
    from kvq_cli.artifact.errors import error_table

    config = verified_config(artifact)
    if plot is not None:
        from kvq_cli.calibration.plot import plot_errors
        from kvq_cli.tuning.plot import plot_tuning

        (plot_tuning if "tuning" in config else plot_errors)(config, plot)
        out.note(f"wrote {plot}")
    _print_origin(out, config)
    out.table(["tensors", "bytes", "size"], [[kind, size, human_bytes(size)] for kind, size in config["sizes"].items()])
    out.table(*error_table(config), title=f"error {config['errors']['measure'].replace(';', chr(10))}")
    if "tuning" in config:
        rows = [[one["step"], round(one["bits"], 3), one["kl"]] for one in config["tuning"]["tried"]]
        out.table(["tried by kvq tune", "packed bits", "KL"], rows)
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
    text = f"data       {data['dataset']}, {data['samples']} samples of {data['seqlen']} tokens, seed {data['seed']}"
    if captured := config.get("captured"):
        gradients, held_out = captured["tokens_with_gradients"], captured["tokens_held_out"]
        text += f"; {gradients:,} tokens with gradients, {held_out:,} of them held out"
    out.text(text)
