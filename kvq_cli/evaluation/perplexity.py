"""Perplexity as GPTQ measures it, and KL divergence from the uncompressed model on the same tokens.

The text is cut into non-overlapping windows. Each is one forward pass in which every token attends to the compressed
cache, as in token-by-token decoding (`prefill="compressed"`); an exact prefill would not read the compressed cache.

    perplexity = exp( sum of -ln q(x_t | x_<t) / number of predicted tokens )
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from math import exp
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvq_cli.evaluation.base import Evaluation, Record, cache_record, mean_and_stderr
from kvq_cli.evaluation.divergence import divergence

if TYPE_CHECKING:
    from kvq_cli.attention.attach import Attached
    from kvq_cli.models import LoadedModel


class PerplexityEvaluation(Evaluation):
    """Perplexity, KL(p_fp16 || p_method) in nats per token, and top-1 agreement with the uncompressed model.

    windows: token ids `[windows, seqlen]`; limit: number of windows to evaluate (None: all).
    """

    task = "perplexity"

    def __init__(self, windows: Tensor, dataset: str, limit: int | None) -> None:
        self._windows = windows if limit is None else windows[:limit]
        self.length = windows.shape[1]
        self.available = len(windows)
        self.count = len(self._windows)
        self.config = {
            "task": self.task,
            "dataset": dataset,
            "seqlen": self.length,
            "prefill": "compressed",
            "windows_sha256": sha256(windows.numpy().tobytes()).hexdigest(),
        }

    def run(
        self, loaded: LoadedModel, attached: Mapping[str, Attached], pending: Mapping[str, Sequence[int]]
    ) -> Iterator[tuple[str, list[Record]]]:
        # All methods on one window before the next: the uncompressed model runs once per window, and only one window's
        # logits are in memory.
        for index in sorted(set().union(*pending.values())):
            reference = self._reference_logits(loaded, index)
            for label, indices in pending.items():
                if index in indices:
                    yield label, [self._record(loaded, attached[label], index, reference)]

    def metrics(self, records: Sequence[Record]) -> dict[str, float | None]:
        tokens = sum(record["tokens"] for record in records)
        loss, loss_error = mean_and_stderr([record["nll"] / record["tokens"] for record in records])
        kl, kl_error = mean_and_stderr([record["kl"] / record["tokens"] for record in records])
        top1, top1_error = mean_and_stderr([record["agreeing"] / record["tokens"] for record in records])
        perplexity = exp(loss)
        return {
            "perplexity,none": perplexity,
            # d exp(loss) = exp(loss) d loss
            "perplexity_stderr,none": None if loss_error is None else perplexity * loss_error,
            "perplexity_uncompressed,none": exp(sum(record["nll_reference"] for record in records) / tokens),
            "kl,none": kl,
            "kl_stderr,none": kl_error,
            "top1,none": top1,
            "top1_stderr,none": top1_error,
        }

    @torch.inference_mode()
    def _reference_logits(self, loaded: LoadedModel, index: int) -> Tensor:
        """Logits `[seqlen, vocabulary]` of the uncompressed model."""
        ids = self._windows[index : index + 1].to(loaded.model.device)
        return loaded.model(ids, use_cache=False).logits[0]

    @torch.inference_mode()
    def _record(self, loaded: LoadedModel, attached: Attached, index: int, reference: Tensor) -> Record:
        ids = self._windows[index : index + 1].to(loaded.model.device)
        cache = attached.new_cache()
        logits = loaded.model(ids, past_key_values=cache, use_cache=True).logits[0]
        sums = divergence(reference, logits, ids[0])
        return {"index": index, **asdict(sums), "cache": cache_record(attached.report(cache), 1)}
