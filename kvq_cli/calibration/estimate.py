"""Estimates of a calibration's memory, disk space and tensors, before it runs."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from kvq_cli.calibration import loss
from kvq_cli.calibration.free_memory import free_bytes
from kvq_cli.calibration.plan import AnyPlan, CapturePlan, FactorPlan, MixedPlan, TransformPlan, WhitenedPlan
from kvq_cli.calibration.settings import CalibrationSettings
from kvq_cli.methods.base import CodebookSpec, ModelShape, TransformSpec, stream_spec
from kvq_cli.methods.tensors import even_allocation, factor_layout, first_choice, layer_layout, stream_layout
from kvq_cli.models import LoadedModel, text_config

#: Activations of a sample on a CPU, where several samples run at once; above, layers are computed twice.
_MAX_CPU_ACTIVATIONS = 3 << 27
#: Memory that a sample takes on a CPU beside its activations, in activations of one layer in 32 bits: freed temporaries
#: between kept tensors. Measured: 0.9 GB where one layer's are 75 MB.
_CPU_TEMPORARIES = 12
#: Square matrices of a transform in float64 that are in memory while it is fitted: moments, roots, eigenvectors,
#: workspace. Measured: 12 to 13 for one group of 512 and of 1,024 channels.
_FITTED_MATRICES = 13


def checkpointed_layers(loaded: LoadedModel, seqlen: int) -> int:
    """How many layers' activations are computed again in the backward pass over `seqlen` tokens, so that activations
    take at most half of the free memory, on a CPU also at most 384 MiB."""
    device, layers = loaded.model.device, loaded.shape.layers
    limit = free_bytes(device) // 2
    if device.type == "cpu":
        limit = min(limit, _MAX_CPU_ACTIVATIONS)
    return next((n for n in range(layers) if activation_bytes(loaded, seqlen, n) <= limit), layers)


def activation_bytes(loaded: LoadedModel, seqlen: int, checkpointed: int) -> int:
    """Rough bytes of a forward and backward pass over one sample of `seqlen` tokens, without the weights.

    Per token, a layer keeps about 8 tensors of the hidden size and 3 of the MLP's size. Of the `checkpointed` layers
    each keeps two, its input and the output of attention, and one layer at a time is recomputed. Logits of
    `loss.TOKENS` tokens exist at a time, three times in 32 bits.
    """
    config, itemsize = text_config(loaded.model.config), loaded.shape.dtype.itemsize
    plain = loaded.shape.layers - checkpointed
    kept = (checkpointed * 2 * config.hidden_size + max(plain, 1) * _layer_numbers(loaded)) * itemsize
    return seqlen * kept + min(seqlen, loss.TOKENS) * config.vocab_size * 3 * 4


def _layer_numbers(loaded: LoadedModel) -> int:
    """Numbers that a layer keeps of each token for the backward pass."""
    config = text_config(loaded.model.config)
    mlp = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return 8 * config.hidden_size + 3 * mlp


def clustering_bytes(settings: CalibrationSettings, tokens: int, shape: ModelShape) -> int:
    """Rough bytes to cluster the keys or values of one layer, from `tokens` captured tokens per sample.

    All activations twice in 16 bits, and those with gradients as 14 tensors of 32 bits.
    """
    per_sample = tokens * shape.kv_heads * shape.head_dim
    return per_sample * (settings.samples * 2 * 2 + settings.gradients * 14 * 4)


def capture_workers(plan: CapturePlan) -> int:
    """How many samples run through the model in parallel."""
    loaded, seqlen = plan.loaded, plan.settings.seqlen
    return _workers(loaded.model.device, activation_bytes(loaded, seqlen, checkpointed_layers(loaded, seqlen)))


def cluster_workers(plan: CapturePlan) -> int:
    """How many streams (keys or values of a layer) are clustered in parallel."""
    return _workers(plan.loaded.model.device, _stream_bytes(plan))


def _stream_bytes(plan: CapturePlan) -> int:
    """Rough bytes to calibrate the keys or values of one layer: to cluster them, and to fit the largest transform."""
    shape = plan.loaded.shape
    specs = ((kind, stream_spec(plan.spec, layer, kind)) for layer in range(shape.layers) for kind in "kv")
    sizes = (one.groups(kind, shape) for kind, one in specs if isinstance(one, TransformSpec))
    matrices = max((8 * groups * width**2 for groups, width in sizes), default=0)
    return clustering_bytes(plan.settings, plan.capture.tokens, shape) + _FITTED_MATRICES * matrices


def _workers(device: torch.device, bytes_per_task: int) -> int:
    """On a CPU, one worker per torch thread, as far as free memory allows; on a GPU, one."""
    if device.type != "cpu":
        return 1
    return max(1, min(torch.get_num_threads(), free_bytes(device) // (2 * bytes_per_task)))


def dry_run_report(plan: AnyPlan) -> dict[str, Any]:
    """The JSON document of `kvq calibrate --dry-run`. Sizes of captured data are included only where text is read."""
    tensors = planned_tensors(plan)
    document = {
        "request": plan.request(),
        "tensors": tensors,
        "artifact_bytes": sum(tensor["bytes"] for tensor in tensors),
        "disk_bytes": disk_bytes(plan),
    }
    loaded, shape = plan.loaded, plan.loaded.shape
    if isinstance(plan, FactorPlan):
        # An SVD holds the weights, its three results and as much again as workspace, in 32 bits.
        scratch = 5 * 4 * shape.hidden_size * 2 * shape.kv_heads * shape.head_dim
        # Before it, the text is read: sums, and their means or the bytes that are written of them.
        sums = 2 * _sums_bytes(plan) if isinstance(plan, WhitenedPlan) else 0
        return {**document, "memory_bytes": _resident_bytes(loaded) + max(sums, scratch)}
    settings, captured = plan.settings, plan.capture
    checkpointed = checkpointed_layers(loaded, settings.seqlen)
    sample = activation_bytes(loaded, settings.seqlen, checkpointed)
    if loaded.model.device.type == "cpu":
        sample += _CPU_TEMPORARIES * settings.seqlen * _layer_numbers(loaded) * 4
    activations = capture_workers(plan) * sample
    clustering = cluster_workers(plan) * _stream_bytes(plan)
    return {
        **document,
        "captured_bytes": captured.nbytes,
        "captured_share": captured.units / captured.possible,
        "memory_bytes": _resident_bytes(loaded) + max(activations, clustering),  # one after the other
        "checkpointed_layers": checkpointed,
    }


def disk_bytes(plan: AnyPlan) -> int:
    """Bytes that a calibration writes to disk while it runs."""
    return step_bytes(plan) + (plan.capture.nbytes if isinstance(plan, CapturePlan) else 0)


def step_bytes(plan: AnyPlan) -> int:
    """`disk_bytes` without captured activations: transforms, or factors and the sums that they are computed from.

    Codebooks are left out: they are small beside the activations that they are clustered from.
    """
    shape = plan.loaded.shape
    if isinstance(plan, TransformPlan):
        sizes = (plan.spec.groups(kind, shape) for kind in "kv")
        # Float64: analysis and synthesis, and mean, std and variances.
        return shape.layers * sum(8 * groups * width * (2 * width + 3) for groups, width in sizes)
    if isinstance(plan, FactorPlan):
        factors = sum(tensor["bytes"] for tensor in planned_tensors(plan))
        return factors + (2 * _sums_bytes(plan) if isinstance(plan, WhitenedPlan) else 0)  # and their means
    return 0


def _sums_bytes(plan: WhitenedPlan) -> int:
    """Bytes of `low_rank.SecondMoments` of all layers."""
    shape, heads = plan.loaded.shape, plan.spec.heads
    return shape.layers * 2 * 8 * (shape.kv_heads // heads) * (heads * shape.head_dim) ** 2


def planned_tensors(plan: AnyPlan) -> list[dict[str, Any]]:
    """Name, shape, dtype and bytes (all layers together) of each kind of tensor in the artifact; for transforms, as if
    all their components had the same bits."""
    shape = plan.loaded.shape
    if isinstance(plan, FactorPlan):
        counts = Counter(item for i in range(shape.layers) for item in factor_layout(plan.spec, i, shape).items())
        return [_tensor_entry(name, size, dtype, layers) for (name, (size, dtype)), layers in counts.items()]
    if isinstance(plan, TransformPlan):
        even = {kind: even_allocation(plan.spec, kind, shape) for kind in "kv"}
        layout = layer_layout(plan.spec, shape, 0, even)
        return [_tensor_entry(name, size, dtype, shape.layers) for name, (size, dtype) in layout.items()]
    if isinstance(plan, MixedPlan):
        return [
            _tensor_entry(name, size, dtype, 1, f"layers.{layer}")
            for layer, specs in enumerate(plan.spec.layers)
            for name, (size, dtype) in layer_layout(
                plan.spec, shape, layer, {k: first_choice(one, k, shape) for k, one in zip("kv", specs, strict=True)}
            ).items()
        ]
    return [
        _tensor_entry(f"{kind}.{_any_shape(name, spec)}", size, dtype, shape.layers)
        for kind, spec in zip("kv", plan.spec.streams, strict=True)
        for name, (size, dtype) in stream_layout(spec, shape, [0] * shape.kv_heads).items()
    ]


def _any_shape(name: str, spec: CodebookSpec) -> str:
    """The name with `<shape>` for the block shape if there are several candidates, whose codebooks have one size."""
    return name.replace(f".{spec.shapes[0].name}", ".<shape>") if len(spec.shapes) > 1 else name


def _tensor_entry(
    name: str, size: tuple[int, ...], dtype: torch.dtype, layers: int, prefix: str = "layers.*"
) -> dict[str, Any]:
    return {
        "name": f"{prefix}.{name}",
        "shape": list(size),
        "dtype": str(dtype).removeprefix("torch."),
        "bytes": layers * torch.Size(size).numel() * dtype.itemsize,
    }


def _resident_bytes(loaded: LoadedModel) -> int:
    """Memory in use now: the weights on a GPU; on a CPU the whole process, libraries included."""
    weights = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    if loaded.model.device.type != "cpu":
        return weights
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):  # not known on this system
        return weights
