"""Perplexity as GPTQ measures it, with the divergence from the uncompressed model on the same tokens.

The text is cut into windows that do not overlap; each is one forward pass, in which attention sees what a decode token
by token would see (`prefill="compressed"`): an exact pass would measure nothing.

    perplexity = exp( sum of -ln q(x_t | x_<t) / number of predicted tokens )
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from math import exp
from typing import TYPE_CHECKING

import torch
from torch import LongTensor, Tensor

from kvq_cli.evaluation.base import Evaluation, Record, cache_record, mean_and_error
from kvq_cli.evaluation.divergence import divergence

if TYPE_CHECKING:
    from kvq_cli.attention.attach import Attached
    from kvq_cli.models import LoadedModel


class PerplexityEvaluation(Evaluation):
    """Perplexity, KL(p_fp16 || p_method) per token in nats, and how often both have the same most probable token."""

    task = "perplexity"

    def __init__(self, windows: LongTensor, dataset: str, limit: int | None) -> None:
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
        # Window by window, so that the uncompressed model runs once for all methods and one window's logits are kept.
        for index in sorted(set().union(*pending.values())):
            reference = self._logits(loaded, index)
            for label, indices in pending.items():
                if index in indices:
                    yield label, [self._window(loaded, attached[label], index, reference)]

    def metrics(self, records: Sequence[Record]) -> dict[str, float | None]:
        tokens = sum(record["tokens"] for record in records)
        loss, loss_error = mean_and_error([record["nll"] / record["tokens"] for record in records])
        kl, kl_error = mean_and_error([record["kl"] / record["tokens"] for record in records])
        top1, top1_error = mean_and_error([record["agreeing"] / record["tokens"] for record in records])
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
    def _logits(self, loaded: LoadedModel, index: int) -> Tensor:
        ids = self._windows[index : index + 1].to(loaded.model.device)
        return loaded.model(ids, use_cache=False).logits[0]

    @torch.inference_mode()
    def _window(self, loaded: LoadedModel, attached: Attached, index: int, reference: Tensor) -> Record:
        ids = self._windows[index : index + 1].to(loaded.model.device)
        cache = attached.new_cache()
        logits = loaded.model(ids, past_key_values=cache, use_cache=True).logits[0]
        found = divergence(reference, logits, ids[0])
        return {"index": index, **asdict(found), "cache": cache_record(attached.report(cache), 1)}
