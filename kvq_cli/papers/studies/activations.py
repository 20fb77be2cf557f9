"""Capture keys and values of windows of text to disk, to read them layer by layer in bounded memory.

with captured(data.loaded, data.windows, progress) as activations:
    for layer in activations.layers:
        keys = activations.x(layer, "k")
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from kvq_cli.attention.capture_points import AttentionLayer, attention_layers
from kvq_cli.calibration.capture import capture
from kvq_cli.calibration.parallel import deterministic, run_parallel
from kvq_cli.calibration.samples import capturing
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.models import LoadedModel
from kvq_cli.papers.studies.study import Progress

T = TypeVar("T")

#: The two streams of a layer and their names in results.
STREAMS = {"k": "keys", "v": "values"}


class Store:
    """Tensors by name in a folder: append window by window, then read all windows stacked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kinds: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._counts: dict[str, int] = {}

    def append(self, name: str, numbers: Tensor) -> None:
        """Append a window's tensor of the same shape and dtype as the others of that name. KvqError on a full disk."""
        numbers = numbers.detach().contiguous().cpu()
        kind = self._kinds.setdefault(name, (numbers.shape, numbers.dtype))
        if kind != (numbers.shape, numbers.dtype):
            raise ValueError(f"{name}: {tuple(numbers.shape)} {numbers.dtype} after {kind}")
        try:
            with open(self._folder / name, "ab") as file:
                file.write(numbers.view(-1).view(torch.uint8).numpy().data)
        except OSError as error:
            raise KvqError(
                f"cannot write captured numbers to {self._folder} ({error.strerror}): set TMPDIR to a folder with more "
                f"room, or take fewer --samples"
            ) from error
        self._counts[name] = self._counts.get(name, 0) + 1

    def read(self, name: str) -> Tensor:
        """Return all windows `[windows, ...]` on the CPU, as a private memory map."""
        window_shape, dtype = self._kinds[name]
        shape = torch.Size((self._counts[name], *window_shape))
        return torch.from_file(str(self._folder / name), shared=False, size=shape.numel(), dtype=dtype).view(shape)


@contextmanager
def temporary_store() -> Iterator[Store]:
    """A `Store` in a temporary folder (below TMPDIR), deleted when the block ends."""
    with tempfile.TemporaryDirectory(prefix="kvq-") as folder:
        yield Store(Path(folder))


@dataclass(frozen=True)
class Activations:
    """Captured keys (before RoPE) and values of `layers`. sites: the model's attention modules, in layer order.

    Layers are counted among those with a cache, which are all of most models.
    """

    loaded: LoadedModel
    sites: list[AttentionLayer]
    layers: list[int]
    store: Store

    def x(self, layer: int, kind: str) -> Tensor:
        """Return keys before RoPE (kind "k") or values ("v"), `[windows, tokens, kv_heads, head_dim]`, in the model's
        dtype on its device."""
        return self.store.read(f"{layer}.{kind}.x").to(self.loaded.model.device)

    def g(self, layer: int, kind: str) -> Tensor:
        """Return the gradients of the loss with respect to `x(layer, kind)`; needs `gradients=True`."""
        return self.store.read(f"{layer}.{kind}.g").to(self.loaded.model.device)


@contextmanager
def captured(
    loaded: LoadedModel,
    windows: Tensor,
    progress: Progress,
    *,
    layers: Iterable[int] | None = None,
    gradients: bool = False,
    skip: int = 0,
) -> Iterator[Activations]:
    """Capture keys and values of `windows` `[windows, tokens]`, one window at a time; they are deleted with the block.

    layers: the layers to capture, None for all. gradients: capture the gradients of the loss, too. skip: how many first
    tokens of each window (attention sinks) to leave out; UsageError if no token is left.
    """
    if not 0 <= skip < windows.shape[1]:
        raise UsageError(f"skip={skip} must be at least 0 and below --seqlen {windows.shape[1]}")
    sites = attention_layers(loaded.model)
    places = {site.index: place for place, site in enumerate(sites)}
    chosen = list(range(len(sites))) if layers is None else list(layers)
    with temporary_store() as store:

        def sink(layer: int, kind: str, quantity: str, numbers: Tensor) -> None:
            if places[layer] in chosen:
                store.append(f"{places[layer]}.{kind}.{quantity}", numbers[skip:])

        with capturing(loaded, sites, windows.shape[1]) if gradients else nullcontext():
            for index, tokens in enumerate(windows):
                progress("capture", index, len(windows))
                capture(loaded.model, sites, tokens, sink, gradients=gradients)
        progress("capture", len(windows), len(windows))
        yield Activations(loaded, sites, chosen, store)


def spread(layers: int, count: int) -> list[int]:
    """Return `count` layer indices, evenly spaced from first to last; all indices if there are at most `count`."""
    if count >= layers:
        return list(range(layers))
    if count == 1:
        return [layers // 2]
    return [round(index * (layers - 1) / (count - 1)) for index in range(count)]


def clustered(measure: Callable[[T], None], jobs: Sequence[T], device: torch.device, progress: Progress) -> None:
    """Run `measure` on all jobs (k-means, mostly), in parallel on a CPU."""
    progress("cluster", 0, len(jobs))
    workers = torch.get_num_threads() if device.type == "cpu" else 1
    with deterministic(device):
        for done, _ in enumerate(run_parallel(measure, jobs, workers), start=1):
            progress("cluster", done, len(jobs))
