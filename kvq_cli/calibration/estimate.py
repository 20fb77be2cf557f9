"""What a calibration will take and give, before it runs: memory, disk, tensors."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import torch

from kvq_cli.calibration.factors import factor_shapes
from kvq_cli.calibration.settings import Settings
from kvq_cli.methods.base import CodebookSpec, ModelShape
from kvq_cli.models import LoadedModel, text_config


def needs_checkpointing(loaded: LoadedModel, settings: Settings) -> bool:
    """Whether the activations of a backward pass would take more than half of the memory that is free."""
    return activation_bytes(loaded, settings, checkpointed=False) > _free_bytes(loaded.model.device) / 2


def activation_bytes(loaded: LoadedModel, settings: Settings, *, checkpointed: bool) -> int:
    """What a forward and backward pass over one sample holds beside the weights, roughly.

    A layer keeps about 14 tensors of the hidden size and 4 of the MLP's size per token; checkpointed, one of them,
    while one layer is computed again. The logits are held in the model's dtype and in float32, the gradients likewise.
    """
    config, number = text_config(loaded.model.config), loaded.shape.dtype.itemsize
    mlp = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    hidden, layer = config.hidden_size * number, (14 * config.hidden_size + 4 * mlp) * number
    kept = loaded.shape.layers * hidden + layer if checkpointed else loaded.shape.layers * layer
    return settings.seqlen * (kept + config.vocab_size * 2 * (number + 4))


def clustering_bytes(settings: Settings, tokens: int, shape: ModelShape) -> int:
    """What the clustering of one stream of one layer holds, roughly: all activations twice in 16 bits, and those that
    have gradients as 14 tensors of 32 bits."""
    per_sample = tokens * shape.kv_heads * shape.head_dim
    return per_sample * (settings.samples * 2 * 2 + settings.gradients * 14 * 4)


def capture_workers(planned) -> int:
    """How many samples pass through the model side by side."""
    loaded, settings = planned.loaded, planned.settings
    checkpointed = needs_checkpointing(loaded, settings)
    return 1 if checkpointed else _side_by_side(planned, activation_bytes(loaded, settings, checkpointed=False))


def cluster_workers(planned) -> int:
    """How many streams are clustered side by side."""
    return _side_by_side(planned, clustering_bytes(planned.settings, planned.extent.tokens, planned.loaded.shape))


def _side_by_side(planned, one: int) -> int:
    """One task of `one` bytes for each of torch's threads on a CPU, as far as memory allows; one on a GPU."""
    device = planned.loaded.model.device
    if device.type != "cpu":
        return 1
    return max(1, min(torch.get_num_threads(), _free_bytes(device) // (2 * one)))


def stream_tensors(spec: CodebookSpec, shape: ModelShape) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name to shape and dtype of one stream's tensors. All candidate shapes have codebooks of one size: the first
    stands for whatever is chosen."""
    heads, channels = shape.kv_heads, (shape.kv_heads, shape.head_dim)
    first = spec.shapes[0]
    books = (1 if spec.across_heads else heads, shape.head_dim // spec.share, spec.entries, first.size)
    tensors = {f"centroids.{first.name if len(spec.shapes) == 1 else '<shape>'}": (books, shape.dtype)}
    tensors["choice"] = ((heads,), torch.int8)
    for name in ("mean", "std") if spec.normalize else ():
        tensors[name] = (channels, torch.float32)
    for name in ("lower", "upper") if spec.outliers and not spec.per_token else ():
        tensors[name] = (channels, torch.float32)
    return tensors


def dry_run_report(planned) -> dict:
    """The document of `kvq calibrate --dry-run`, for a `pipeline.Plan`; what it says of data and gradients is there
    only where text is read."""
    tensors = _factor_tensors(planned) if planned.extent is None else _codebook_tensors(planned)
    document = {
        "request": planned.request(),
        "tensors": tensors,
        "artifact_bytes": sum(tensor["bytes"] for tensor in tensors),
    }
    loaded, settings, shape = planned.loaded, planned.settings, planned.loaded.shape
    if planned.extent is None:
        # A decomposition holds the weights, its three results and as much again to work in, in 32 bits.
        scratch = 5 * 4 * shape.hidden_size * 2 * shape.kv_heads * shape.head_dim
        return {**document, "memory_bytes": _held_bytes(loaded) + scratch}
    checkpointing = needs_checkpointing(loaded, settings)
    activations = capture_workers(planned) * activation_bytes(loaded, settings, checkpointed=checkpointing)
    clustering = cluster_workers(planned) * clustering_bytes(settings, planned.extent.tokens, shape)
    return {
        **document,
        "captured_bytes": planned.extent.nbytes,
        "captured_share": planned.extent.units / planned.extent.possible,
        "memory_bytes": _held_bytes(loaded) + activations + clustering,
        "gradient_checkpointing": checkpointing,
    }


def work_bytes(planned) -> int:
    """What a calibration writes while it runs."""
    if planned.extent is not None:
        return planned.extent.nbytes
    return sum(tensor["bytes"] for tensor in _factor_tensors(planned))


def _codebook_tensors(planned) -> list[dict]:
    shape, streams = planned.loaded.shape, {"k": planned.spec.keys, "v": planned.spec.values}
    return [
        _tensor(f"{kind}.{name}", size, dtype, shape.layers)
        for kind, spec in streams.items()
        for name, (size, dtype) in stream_tensors(spec, shape).items()
    ]


def _factor_tensors(planned) -> list[dict]:
    shape = planned.loaded.shape
    found = Counter(item for names in planned.spec.layers for item in factor_shapes(names, shape).items())
    return [_tensor(name, size, shape.dtype, layers) for (name, size), layers in found.items()]


def _tensor(name: str, size: tuple[int, ...], dtype: torch.dtype, layers: int) -> dict:
    """One tensor per layer, of `layers` layers."""
    return {
        "name": f"layers.*.{name}",
        "shape": list(size),
        "dtype": str(dtype).removeprefix("torch."),
        "bytes": layers * torch.Size(size).numel() * dtype.itemsize,
    }


def _held_bytes(loaded: LoadedModel) -> int:
    """What is held already: of a GPU's memory the weights, of the machine's the whole process, libraries included."""
    weights = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident = pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):  # not known on this system
        resident = weights
    return resident if loaded.model.device.type == "cpu" else weights


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not known on this system
        return 8 << 30
