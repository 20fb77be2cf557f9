"""KL divergence of a mixed configuration from the uncompressed model on held-out text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvq_cli.artifact import Artifact
from kvq_cli.attention.attach import attach
from kvq_cli.data.texts import evaluation_windows
from kvq_cli.evaluation.divergence import divergence
from kvq_cli.evaluation.scoring import continuation_logits
from kvq_cli.models import LoadedModel

#: Share of a window that is its prompt, as in `kvq eval --task perplexity`.
_PROMPT = 2


class Meter:
    """Measures configurations on the same windows, whose uncompressed logits are kept.

    windows: token ids `[windows, seqlen]`; the second half of each is scored.
    """

    def __init__(self, loaded: LoadedModel, windows: Tensor) -> None:
        self._loaded, self._windows = loaded, windows
        self._references: dict[int, Tensor] = {}

    @torch.inference_mode()
    def __call__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[float, float]:
        """(KL in nats per token, packed bits per number) of an artifact's config and tensors."""
        total, tokens = 0.0, 0
        length = self._windows.shape[1]
        prompt = length // _PROMPT
        artifact = Artifact(config, tensors, Path())
        with attach(self._loaded.model, artifact, prefill="compressed") as attached:
            for index, ids in enumerate(self._windows):
                if index not in self._references:
                    inputs = ids.unsqueeze(0).to(self._loaded.model.device)
                    keep = length - prompt + 1
                    self._references[index] = self._loaded.model(inputs, use_cache=False, logits_to_keep=keep).logits[0]
                parts = [part.tolist() for part in ids.tensor_split([prompt])]
                [logits], report = continuation_logits(attached, [parts[0]], [parts[1]])
                sums = divergence(self._references[index], logits, ids[prompt - 1 :])
                total, tokens = total + sums.kl, tokens + sums.tokens
        return total / tokens, report.packed_bits


def held_out_windows(loaded: LoadedModel, names: tuple[str, ...], seqlen: int, count: int, seed: int) -> Tensor:
    """`count` windows of each text's evaluation split, drawn at random: int64 `[texts * count, seqlen]`."""
    drawn = []
    for name in names:
        windows = evaluation_windows(loaded.tokenizer, name, seqlen, seed)
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
        drawn.append(windows[order[:count]])
    return torch.cat(drawn)
