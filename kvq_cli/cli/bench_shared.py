"""What the subcommands of `kvq bench` share: options, the model, the folder and the head of a result."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvq_cli.errors import KvqError, UsageError
from kvq_cli.files import write_json

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from kvq_cli.cli.output import Output

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


def kernel_device(device: str, dry: bool) -> torch.device:
    """The GPU that kernels run on; with --dry a CPU, in Triton's interpreter, where there is none.

    Call before Triton is imported, which settles whether kernels are interpreted.
    """

    from kvq_cli.models import torch_device

    place = torch_device(device)
    if place.type == "cuda":
        return place
    if not dry:
        raise UsageError("measuring kernels needs a GPU: use --dry (or kvq bench kernels --static) without one")
    os.environ["TRITON_INTERPRET"] = "1"
    from triton import knobs

    if not knobs.runtime.interpret:
        raise KvqError("--dry needs Triton's interpreter: set TRITON_INTERPRET=1")
    return place


def earlier(out: Output, path: Path, document: dict[str, Any]) -> dict[str, Any] | None:
    """Return an earlier result of the same measurement, to go on from; None where there is none.

    A result of another device, version, setting or kernel does not compare with new rows: a note says so.
    """
    if not path.exists():
        return None
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        same = all(kept["machine"][key] == document["machine"][key] for key in ("device", "versions", "kernels"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KvqError(f"--resume: cannot read {path}: {error}") from None
    if same and all(kept.get(key) == document.get(key) for key in ("dry", "model", "tokens", "seed", "prefill")):
        return kept
    out.note(f"{path} is of another device, version, setting or kernel: everything is measured anew")
    return None


def write_result(folder: Path, name: str, document: dict) -> Path:
    """Write a result as JSON; where."""
    path = folder / f"{name}.json"
    write_json(path, document)
    return path
