"""`kvq plan`: which method makes a model's context and batch fit into the memory there is."""

from __future__ import annotations

from typing import Annotated

import typer

from kvq_cli.cli import options as opt
from kvq_cli.cli.output import Output, human_bytes
from kvq_cli.cli.sizes import Batch, Compare, Context, ModelName, ShapeName, for_each, size_of

Memory = Annotated[str, typer.Option("--memory", metavar="SIZE", help="What there is: 80GB, 24GiB, ...")]
Reserve = Annotated[
    str, typer.Option("--reserve", metavar="SIZE", help="Held back for activations and the libraries themselves.")
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
    as_json: opt.Json = False,
) -> None:
    """Show what fits into a memory: weights in 16 bits and each method's cache, the longest context, the largest batch.

    Sizes are counted from the shapes of the tensors that there would be; weights are not read. What activations take
    depends on the model and on --prefill-chunk: --reserve holds it back.
    """
    out = Output(as_json=as_json)
    from kvq_cli.benchmarking.capacity import capacity, parse_bytes
    from kvq_cli.errors import UsageError

    total, held_back = parse_bytes(memory, "--memory"), parse_bytes(reserve, "--reserve")
    sized = size_of(shapes, model)
    room = total - held_back
    if room <= sized.weights:
        raise UsageError(
            f"--memory {memory} is {human_bytes(total)}: the weights take {human_bytes(sized.weights)} and --reserve "
            f"holds {reserve} back; nothing is left for a cache"
        )
    found, rows = [], []
    for label, one in for_each(compare, bits, set_, lambda method: capacity(method, *sized, context, batch, room), out):
        found.append({"method": label, **one.to_dict()})
        rows.append([label, human_bytes(one.cache), human_bytes(one.weights + one.artifact + one.cache)])
        rows[-1] += ["yes" if one.fits else "no", f"{one.context:,}", f"{one.batch:,}"]
    columns = ["method", "cache", "with weights", "fits", f"longest context x {batch}", f"largest batch x {context:,}"]
    title = f"{shapes or model} in {memory}, {reserve} of it held back: weights {human_bytes(sized.weights)}"
    out.table(columns, rows, title=f"{title}, {batch} x {context:,} tokens")
    document = {"shape": shapes or model, "memory": total, "reserve": held_back, "context": context, "batch": batch}
    out.result({**document, "methods": found})
