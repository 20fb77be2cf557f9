"""Roofline of rematerialization: up to how many tokens recomputing keys and values from layer inputs is memory-bound.

Per layer and decoded token, the weights take `weights` bytes, and each cached token of the batch takes `work`
operations and `cached` bytes. Below the number of tokens l at which

    P = work l / (cached l + weights)        (Eq. 3, 4; P: the GPU's operations per byte, its ridge)

the arithmetic takes less time than the memory traffic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isfinite, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvq_cli.benchmarking.gpus import Gpu, known_gpu
from kvq_cli.benchmarking.kernels.performance_targets import load_gpu_results
from kvq_cli.benchmarking.shapes import LlamaShape, known_shape
from kvq_cli.errors import UsageError
from kvq_cli.methods.xquant import keeps_input
from kvq_cli.papers.studies.study import Findings, FormulaStudy, Progress, register

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The shape of those kernel measurements that name no model.
GRID_SHAPE = "llama-3.1-8b"


@dataclass(frozen=True)
class Load:
    """Arithmetic and memory traffic of a layer. work: operations per cached token (a multiply-add is two); cached:
    bytes per cached token; weights: bytes of the weights."""

    work: float
    cached: float
    weights: float

    def limit(self, ridge: float, other: float | None = None) -> float:
        """The number of cached tokens up to which the layer is memory-bound; infinity if it always is.

        other: bytes per cached token of another load, whose memory time is compared instead.
        """
        slope = self.work - ridge * (self.cached if other is None else other)
        return ridge * self.weights / slope if slope > 0 else inf

    def seconds(self, tokens: np.ndarray, gpu: Gpu) -> np.ndarray:
        """Time for `tokens` cached tokens, if arithmetic and memory traffic overlap."""
        return np.maximum(self.work * tokens / gpu.flops, (self.cached * tokens + self.weights) / gpu.bandwidth)


def plain(shape: LlamaShape, bits: float) -> Load:
    """Keys and values stored with `bits` per number; the arithmetic of decoding is neglected."""
    return Load(0, 2 * bits / 8 * shape.kv_heads * shape.head_dim, 2 * shape.layer_parameters)


def xquant(shape: LlamaShape, bits: float) -> Load:
    """XQuant stores X if it is smaller than keys and values (MHA, Eq. 3), else X U_k and X U_v (GQA, Eq. 4)."""
    d, width = shape.hidden_size, shape.kv_heads * shape.head_dim
    if keeps_input(shape.model_shape()):
        return Load(2 * 2 * d * width, bits / 8 * d, 2 * shape.layer_parameters)
    return Load(2 * 2 * width**2, 2 * bits / 8 * width, 2 * shape.layer_parameters + 2 * 2 * width**2)


def xquant_as_printed(shape: LlamaShape, bits: float) -> Load:
    """XQuant with Eq. 4 as printed, which counts the e/8 l d/g bytes of one latent, while the text stores two."""
    load = xquant(shape, bits)
    return load if keeps_input(shape.model_shape()) else replace(load, cached=load.cached / 2)


def xquant_cl(shape: LlamaShape, bits: float, accumulator_bits: float) -> Load:
    """XQuant-CL (section 3.4): besides reading the difference, it reads, updates and writes the accumulator X^."""
    d, width = shape.hidden_size, shape.kv_heads * shape.head_dim
    accumulator = 2 * accumulator_bits / 8 * d
    if keeps_input(shape.model_shape()):
        return Load(2 * 2 * d * width + 2 * d, bits / 8 * d + accumulator, 2 * shape.layer_parameters)
    # U^T maps the difference back to d channels, from which W_k and W_v compute keys and values.
    weights = 2 * shape.layer_parameters + 2 * d * 2 * width
    return Load(2 * 4 * d * width + 2 * d, 2 * bits / 8 * width + accumulator, weights)


@register
@dataclass(frozen=True)
class Roofline(FormulaStudy):
    """Up to how many tokens recomputing keys and values from layer inputs costs no time, by the GPU's data sheet.

    gpu: a known name, or any with `teraflops` (dense 16-bit) and `bandwidth` (TB/s). shapes: names as in `kvq bits`,
    comma-separated. Tokens are counted over all sequences of a batch. measured: folder of results of `kvq bench
    kernels`, whose times of rematerializing attention (without loading weights) are drawn beside the estimates.
    """

    name = "roofline"
    source = "XQuant Eq. 3, 4"

    gpu: str = "h100-pcie"
    teraflops: float | None = None
    bandwidth: float | None = None
    shapes: tuple[str, ...] = ("llama-2-7b", "llama-3.1-8b")
    bits: float = 2.0
    accumulator_bits: float = 4.0
    measured: str = "benchmarks"

    def __post_init__(self) -> None:
        for name in ("teraflops", "bandwidth", "bits", "accumulator_bits"):
            value = getattr(self, name)
            if value is not None and not (isfinite(value) and value > 0):
                raise UsageError(f"study roofline: {name}={value:g} must be above 0")

    @property
    def device(self) -> Gpu:
        """The GPU of the options; `teraflops` and `bandwidth` override those of `gpu`."""
        if self.teraflops is not None and self.bandwidth is not None:
            return Gpu(self.teraflops * 1e12, self.bandwidth * 1e12)
        gpu = known_gpu(self.gpu)
        flops = gpu.flops if self.teraflops is None else self.teraflops * 1e12
        return Gpu(flops, gpu.bandwidth if self.bandwidth is None else self.bandwidth * 1e12)

    def run(self, progress: Progress) -> Findings:
        """See `FormulaStudy.run`."""
        gpu, names, times = self.device, self.shapes, measured_times(Path(self.measured))
        shapes: dict[str, dict[str, Any]] = {}
        for index, name in enumerate(names):
            progress("shapes", index, len(names))
            timed = [time for time in times if time["shape"] == name]
            shapes[name] = self._shape(known_shape(name, "shapes"), gpu) | {"measured": timed}
        progress("shapes", len(names), len(names))
        rows = [[name, shape["group"], *shape["limits"].values()] for name, shape in shapes.items()]
        numbers = {"ridge": gpu.ridge, "flops": gpu.flops, "bandwidth": gpu.bandwidth, "shapes": shapes}

        def draw(figure: Figure) -> None:
            panels = figure.subplots(1, len(names), squeeze=False)[0]
            for axis, (name, shape) in zip(panels, shapes.items(), strict=True):
                _draw(axis, shape)
                axis.set_title(name)

        columns = ["shape", "g", "Eq. 3, 4", "xquant", "xquant-cl", "slower than 16-bit KV from"]
        notes = [
            f"tokens of all sequences together; {gpu.flops / 1e12:g} TFLOP/s and {gpu.bandwidth / 1e12:g} TB/s: "
            f"{gpu.ridge:g} operations per byte; -: no limit",
            "Eq. 4 as printed counts the bytes of one latent; xquant counts X U_k and X U_v, as the paper's text does",
        ]
        return Findings(columns, rows, numbers, draw, (5.5 * len(names), 4.5), notes)

    def _shape(self, shape: LlamaShape, gpu: Gpu) -> dict[str, Any]:
        """Limits in tokens (None: no limit), and a layer's time in µs over the number of cached tokens."""
        exact, rematerialized = plain(shape, 16), xquant(shape, self.bits)
        cross_layer = xquant_cl(shape, self.bits, self.accumulator_bits)
        limits = {
            "printed": xquant_as_printed(shape, self.bits).limit(gpu.ridge),
            "xquant": rematerialized.limit(gpu.ridge),
            "xquant_cl": cross_layer.limit(gpu.ridge),
            "slower_than_16_bit": rematerialized.limit(gpu.ridge, exact.cached),
        }
        rounded = {key: round(limit) if isfinite(limit) else None for key, limit in limits.items()}
        tokens = np.logspace(2, max(5, log10(max(filter(None, rounded.values()), default=1)) + 0.7), 200)
        loads = {
            "16-bit KV": exact,
            f"{self.bits:g}-bit KV": plain(shape, self.bits),
            f"xquant, {self.bits:g} bit": rematerialized,
            f"xquant-cl, {self.bits:g} bit": cross_layer,
        }
        return {
            "group": shape.heads // shape.kv_heads,
            "limits": rounded,
            "tokens": tokens.tolist(),
            "microseconds": {label: (1e6 * load.seconds(tokens, gpu)).tolist() for label, load in loads.items()},
        }


