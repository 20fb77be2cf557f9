"""Divergence by position where the model reads its own words: errors of a cache add up over a long answer.

The uncompressed model continues each prompt twice, by sampling at temperature 1 and greedily. Every method decodes the
sampled tokens: KL and top-1 agreement of each part of the answer say whether it drifts away from the uncompressed
model. The greedy answer, decoded likewise, gives the number of tokens after which the method's own greedy answer leaves
it: up to there both are the same text, so that no token needs to be generated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvq_cli.data.texts import continued, never_drawn
from kvq_cli.evaluation.base import DRIFT, Evaluation, Record, Work, cache_record, mean_and_stderr, named_failure
from kvq_cli.evaluation.divergence import divergence, rows_per_chunk
from kvq_cli.evaluation.scoring import continuation_logits
from kvq_cli.models import check_token_ids

if TYPE_CHECKING:
    from kvq_cli.attention.attach import Attached
    from kvq_cli.models import LoadedModel

#: Parts of an answer: 256 tokens each of 2,048.
PARTS = 8


class DriftEvaluation(Evaluation):
    """KL(p_fp16 || p_method) in nats per token and top-1 agreement by part of the answer, and greedy agreement.

    prompts: token ids `[prompts, tokens]`; tokens: length of each answer, PARTS at least; seed:
    of the samples, with the prompt's number; prefill: of `attach`, for the prompts. EOS is never drawn.
    """

    task = DRIFT
    higher_is_better: Mapping[str, bool] = {"agreement": True} | {
        f"{name}{part}": name == "top1"
        for name in ("kl", "top1")
        for part in ("", *(f"_{n + 1}" for n in range(PARTS)))
    }

    def __init__(self, prompts: Tensor, dataset: str, tokens: int, prefill: str, seed: int) -> None:
        self._prompts, self._tokens, self._seed = prompts, tokens, seed
        self.length = prompts.shape[1] + tokens
        self.available = self.count = len(prompts)
        self.work = Work(prompt=prompts.shape[1] + 2 * tokens, scored=tokens)
        self._answers: tuple[int, Tensor, Tensor, Tensor] | None = None  # the newest prompt, its answers, logits
        self.config = {
            "task": DRIFT,
            "dataset": dataset,
            "prompt_tokens": prompts.shape[1],
            "answer_tokens": tokens,
            "seed": seed,
            "prefill": prefill,
            "prompts_sha256": sha256(prompts.numpy().tobytes()).hexdigest(),
        }

    def run(
        self, loaded: LoadedModel, attached: Mapping[str, Attached], pending: Mapping[str, Sequence[int]]
    ) -> Iterator[tuple[str, list[Record]]]:
        for index in sorted(set().union(*pending.values())):
            if self._answers is None or self._answers[0] != index:
                self._answers = None  # before the next is computed
                self._answers = index, *self._continued(loaded, index)
            _, sampled, greedy, reference = self._answers
            for label in (label for label, indices in pending.items() if index in indices):
                with named_failure(label):
                    record = self._record(attached[label], index, sampled, greedy, reference)
                yield label, [record]

    def forget(self) -> None:
        self._answers = None

    def metrics(self, records: Sequence[Record]) -> dict[str, float | None]:
        values: dict[str, list[float]] = {}
        for name, key in (("kl", "kl"), ("top1", "agreeing")):
            values[name] = [sum(part[key] for part in one["parts"]) / self._tokens for one in records]
            for number in range(PARTS):
                parts = [one["parts"][number] for one in records]
                values[f"{name}_{number + 1}"] = [part[key] / part["tokens"] for part in parts]
        values["agreement"] = [one["agreement"] for one in records]
        found: dict[str, float | None] = {}
        for name, each in values.items():
            found[f"{name},none"], found[f"{name}_stderr,none"] = mean_and_stderr(each)
        return found

    @torch.inference_mode()
    def _continued(self, loaded: LoadedModel, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return prompt `index` with its sampled and its greedy answer, `[tokens]` each, and the uncompressed
        model's logits `[answer tokens + 1, vocabulary]` of the sampled one, from the prompt's last token on."""
        check_token_ids(loaded.model, self._prompts[index : index + 1].tolist())
        draw = torch.Generator().manual_seed(self._seed * 1_000_003 + index)
        prompt = self._prompts[index]

        def next_tokens(logits: Tensor) -> Tensor:
            drawn = torch.multinomial(logits[:1].softmax(-1), 1, generator=draw)
            return torch.cat([drawn, logits[1:].argmax(-1, keepdim=True)])

        both = continued(loaded.model, prompt.expand(2, -1), self.length, next_tokens)
        ids = both[:1].to(loaded.model.device)
        logits = loaded.model(ids, use_cache=False, logits_to_keep=self._tokens + 1).logits[0]
        return both[0], both[1], logits

    @torch.inference_mode()
    def _record(self, attached: Attached, index: int, sampled: Tensor, greedy: Tensor, reference: Tensor) -> Record:
        """Return the record of prompt `index` under a method."""
        behind = len(sampled) - self._tokens
        [logits], report = continuation_logits(attached, [sampled[:behind].tolist()], [sampled[behind:].tolist()])
        parts: list[dict[str, Any]] = []
        for number in range(PARTS):
            first, end = (self._tokens * (number + step) // PARTS for step in (0, 1))
            ids = sampled[behind - 1 + first : behind + end]
            parts.append(asdict(divergence(reference[first:end], logits[first:end], ids)))
        del logits
        [logits], _ = continuation_logits(attached, [greedy[:behind].tolist()], [greedy[behind:].tolist()])
        return {
            "index": index,
            "parts": parts,
            "agreement": _agreement(logits, greedy[behind:], never_drawn(attached.model)),
            "answer_sha256": sha256(sampled.numpy().tobytes()).hexdigest(),
            "cache": cache_record(report, 1),
        }


def _agreement(logits: Tensor, answer: Tensor, ends: list[int]) -> int:
    """Count the tokens of the greedy `answer` `[tokens]` before the first that `logits` `[tokens, vocabulary]` do
    not choose, without those of `ends`."""
    rows = rows_per_chunk(logits)
    for start in range(0, len(answer), rows):
        chunk = logits[start : start + rows].float()
        chunk[:, ends] = -torch.inf
        differ = (chunk.argmax(-1).cpu() != answer[start : start + rows]).nonzero()
        if len(differ):
            return start + int(differ[0])
    return len(answer)
