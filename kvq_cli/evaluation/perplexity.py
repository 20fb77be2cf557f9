"""Perplexity of the tokens after a prompt, and KL divergence from the uncompressed model on the same tokens.

The text is cut into non-overlapping windows, as in GPTQ. The first tokens of each window are the prompt, to which
methods fit their state. The tokens after it are scored as in token-by-token decoding: every prediction reads the
compressed cache, and no state depends on scored tokens.

    perplexity = exp( sum of -ln q(x_t | x_<t) / number of scored tokens )
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from math import exp
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvq_cli.attention.shared_prompts import SharedPrompts
from kvq_cli.evaluation.base import PERPLEXITY, Evaluation, Record, Work, cache_record, mean_and_stderr, named_failure
from kvq_cli.evaluation.divergence import divergence
from kvq_cli.evaluation.scoring import continuation_logits
from kvq_cli.models import check_token_ids

if TYPE_CHECKING:
    from kvq_cli.attention.attach import Attached
    from kvq_cli.models import LoadedModel


#: Methods of a unit.
_METHODS = 4


class PerplexityEvaluation(Evaluation):
    """Perplexity, KL(p_fp16 || p_method) in nats per token, and top-1 agreement with the uncompressed model.

    windows: token ids `[windows, seqlen]`; limit: number of windows to evaluate (None: all); prompt_tokens: length of
    each window's prompt, 1 to seqlen - 1; prefill: of `attach`, for the prompts; text: the dataset's name where several
    are scored, whose mean is reported as `perplexity`; unscored: a token that is no prediction's target, but in windows
    that have no other to score.
    """

    version = 2

    def __init__(
        self,
        windows: Tensor,
        dataset: str,
        limit: int | None,
        prompt_tokens: int,
        prefill: str,
        text: str | None = None,
        unscored: int | None = None,
    ) -> None:
        self.task = f"{PERPLEXITY}_{text}" if text else PERPLEXITY
        self.groups = {PERPLEXITY: False} if text else {}
        self._windows = windows if limit is None else windows[:limit]
        self.length = windows.shape[1]
        self.available = len(windows)
        self._prompt_tokens = prompt_tokens
        self.count = len(self._windows)
        self.work = Work(prompt=self.length, scored=self.length - prompt_tokens)
        # Small units keep all workers busy where windows are few, and lose little when a run is interrupted.
        self.methods_at_once = None if prefill == "exact" else _METHODS
        self._reference: tuple[int, Tensor] | None = None  # the newest window, and its logits
        self.config = {
            "task": PERPLEXITY,
            "dataset": dataset,
            "seqlen": self.length,
            "prompt_tokens": prompt_tokens,
            "prefill": prefill,
            "windows_sha256": sha256(windows.numpy().tobytes()).hexdigest(),
        }
        self._unscored = unscored
        if unscored is not None and bool((windows[:, prompt_tokens:] == unscored).any()):
            self.config["unscored_token"] = unscored  # only then: samples of all other texts keep their keys

    def run(
        self, loaded: LoadedModel, attached: Mapping[str, Attached], pending: Mapping[str, Sequence[int]]
    ) -> Iterator[tuple[str, list[Record]]]:
        # All methods on one window before the next: the uncompressed model runs once per window, and only one window's
        # logits are in memory, until `forget`.
        for index in sorted(set().union(*pending.values())):
            if self._reference is None or self._reference[0] != index:
                self._reference = None  # before the next is computed
                self._reference = index, self.reference_logits(loaded, index)
            reference = self._reference[1]
            labels = [label for label, indices in pending.items() if index in indices]
            prompts = SharedPrompts([attached[label] for label in labels])
            for label in labels:
                with prompts.used_by(attached[label]), named_failure(label):
                    record = self.record(loaded, attached[label], index, reference)
                yield label, [record]

    def forget(self) -> None:
        self._reference = None

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
    def reference_logits(self, loaded: LoadedModel, index: int) -> Tensor:
        """Logits `[scored tokens + 1, vocabulary]` of the uncompressed model, from the prompt's last token on."""
        check_token_ids(loaded.model, self._windows[index : index + 1].tolist())
        ids = self._windows[index : index + 1].to(loaded.model.device)
        return loaded.model(ids, use_cache=False, logits_to_keep=self.length - self._prompt_tokens + 1).logits[0]

    @torch.inference_mode()
    def record(self, loaded: LoadedModel, attached: Attached, index: int, reference: Tensor) -> Record:
        """The record of window `index` under a method; reference: its `reference_logits`."""
        ids = self._windows[index]
        context, continuation = (part.tolist() for part in ids.tensor_split([self._prompt_tokens]))
        [logits], report = continuation_logits(attached, [context], [continuation])
        unscored = None if all(token == self._unscored for token in continuation) else self._unscored
        sums = divergence(reference, logits, ids[self._prompt_tokens - 1 :], unscored)
        return {"index": index, **asdict(sums), "cache": cache_record(report, 1)}
