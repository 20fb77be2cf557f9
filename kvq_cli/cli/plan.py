"""`kvq plan`: which methods fit a model, context length and batch size into a given memory."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from kvq_cli.cli import options as opt
from kvq_cli.cli.output import Output, human_bytes
from kvq_cli.cli.sizes import (
    MAX_COUNT,
    Batch,
    Compare,
    ModelName,
    ShapeName,
    chosen_methods,
    each_counted,
    model_size,
    not_shapes,
    note_other_layers,
)
from kvq_cli.errors import UsageError
from kvq_cli.units import parse_bytes

Engine = StrEnum("Engine", ["kvq", "vllm"])

DEFAULT_CONTEXT = 8192

if TYPE_CHECKING:
    from kvq_cli.benchmarking.capacity import Capacity
    from kvq_cli.methods.base import Method

Memory = Annotated[str | None, typer.Option("--memory", metavar="SIZE", help="Memory of the device: 80GB, 24GiB, ...")]
GpuName = Annotated[
    str | None,
    typer.Option("--gpu", metavar="NAME", help="Memory of this GPU, instead of --memory: h100, rtx4090, l4, ..."),
]
Reserve = Annotated[
    str, typer.Option("--reserve", metavar="SIZE", help="Memory reserved for activations and libraries.")
]
Held = Annotated[
    Engine,
    typer.Option(
        "--engine",
        help="Engine to plan for: kvq (`kvq generate`, contiguous cache) or vllm (`kvq serve`, paged blocks).",
    ),
]
PlannedContext = Annotated[
    int | None,
    typer.Option(
        "--context",
        min=1,
        max=MAX_COUNT,
        help=f"Tokens per sequence (default: {DEFAULT_CONTEXT}, or the model's context where that is shorter).",
    ),
]
Ranks = Annotated[
    int,
    typer.Option(
        "--tensor-parallel-size",
        metavar="N",
        min=1,
        max=1024,
        help="With --engine vllm: GPUs that share each layer's heads; sizes are those of one of them.",
    ),
]


def plan(
    memory: Memory = None,
    gpu: GpuName = None,
    compare: Compare = None,
    bits: opt.Bits = None,
    set_: opt.Set = None,
    shapes: ShapeName = None,
    context: PlannedContext = None,
    batch: Batch = 1,
    engine: Held = Engine.kvq,
    tensor_parallel_size: Ranks = 1,
    reserve: Reserve = "2GB",
    model: Annotated[ModelName, not_shapes] = "reference",
    trust_remote_code: Annotated[opt.TrustRemoteCode, not_shapes] = False,
    accept_license: Annotated[opt.AcceptLicense, not_shapes] = False,
    as_json: opt.Json = False,
) -> None:
    """Show which methods fit into a memory, with the longest context and the largest batch of each.

    Counts 16-bit weights and each method's cache from tensor shapes; no weights are read. The memory of activations
    depends on the model and on --prefill-chunk: cover it with --reserve. With --engine vllm, the batch is the number
    of requests that decode at the same time, layers with a sliding window are in 16 bits, and methods that cannot be
    served are left out.
    """
    out = Output(as_json=as_json)
    ranks = tensor_parallel_size
    if ranks > 1 and engine is not Engine.vllm:
        raise UsageError(f"--tensor-parallel-size {ranks}: `kvq generate` runs on one GPU; add --engine vllm")
    total, held_back = memory_bytes(memory, gpu), parse_bytes(reserve, "--reserve")
    chosen = chosen_methods(compare, bits, set_, out)
    from kvq_cli.benchmarking.accounting import seen_numbers
    from kvq_cli.benchmarking.capacity import capacity, serving_capacity
    from kvq_cli.cache.report import FULL_PRECISION_BITS

    size = model_size(shapes, model, trust_remote_code)
    room, device = total - held_back, f"--memory {memory}" if gpu is None else f"--gpu {gpu}"
    weights = -(-size.weights_bytes // ranks)
    if room <= weights:
        raise UsageError(
            f"{device} is {human_bytes(total)}: the weights take {human_bytes(weights)} and "
            f"--reserve takes {reserve}; nothing is left for a cache"
        )
    if context is None:
        context = min(DEFAULT_CONTEXT, size.context)
        if context < DEFAULT_CONTEXT:
            out.note(f"note: planned for {context:,} tokens, the whole context of {shapes or model}")
    if context > size.context:
        out.note(f"note: --context {context:,} is longer than the {size.context:,} tokens of {shapes or model}")
    note_other_layers(size.shape, shapes or model, out)
    if engine is Engine.vllm and size.shape.attention:
        raise UsageError(
            f"--engine vllm: kvq serve does not serve {shapes or model}, of which some layers have no cache: leave it "
            "out, as for `kvq generate`"
        )
    if engine is Engine.vllm and shapes is None:
        from kvq_cli.models import model_config
        from kvq_cli.vllm.checks import check_model

        check_model(model_config(model, trust_remote_code), model)
    found, rows = [], []

    def count(method: Method) -> Capacity:
        sizes = (method, size.shape, weights, size.context, context, batch, room)
        return serving_capacity(*sizes, ranks) if engine is Engine.vllm else capacity(*sizes)

    for label, one in each_counted(chosen, compare is not None, count, out):
        found.append({"method": label, **one.to_dict()})
        rows.append([label, human_bytes(one.cache), human_bytes(one.weights + one.artifact + one.cache)])
        rows[-1] += ["yes" if one.fits else "no", f"{one.context:,}", f"{one.batch:,}"]
        if one.blocks is not None:
            rows[-1] += [f"{one.blocks:,} x {one.block_tokens}", f"{one.bits:.2f}"]
    columns = ["method", "cache", "with weights", "fits", f"longest context x {batch}", f"largest batch x {context:,}"]
    columns += ["blocks x tokens", "packed bits"] if engine is Engine.vllm else []
    where = memory or f"{human_bytes(total)} of {gpu}"
    where += f" on each of {ranks} ranks" if ranks > 1 else ""
    title = f"{shapes or model} in {where}, {reserve} of it reserved: weights {human_bytes(weights)}"
    plain = seen_numbers(size.shape, context, batch) * FULL_PRECISION_BITS // 8
    title += f", {batch} x {context:,} tokens ({human_bytes(plain)} in 16 bits)"
    out.table(columns, rows, title=title)
    document = {"shape": shapes or model, "memory": total, "reserve": held_back, "context": context, "batch": batch}
    document |= {"engine": engine.value, "tensor_parallel_size": ranks, "fp16_bytes": plain}
    out.result({**document, "methods": found})


def memory_bytes(memory: str | None, gpu: str | None) -> int:
    """The size given by `--memory` or `--gpu`; UsageError unless it is one of them."""
    from kvq_cli.benchmarking.gpus import known_gpu

    if (memory is None) == (gpu is None):
        raise UsageError(
            "give --memory SIZE, like 80GB, or --gpu NAME, like h100" + ("" if gpu is None else ", not both")
        )
    return parse_bytes(memory, "--memory") if memory is not None else int(known_gpu(str(gpu), "give --memory").memory)