def measured_times(folder: Path) -> list[dict[str, Any]]:
    """Measured times of rematerialization from results of `kvq bench kernels`: shape, device, case, tokens of all
    sequences, and the median time per layer in microseconds."""
    times = []
    for documents in load_gpu_results(folder).values():
        document = documents.get("kernels", {"rows": []})
        for row in document["rows"]:
            if row["operation"] == "rematerialize" and "us" in row:
                tokens, shape = row.get("batch", 1) * row["context"], row.get("model", GRID_SHAPE)
                case = {"device": document["machine"]["device"], "case": row["case"], "tokens": tokens}
                times.append({"shape": shape, **case, "microseconds": row["us"]["p50"]})
    return times


def _draw(axis: Axes, shape: dict[str, Any]) -> None:
    for (label, times), style in zip(shape["microseconds"].items(), ("-", "-", "-", "--"), strict=True):
        axis.plot(shape["tokens"], times, style, label=label)
    for number, case in enumerate(dict.fromkeys((time["device"], time["case"]) for time in shape["measured"])):
        measured = [time for time in shape["measured"] if (time["device"], time["case"]) == case]
        points = ([time["tokens"] for time in measured], [time["microseconds"] for time in measured])
        axis.plot(*points, "osD^v"[number % 5], color=f"C{4 + number % 6}", markersize=5, label=", ".join(case))
    limit = shape["limits"]["xquant"]
    if limit is not None:
        axis.axvline(limit, color="0.5", linestyle=":", linewidth=1)
        at = ("data", "axes fraction")
        axis.annotate(f"{limit:,} tokens", (limit, 0.97), xycoords=at, ha="right", va="top", rotation=90, fontsize=8)
    axis.set(xscale="log", yscale="log", xlabel="cached tokens", ylabel="µs per layer and decoded token")
    axis.legend(fontsize=8, loc="upper left")
    axis.grid(alpha=0.3)
