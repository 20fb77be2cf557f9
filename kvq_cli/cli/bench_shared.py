"""Shared by the subcommands of `kvq bench`: options, loading the model, reading and writing result files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvq_cli.cli.rules import unless
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.files import load_json, read_text, write_json

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from kvq_cli.cli.output import Output

bench_option = partial(typer.Option, rich_help_panel="Benchmark")
only_random = unless(lambda values: values["random"] is not None, "it needs --random", refuse=True)
not_random = unless(lambda values: values["random"] is None, "--random replaces the model: use one", refuse=True)

OutDir = Annotated[Path, typer.Option("--out", metavar="DIR", help="Output folder for results (JSON) and plots.")]
RandomShape = Annotated[
    str | None,
    bench_option("--random", metavar="SHAPE", help="Random weights in the shape of a known model, instead of --model."),
]


def result_header(benchmark: str, model: PreTrainedModel, name: str) -> dict[str, Any]:
    """First entries of every result of a model: benchmark, machine, model and dtype."""
    from kvq_cli.benchmarking.machine import machine

    dtype = str(model.dtype).removeprefix("torch.")
    return {"bench": benchmark, "machine": machine(model.device), "model": name, "dtype": dtype}


def load_or_randomize(
    model: str,
    shape: str | None,
    device: str,
    dtype: str,
    seed: int,
    *,
    layers: int | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, str]:
    """Load `model`, or make one with random weights in a known shape, with `layers` layers; returns it and a name."""
    if shape is None:
        from kvq_cli.models import load_model

        loaded = load_model(model, device, dtype, trust_remote_code=trust_remote_code)
        return loaded.model, loaded.label
    import torch

    from kvq_cli.benchmarking.shapes import random_model
    from kvq_cli.models import torch_device

    kind = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    return random_model(shape, torch_device(device), kind, seed, layers), f"{shape} (random weights)"


def kernel_device(device: str, dry: bool) -> torch.device:
    """The GPU that kernels run on; with --dry and without a GPU, the CPU with Triton's interpreter.

    Must be called before Triton is imported: the import decides whether kernels are interpreted.
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


def resumable_result(out: Output, path: Path, document: dict[str, Any]) -> dict[str, Any] | None:
    """Read the result of an interrupted run, to resume it; None if there is none.

    document: the new result, without rows. Results of another device, version, setting or kernel are not comparable
    with new rows: they are discarded with a note that names what differs.
    """
    if not path.exists():
        return None
    try:
        kept = load_json(read_text(path))
        different = list(_differences(kept, document))
        if not isinstance(kept["rows"], list):
            raise ValueError("it has no rows")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise KvqError(f"--resume: cannot read {path} ({error}): run without --resume") from None
    if not different:
        return kept
    out.note(f"--resume: {path} differs in {'; '.join(different)}: measuring everything again")
    return None


#: Entries that are compared in parts, or that hold what was measured.
_NOT_SETTINGS = ("machine", "methods", "rows")


def _differences(kept: dict[str, Any], document: dict[str, Any]) -> Iterator[str]:
    """What makes the rows of two results incomparable; `methods` may be others, but not the same with other options."""
    for key in ("device", "versions", "kernels"):
        if kept["machine"][key] != document["machine"][key]:
            yield key
    for key in (key for key in document if key not in _NOT_SETTINGS):
        if (before := kept.get(key)) != document[key]:
            yield f"{key} ({before}, now {document[key]})"
    known = kept.get("methods", {})
    yield from (
        f"options of {key}"
        for key, options in document.get("methods", {}).items()
        if known.get(key, options) != options
    )


def write_result(folder: Path, name: str, document: dict[str, Any]) -> Path:
    """Write a result as JSON; returns its path."""
    path = folder / f"{name}.json"
    write_json(path, document)
    return path
