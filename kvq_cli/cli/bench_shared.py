"""What the subcommands of `kvq bench` share: options, the model, the folder and the head of a result."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvq_cli.files import write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

measured = partial(typer.Option, rich_help_panel="What is measured")

OutDir = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the results: JSON and a plot.")]
RandomShape = Annotated[
    str | None, measured("--random", metavar="SHAPE", help="Random weights in a known shape, instead of --model.")
]


def about(what: str, model: PreTrainedModel, name: str) -> dict:
    """What stands at the head of every result of a model."""
    from kvq_cli.benchmarking.machine import machine

    dtype = str(model.dtype).removeprefix("torch.")
    return {"bench": what, "machine": machine(model.device), "model": name, "dtype": dtype}


def load(
    model: str, shape: str | None, device: str, dtype: str, seed: int, layers: int | None = None
) -> tuple[Any, str]:
    """The model, or one of random weights in a known shape (or of so many of its layers), and what to call it."""
    if shape is None:
        from kvq_cli.models import load_model

        return load_model(model, device, dtype).model, model
    import torch

    from kvq_cli.benchmarking.shapes import random_model
    from kvq_cli.models import torch_device

    kind = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    return random_model(shape, torch_device(device), kind, seed, layers), f"{shape} (random weights)"


def write_result(folder: Path, name: str, document: dict) -> Path:
    """Write a result as JSON; where."""
    path = folder / f"{name}.json"
    write_json(path, document)
    return path
