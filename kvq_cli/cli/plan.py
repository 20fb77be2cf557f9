"""`kvq plan`: which methods fit a model, context length and batch size into a given memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvq_cli.cli import options as opt
from kvq_cli.cli.output import Output, human_bytes
from kvq_cli.cli.sizes import Batch, Compare, Context, ModelName, ShapeName, each_method, model_size

if TYPE_CHECKING:
    from kvq_cli.benchmarking.capacity import Capacity
    from kvq_cli.methods.base import Method

Memory = Annotated[str, typer.Option("--memory", metavar="SIZE", help="Memory of the device: 80GB, 24GiB, ...")]
Reserve = Annotated[
    str, typer.Option("--reserve", metavar="SIZE", help="Memory reserved for activations and libraries.")
]


def plan(
    memory: Memory,
    compare: Compare = None,
    bits: opt.Bits = None,
    set_: opt.Set = None,
    shapes: ShapeName = None,
    context: Context = 8192,
    batch: Batch = 1,
    reserve: Reserve = "2GB",
    model: ModelName = "reference",
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: opt.Json = False,
) -> None:
    """Show which methods fit into a memory, with the longest context and the largest batch of each.

    Counts 16-bit weights and each method's cache from tensor shapes; no weights are read. The memory of activations
    depends on the model and on --prefill-chunk: cover it with --reserve.
    """
    out = Output(as_json=as_json)
    from kvq_cli.benchmarking.capacity import capacity, parse_bytes
    from kvq_cli.errors import UsageError

    total, held_back = parse_bytes(memory, "--memory"), parse_bytes(reserve, "--reserve")
    size = model_size(shapes, model, trust_remote_code)
    room = total - held_back
    if room <= size.weights_bytes:
        raise UsageError(
            f"--memory {memory} is {human_bytes(total)}: the weights take {human_bytes(size.weights_bytes)} and "
            f"--reserve takes {reserve}; nothing is left for a cache"
        )
    found, rows = [], []

    def count(method: Method) -> Capacity:
        return capacity(method, *size, context, batch, room)

    for label, one in each_method(compare, bits, set_, count, out):
        found.append({"method": label, **one.to_dict()})
        rows.append([label, human_bytes(one.cache), human_bytes(one.weights + one.artifact + one.cache)])
        rows[-1] += ["yes" if one.fits else "no", f"{one.context:,}", f"{one.batch:,}"]
    columns = ["method", "cache", "with weights", "fits", f"longest context x {batch}", f"largest batch x {context:,}"]
    title = f"{shapes or model} in {memory}, {reserve} of it reserved: weights {human_bytes(size.weights_bytes)}"
    out.table(columns, rows, title=f"{title}, {batch} x {context:,} tokens")
    document = {"shape": shapes or model, "memory": total, "reserve": held_back, "context": context, "batch": batch}
    out.result({**document, "methods": found})
