"""Estimates of a calibration's memory, disk space and tensors, before it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvq_cli.calibration import loss
from kvq_cli.calibration.free_memory import free_bytes
from kvq_cli.calibration.settings import CalibrationSettings
from kvq_cli.codecs.layout import ITEMSIZE
from kvq_cli.methods.base import ModelShape
from kvq_cli.models import LoadedModel, text_config

if TYPE_CHECKING:
    from kvq_cli.calibration.kinds.base import CalibrationPlan
    from kvq_cli.calibration.kinds.capture import CapturePlan

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
    and logits take at most half of the free memory, on a CPU activations also at most 384 MiB."""
    device, layers = loaded.model.device, loaded.shape.layers
    limit = free_bytes(device) // 2 - _logit_bytes(loaded, seqlen)
    if device.type == "cpu":
        limit = min(limit, _MAX_CPU_ACTIVATIONS)
    return next((n for n in range(layers) if _kept_bytes(loaded, seqlen, n) <= limit), layers)


def activation_bytes(loaded: LoadedModel, seqlen: int, checkpointed: int) -> int:
    """Rough bytes of a forward and backward pass over one sample of `seqlen` tokens, without the weights."""
    return _kept_bytes(loaded, seqlen, checkpointed) + _logit_bytes(loaded, seqlen)


def _kept_bytes(loaded: LoadedModel, seqlen: int, checkpointed: int) -> int:
    """Rough bytes that layers keep for the backward pass.

    Per token, a layer keeps about 8 tensors of the hidden size and 3 of the MLP's size. Of the `checkpointed` layers
    each keeps two, its input and the output of attention, and one layer at a time is recomputed.
    """
    config, itemsize = text_config(loaded.model.config), ITEMSIZE[loaded.shape.dtype]
    plain = loaded.shape.layers - checkpointed
    return seqlen * (checkpointed * 2 * config.hidden_size + max(plain, 1) * _layer_numbers(loaded)) * itemsize


def _logit_bytes(loaded: LoadedModel, seqlen: int) -> int:
    """Bytes of the logits of `loss.TOKENS` tokens, which exist at a time, three times in 32 bits."""
    return min(seqlen, loss.TOKENS) * text_config(loaded.model.config).vocab_size * 3 * 4


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
    return _workers(plan.loaded.model.device, stream_bytes(plan))


def stream_bytes(plan: CapturePlan) -> int:
    """Rough bytes to calibrate the keys or values of one layer: to cluster them, and to fit the largest transform."""
    shape = plan.loaded.shape
    parts = (part for layer in shape.cached_layers for part in plan.spec.parts(layer).items())
    sizes = (part.groups(kind, shape) for kind, part in parts)
    matrices = max(8 * groups * width**2 for groups, width in sizes)
    return clustering_bytes(plan.settings, plan.capture.tokens, shape) + _FITTED_MATRICES * matrices


def _workers(device: torch.device, bytes_per_task: int) -> int:
    """On a CPU, one worker per torch thread, as far as free memory allows; on a GPU, one."""
    if device.type != "cpu":
        return 1
    return max(1, min(torch.get_num_threads(), free_bytes(device) // (2 * bytes_per_task)))


def capture_bytes(plan: CapturePlan) -> int:
    """Rough bytes of the samples that run through the model in parallel."""
    loaded, seqlen = plan.loaded, plan.settings.seqlen
    sample = activation_bytes(loaded, seqlen, checkpointed_layers(loaded, seqlen))
    if loaded.model.device.type == "cpu":
        sample += _CPU_TEMPORARIES * seqlen * _layer_numbers(loaded) * 4
    return capture_workers(plan) * sample


def dry_run_report(plan: CalibrationPlan) -> dict[str, Any]:
    """The JSON document of `kvq calibrate --dry-run`. Sizes of captured data are included only where text is read."""
    tensors = plan.planned_tensors()
    return {
        "request": plan.request(),
        "tensors": tensors,
        "artifact_bytes": sum(tensor["bytes"] for tensor in tensors),
        "disk_bytes": plan.disk_bytes(),
        **plan.sizes(_resident_bytes(plan.loaded)),
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
