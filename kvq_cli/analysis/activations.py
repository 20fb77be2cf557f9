"""What studies look at: the keys and values of a model over windows of text, layer by layer, in bounded memory.

with captured(subject.loaded, subject.windows, show) as activations:
    for layer in activations.layers:
        keys = activations.x(layer, "k")
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from kvq_cli.analysis.study import Show
from kvq_cli.attention.capture_points import AttentionLayer, attention_layers
from kvq_cli.calibration import forecast
from kvq_cli.calibration.capture import capture, checkpointing
from kvq_cli.calibration.parallel import repeatable, side_by_side
from kvq_cli.calibration.settings import Settings
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.models import LoadedModel

T = TypeVar("T")

#: The two streams of a layer, and what they are called.
STREAMS = {"k": "keys", "v": "values"}


class Store:
    """Numbers by name, kept in a temporary folder: appended window by window, read back together."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kinds: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._counts: dict[str, int] = {}

    def append(self, name: str, numbers: Tensor) -> None:
        """Add one window's numbers; all of a name have the same shape and dtype. KvqError where the disk is full."""
        numbers = numbers.detach().contiguous().cpu()
        kind = self._kinds.setdefault(name, (numbers.shape, numbers.dtype))
        if kind != (numbers.shape, numbers.dtype):
            raise ValueError(f"{name}: {tuple(numbers.shape)} {numbers.dtype} after {kind}")
        try:
            with open(self._folder / name, "ab") as file:
                file.write(numbers.view(-1).view(torch.uint8).numpy())
        except OSError as error:
            raise KvqError(
                f"cannot keep captured numbers in {self._folder} ({error.strerror}): set TMPDIR to a folder with more "
                f"room, or take fewer --samples"
            ) from error
        self._counts[name] = self._counts.get(name, 0) + 1

    def read(self, name: str) -> Tensor:
        """`[windows, ...]` on the CPU: a private map of the file, whose pages are read where they are used."""
        shape, dtype = self._kinds[name]
        shape = (self._counts[name], *shape)
        size = torch.Size(shape).numel()
        return torch.from_file(str(self._folder / name), shared=False, size=size, dtype=dtype).view(shape)


@contextmanager
def temporary_store() -> Iterator[Store]:
    """A `Store` that is gone afterwards; where TMPDIR says."""
    with tempfile.TemporaryDirectory(prefix="kvq-") as folder:
        yield Store(Path(folder))


@dataclass(frozen=True)
class Activations:
    """Keys before RoPE and values of the `layers` of a model. sites: all attention sites, in layer order."""

    loaded: LoadedModel
    sites: list[AttentionLayer]
    layers: list[int]
    store: Store

    def x(self, layer: int, kind: str) -> Tensor:
        """Keys before RoPE ("k") or values ("v"), `[windows, tokens, kv_heads, head_dim]` in the model's dtype, on its
        device."""
        return self.store.read(f"{layer}.{kind}.x").to(self.loaded.model.device)

    def g(self, layer: int, kind: str) -> Tensor:
        """The loss's gradients to them, shaped and typed alike; where they were captured."""
        return self.store.read(f"{layer}.{kind}.g").to(self.loaded.model.device)


@contextmanager
def captured(
    loaded: LoadedModel,
    windows: Tensor,
    show: Show,
    *,
    layers: Iterable[int] | None = None,
    gradients: bool = False,
    skip: int = 0,
) -> Iterator[Activations]:
    """Run `windows` `[windows, tokens]` through the model, one at a time, and keep what they give on disk meanwhile.

    layers: which ones to keep; all where None. gradients: also of the loss. skip: first tokens of a window to leave
    out: attention sinks. UsageError where that is not less than all.
    """
    if not 0 <= skip < windows.shape[1]:
        raise UsageError(f"skip={skip} must be at least 0 and below --seqlen {windows.shape[1]}")
    sites = attention_layers(loaded.model)
    chosen = list(range(len(sites))) if layers is None else list(layers)
    with temporary_store() as store:

        def sink(layer: int, kind: str, what: str, numbers: Tensor) -> None:
            if layer in chosen:
                store.append(f"{layer}.{kind}.{what}", numbers[skip:])

        settings = Settings(seqlen=windows.shape[1])
        with checkpointing(loaded.model, gradients and forecast.needs_checkpointing(loaded, settings)):
            for done, tokens in enumerate(windows):
                show("capture", done, len(windows))
                capture(loaded.model, sites, tokens, sink, gradients=gradients)
        show("capture", len(windows), len(windows))
        yield Activations(loaded, sites, chosen, store)


def spread(layers: int, count: int) -> list[int]:
    """`count` of the numbers 0 ... layers - 1, evenly from the first to the last; all where there are no more."""
    if count >= layers:
        return list(range(layers))
    if count == 1:
        return [layers // 2]
    return [round(index * (layers - 1) / (count - 1)) for index in range(count)]


def clustered(measure: Callable[[T], None], jobs: Sequence[T], device: torch.device, show: Show) -> None:
    """Run `measure` on all jobs, as many side by side as there are cores."""
    show("cluster", 0, len(jobs))
    workers = torch.get_num_threads() if device.type == "cpu" else 1
    with repeatable(device):
        for done, _ in enumerate(side_by_side(measure, jobs, workers), start=1):
            show("cluster", done, len(jobs))
