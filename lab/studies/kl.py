"""Measure KL divergence from the uncompressed model on a few windows, for studies that change a method's plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvq_cli import attach
from kvq_cli.artifact import Artifact
from kvq_cli.cache_argument import cache_argument
from kvq_cli.data.texts import load_text, token_windows
from kvq_cli.methods.base import Method
from kvq_cli.models import LoadedModel


class Windows:
    """Hold a window of each text's evaluation split, `[tokens]` int64, and the uncompressed model's predictions."""

    def __init__(self, loaded: LoadedModel, texts: Sequence[str], tokens: int) -> None:
        self._loaded = loaded
        self.windows = [
            token_windows(loaded.tokenizer, load_text(name, "evaluation"), tokens, 1, seed=0)[0] for name in texts
        ]
        with torch.inference_mode():
            self._exact = [_scored(loaded.model(window[None]).logits) for window in self.windows]

    def kl(self, method: Method | Artifact) -> float:
        """Return the mean KL in nats per token over the second halves of the windows."""
        divergences = []
        with attach(self._loaded.model, method, prefill="compressed") as attached, torch.inference_mode():
            for window, before in zip(self.windows, self._exact, strict=True):
                after = _scored(self._loaded.model(window[None], **cache_argument(attached.new_cache())).logits)
                divergences.append((before.exp() * (before - after)).sum(-1).mean().item())
        return sum(divergences) / len(divergences)


def _scored(logits: Tensor) -> Tensor:
    """Return the log probabilities of the second half of a window."""
    return logits[0, logits.shape[1] // 2 :].log_softmax(-1)
