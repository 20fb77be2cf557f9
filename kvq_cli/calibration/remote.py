"""The steps of a calibration on workers: they send numbers back, and write no files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvq_cli.attention.capture_points import AttentionLayer, attention_layers
from kvq_cli.calibration.captured import CapturedStream
from kvq_cli.calibration.parallel import deterministic
from kvq_cli.calibration.samples import SampleCapture, capturing
from kvq_cli.distributed import Workers
from kvq_cli.model_source import ModelSource
from kvq_cli.models import LoadedModel

#: Captured numbers of a sample: layer, "k" or "v", "x" or "g", and bfloat16 `[tokens, kv_heads, head_dim]` on the CPU.
Numbers = list[tuple[int, str, str, Tensor]]


@lru_cache(maxsize=1)
def _load(source: ModelSource) -> tuple[LoadedModel, list[AttentionLayer]]:
    """The model and its layers, loaded once per worker."""
    loaded = source.load()
    return loaded, attention_layers(loaded.model)


def capture_on(
    workers: Workers, loaded: LoadedModel, capture: SampleCapture, samples: Iterable[int]
) -> Iterator[tuple[int, Numbers]]:
    """Capture samples; yields `(sample, numbers)` in their order, after Ctrl-C those that are finished, with gaps."""
    yield from workers.run(_capture, (ModelSource.of(loaded), capture), samples)


def _capture(shared: tuple[ModelSource, SampleCapture], sample: int) -> Iterator[Numbers]:
    """Runs in a worker."""
    source, capture = shared
    torch.set_num_threads(1)  # as in `parallel.run_parallel`
    loaded, layers = _load(source)
    numbers: Numbers = []
    with deterministic(loaded.model.device), capturing(loaded, layers, capture.windows.shape[1], capture.near):
        capture.run(loaded, layers, sample, lambda *captured: numbers.append(captured))
    yield numbers


#: Name of a stream, function of what was captured of it, and these activations on the CPU. Functions are pickled.
StreamTask = tuple[Any, Callable[[CapturedStream], Any], CapturedStream]


def apply_on(workers: Workers, device: torch.device, tasks: Iterable[StreamTask]) -> Iterator[tuple[Any, Any]]:
    """Apply functions to captured streams; yields `(name, result)` in order, after Ctrl-C of those that are finished.

    A task is taken when a worker needs one.
    """
    for (name, _, _), result in workers.run(_apply, device.type, tasks):
        yield name, result


def _apply(device: str, task: StreamTask) -> Iterator[Any]:
    """Runs in a worker."""
    torch.set_num_threads(1)  # as in `parallel.run_parallel`
    _, function, captured = task
    with deterministic(torch.device(device)):
        result = function(captured.to(torch.device(device)))
    yield result
