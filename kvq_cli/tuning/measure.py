"""KL divergence of a mixed configuration from the uncompressed model on held-out text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvq_cli.artifact import Artifact
from kvq_cli.attention.attach import attach
from kvq_cli.data.texts import evaluation_windows
from kvq_cli.errors import NotFiniteError, UsageError
from kvq_cli.evaluation.perplexity import PerplexityEvaluation
from kvq_cli.models import LoadedModel

#: Share of a window that is its prompt, as in `kvq eval --task perplexity`.
_PROMPT = 2


class Meter:
    """Measures configurations on the same windows, whose uncompressed logits are kept on the CPU: they can be
    gigabytes, and `divergence` moves a part at a time.

    windows: token ids `[windows, seqlen]`; the second half of each is scored. digest: the sha256 of these ids.
    """

    def __init__(self, loaded: LoadedModel, windows: Tensor) -> None:
        length = windows.shape[1]
        self._loaded = loaded
        self._evaluation = PerplexityEvaluation(windows, "held-out", None, length // _PROMPT, "compressed")
        self._references: dict[int, Tensor] = {}
        self.digest: str = self._evaluation.config["windows_sha256"]

    def __call__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[float, float]:
        """(KL in nats per token, packed bits per number) of an artifact's config and tensors. NotFiniteError for a KL
        that is none."""
        records = []
        with attach(self._loaded.model, Artifact(config, tensors, Path()), prefill="compressed") as attached:
            for index in range(self._evaluation.count):
                if index not in self._references:
                    self._references[index] = self._evaluation.reference_logits(self._loaded, index).cpu()
                records.append(self._evaluation.record(self._loaded, attached, index, self._references[index]))
        kl = sum(record["kl"] for record in records) / sum(record["tokens"] for record in records)
        if not math.isfinite(kl):
            method = config["method"]
            raise NotFiniteError(
                f"the KL of keys={method['keys']!r} values={method['values']!r} is {kl}: the model leaves the range of "
                "its dtype: choose another --dtype, or other --candidates"
            )
        return kl, records[-1]["cache"]["packed_bits"]


def held_out_windows(loaded: LoadedModel, names: tuple[str, ...], seqlen: int, count: int, seed: int) -> Tensor:
    """`count` windows of each text's evaluation split, drawn at random: int64 `[texts * count, seqlen]`. UsageError for
    a text that has fewer."""
    drawn = []
    for name in names:
        windows = evaluation_windows(loaded.tokenizer, name, seqlen, seed)
        if len(windows) < count:
            raise UsageError(
                f"--text-samples {count}: {name} has {len(windows)} of {seqlen} tokens: ask for at most "
                f"{len(windows)}, or lower --text-seqlen"
            )
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
        drawn.append(windows[order[:count]])
    return torch.cat(drawn)
