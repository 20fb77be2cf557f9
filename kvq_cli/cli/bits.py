"""`kvq bits`: what a method's cache takes, by part, for a model of known numbers; no weights are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvq_cli.cli import options as opt
from kvq_cli.cli.output import Output, human_bytes

if TYPE_CHECKING:
    from kvq_cli.cache.report import CacheReport
    from kvq_cli.methods.base import Method

Compare = Annotated[
    str | None,
    typer.Option("--compare", metavar="NAME,...", help="Methods like kivi-4bit:residual=32 (default: all there are)."),
]
ShapeName = Annotated[
    str | None,
    typer.Option("--shapes", metavar="NAME", help="A known model: llama-3.1-8b, llama-2-7b, ...; instead of --model."),
]
ModelName = Annotated[
    str, typer.Option("--model", metavar="NAME", help="`reference`, a Hugging Face id or a folder: its config is read.")
]
Context = Annotated[int, typer.Option("--context", min=1, help="Tokens of each sequence.")]
Batch = Annotated[int, typer.Option("--batch", min=1, help="Sequences.")]
Papers = Annotated[bool, typer.Option("--papers", help="The sizes that the papers print, beside what kvq counts.")]


def bits(
    compare: Compare = None,
    method: opt.MethodName = None,
    bits: opt.Bits = None,
    set_: opt.Set = None,
    shapes: ShapeName = None,
    context: Context = 8192,
    batch: Batch = 1,
    papers: Papers = False,
    model: ModelName = "reference",
    as_json: opt.Json = False,
) -> None:
    """Count the bytes of a compressed cache by part, from the shapes of the tensors that it would hold.

    Bits are per cached number (tokens x kv heads x head_dim, keys and values). `packed` leaves out windows and room for
    tokens to come; `measured` counts all that a sequence holds. Constants are shared by all sequences.
    """
    out = Output(as_json=as_json)
    if papers:
        _papers(out)
        return
    from kvq_cli.benchmarking.accounting import account, artifact_bytes
    from kvq_cli.errors import UsageError
    from kvq_cli.methods.registry import check_shared, parse

    if method is not None and compare is not None:
        raise UsageError("--compare with --method: drop one of the two")
    shape, weights = _shape(shapes, model)
    found, rows = [], []
    options = opt.method_options(set_) | ({} if bits is None else {"bits": bits})
    names = _names(compare or method)
    check_shared((parse(text)[0] for text in names), options)
    for text in names:
        try:
            label, one = _method(text, options)
            report = account(one, shape, context, batch)
        except UsageError as error:
            if compare or method:
                raise
            out.note(f"not counted: {error}")
            continue
        constants = sum(artifact_bytes(one, shape).values())
        document = {"method": label, **report.to_dict(), "artifact_bytes": constants}
        if weights:
            document["artifact_share_of_weights"] = constants / weights
        found.append(document)
        share = f" ({100 * constants / weights:.2f} %)" if weights and constants else ""
        rows.append([label, report.nominal_bits, round(report.packed_bits, 3), round(report.measured_bits, 3)])
        rows[-1] += [human_bytes(report.bytes), round(report.fp16_bytes / report.bytes, 2)]
        rows[-1] += [human_bytes(constants) + share if constants else "-", _by_part(report)]
    columns = ["method", "nominal", "packed", "measured", "cache", "x smaller", "constants", "bits by part"]
    title = f"{shapes or model}: {batch} x {context:,} tokens, bits per cached number"
    out.table(columns, rows, title=title)
    out.result({"shape": shapes or model, "context": context, "batch": batch, "methods": found})


def _names(text: str | None) -> list[str]:
    from kvq_cli.methods.registry import method_names

    return opt.names(text, "--compare") if text else method_names()


def _method(text: str, options: dict) -> tuple[str, Method]:
    """The method that `text` names, and a label that says its bits."""
    from kvq_cli.methods.registry import build_parsed

    built = build_parsed(text, **options)
    name, *own = text.split(":")
    has_bits = hasattr(built, "bits") and not name.endswith(f"-{built.bits}bit")
    return ":".join([f"{name}-{built.bits}bit" if has_bits else name, *own]), built


def _shape(name: str | None, model: str) -> tuple:
    """(ModelShape, bytes of the weights in 16 bits or None)."""
    if name is not None:
        from kvq_cli.benchmarking.shapes import known_shape

        shape = known_shape(name, "--shapes")
        return shape.model_shape(), 2 * shape.parameters
    from kvq_cli.models import configured_shape

    return configured_shape(model), None


def _by_part(report: CacheReport) -> str:
    """`codes 2 + scale 0.5 + ...`, in bits per cached number, the largest first."""
    parts = sorted(report.parts.items(), key=lambda item: -item[1])
    return " + ".join(f"{name} {8 * size / report.numbers:.3g}" for name, size in parts if size)


def _papers(out: Output) -> None:
    from kvq_cli.benchmarking.published import compare_sizes

    found = compare_sizes()
    columns = ["paper", "table", "row", "method", "shape", "figure", "published", "kvq", "difference"]
    columns.append("kvq's bits by part")
    rows = [
        [one[key] for key in (*columns[:6], "published")]
        + [round(one["counted"], 3)]
        + [f"{100 * (one['counted'] / one['published'] - 1):+.1f} %", _by_part(one["report"])]
        for one in found
    ]
    out.table(columns, rows)
    out.result([{key: value for key, value in one.items() if key != "report"} for one in found])
