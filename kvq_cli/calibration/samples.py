"""Capture samples, each by itself: which tokens are kept, and in which form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kvq_cli.attention.capture_points import AttentionLayer
from kvq_cli.calibration import capture, estimate
from kvq_cli.calibration.settings import CaptureSize
from kvq_cli.models import LoadedModel


@dataclass(frozen=True)
class SampleCapture:
    """What is captured. windows: int64 `[samples, seqlen]`; gradients: of so many first samples; seed: draws the tokens
    that are kept; near: see `capture.capture`."""

    windows: Tensor
    size: CaptureSize
    gradients: int
    seed: int
    near: int

    def tokens(self, sample: int) -> Tensor:
        """Indices of a sample's captured tokens: all after the sinks, or as many random units as the budget allows."""
        size = self.size
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + sample)
        units = torch.randperm(size.possible, generator=generator)[: size.units].sort().values
        return (size.skip + units[:, None] * size.unit + torch.arange(size.unit)).flatten()

    def run(
        self,
        loaded: LoadedModel,
        layers: Sequence[AttentionLayer],
        sample: int,
        write: Callable[[int, str, str, Tensor], None],
        *,
        threads: bool = False,
    ) -> None:
        """Run a sample through the model inside `capturing`, calling `write` as `capture.capture` does, but with the
        captured tokens alone, bfloat16 on the CPU. threads: as for `capture.capture`."""
        tokens = self.tokens(sample)

        def select(layer: int, kind: str, quantity: str, numbers: Tensor) -> None:
            numbers = numbers[tokens.to(numbers.device)].to("cpu", torch.bfloat16).contiguous()
            write(layer, kind, quantity, numbers)

        gradients = sample < self.gradients
        capture.capture(
            loaded.model, layers, self.windows[sample], select, gradients=gradients, near=self.near, threads=threads
        )


@contextmanager
def capturing(loaded: LoadedModel, layers: Sequence[AttentionLayer], tokens: int, near: int = 0) -> Iterator[None]:
    """Inside the block, the model runs as captures of so many tokens need it: in little memory, with blocked attention
    on a CPU, or where some gradients are left out (`near`, see `capture.capture`)."""
    count = estimate.checkpointed_layers(loaded, tokens)
    blocked = capture.blocked_attention_on_cpu(loaded.model, layers, always=near > 0)
    with capture.gradient_checkpointing(loaded.model, count), blocked:
        yield
