"""`kvq bits`: bytes and bits of a method's cache by part, from the model's shape; needs no weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvq_cli.cli import options as opt
from kvq_cli.cli.output import Output, human_bytes
from kvq_cli.cli.rules import either, unless
from kvq_cli.cli.sizes import (
    Batch,
    Compare,
    Context,
    ModelName,
    ShapeName,
    chosen_methods,
    each_counted,
    model_size,
    not_shapes,
    note_other_layers,
)

if TYPE_CHECKING:
    from kvq_cli.cache.report import CacheReport
    from kvq_cli.methods.base import Method

Papers = Annotated[bool, typer.Option("--papers", help="Compare the sizes that the papers print with kvq's counts.")]
_not_papers = unless(lambda values: not values["papers"], "--papers counts the papers' sizes")
_method = either(_not_papers, opt.of_compared)
_model = either(_not_papers, not_shapes)


def bits(
    compare: Annotated[Compare, _not_papers] = None,
    method: Annotated[opt.MethodName, _not_papers] = None,
    bits: Annotated[opt.Bits, _method] = None,
    set_: Annotated[opt.Set, _method] = None,
    shapes: Annotated[ShapeName, _not_papers] = None,
    context: Annotated[Context, _not_papers] = 8192,
    batch: Annotated[Batch, _not_papers] = 1,
    papers: Papers = False,
    model: Annotated[ModelName, _model] = "reference",
    trust_remote_code: Annotated[opt.TrustRemoteCode, _model] = False,
    accept_license: Annotated[opt.AcceptLicense, _model] = False,
    as_json: opt.Json = False,
) -> None:
    """Count the bytes of a compressed cache by part, from its tensors' shapes; nothing is allocated.

    Bits are per cached number (tokens x kv heads x head_dim, keys and values): `nominal` counts codes alone, `packed`
    adds scales and outliers, `measured` adds full-precision windows and unused room. Of a layer with a sliding window,
    the tokens within it count, which transformers' own cache holds. Constants (codebooks) are shared by all sequences;
    so are the tables that a CPU makes from them and holds while it runs, which are no part of the format.
    """
    out = Output(as_json=as_json)
    if papers:
        _papers(out)
        return
    from kvq_cli.errors import UsageError

    if method is not None and compare is not None:
        raise UsageError("--compare with --method: use one of them")
    named = method if compare is None else compare
    chosen = chosen_methods(named, bits, set_, out)
    from kvq_cli.benchmarking.accounting import account, artifact_bytes

    size = model_size(shapes, model, trust_remote_code)
    note_other_layers(size.shape, shapes or model, out)
    counted, rows = [], []

    def count(method: Method) -> tuple[CacheReport, int]:
        return account(method, size.shape, context, batch), sum(artifact_bytes(method, size.shape).values())

    for label, (report, constants) in each_counted(chosen, named is not None, count, out):
        share = constants / size.weights_bytes
        counted.append(
            {"method": label, **report.to_dict(), "artifact_bytes": constants, "artifact_share_of_weights": share}
        )
        rows.append([label, report.nominal_bits, round(report.packed_bits, 3), round(report.measured_bits, 3)])
        rows[-1] += [human_bytes(report.bytes), round(report.fp16_bytes / report.bytes, 2)]
        rows[-1] += [f"{human_bytes(constants)} ({share:.2%})" if constants else "-"]
        rows[-1] += [human_bytes(report.table_bytes) if report.tables else "-", _by_part(report)]
    columns = ["method", "nominal", "packed", "measured", "cache", "x smaller", "constants", "tables", "bits by part"]
    title = f"{shapes or model}: {batch} x {context:,} tokens, bits per cached number"
    out.table(columns, rows, title=title)
    out.result({"shape": shapes or model, "context": context, "batch": batch, "methods": counted})


def _by_part(report: CacheReport) -> str:
    """`codes 2 + scale 0.5 + ...` in bits per cached number, largest first."""
    return " + ".join(f"{name} {bits:.3g}" for name, bits in _part_bits(report).items())


def _part_bits(report: CacheReport) -> dict[str, float]:
    """The bits per cached number of each part that takes any, largest first."""
    parts = sorted(report.parts.items(), key=lambda item: -item[1])
    return {name: 8 * size / report.numbers for name, size in parts if size}


def _papers(out: Output) -> None:
    from kvq_cli.papers.sizes import compare_sizes

    sizes = compare_sizes()
    columns = ["table", "row", "method", "shape", "figure", "paper", "kvq", "error", "kvq's bits by part"]
    rows = [
        [f"{size['paper']} {size['table']}", size["row"], size["method"].replace(":", " "), size["shape"]]
        + [size["figure"], size["published"], round(size["counted"], 3)]
        + [f"{100 * (size['counted'] / size['published'] - 1):+.1f} %", _by_part(size["report"])]
        for size in sizes
    ]
    out.table(columns, rows, labels=2)
    named = [{key: value for key, value in size.items() if key != "report"} for size in sizes]
    parts = [{"bits_by_part": _part_bits(size["report"])} for size in sizes]
    out.result([one | part for one, part in zip(named, parts, strict=True)])
