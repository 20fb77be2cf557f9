"""RULER as an evaluation: greedy answers, scored by string match."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvq_cli.attention.shared_prompts import SharedPrompts
from kvq_cli.evaluation.base import (
    Evaluation,
    Record,
    Work,
    cache_record,
    default_batch_size,
    mean_and_stderr,
    named_failure,
)
from kvq_cli.evaluation.generation import generate_answers, prompt_key
from kvq_cli.evaluation.ruler.families import Sources
from kvq_cli.evaluation.ruler.samples import RulerSamples
from kvq_cli.evaluation.ruler.scoring import score
from kvq_cli.evaluation.ruler.tasks import RulerTask
from kvq_cli.evaluation.ruler.templates import Templates

if TYPE_CHECKING:
    from kvq_cli.attention.attach import Attached
    from kvq_cli.models import LoadedModel

SAMPLES = 500
"""Samples per task and length in RULER."""
#: Methods of a unit that share the pass over its prompts.
_METHODS = 4


class RulerEvaluation(Evaluation):
    """One RULER task at one context length in tokens. As in lm-eval, the metric is named by the length."""

    def __init__(
        self,
        task: RulerTask,
        context: int,
        loaded: LoadedModel,
        templates: Templates,
        sources: Sources,
        *,
        seed: int,
        limit: int | None,
        prefill: str,
        chat: bool = False,
        batch_size: int | None = None,
        save_prompts: bool = False,
        group: str | None = None,
    ) -> None:
        self.task, self.length, self.groups = task.name, context, {group: False} if group else {}
        self._task = task
        self._samples = RulerSamples(task, context, loaded.tokenizer, templates, sources, seed, chat)
        self._save_prompts = save_prompts
        self.available = self._samples.count
        self.count = min(limit or SAMPLES, self.available or limit or SAMPLES)
        self.batch_size = batch_size or default_batch_size(context)
        self._samples.check(self.count)
        # Small units keep all workers busy where batches are few, and lose little when a run is interrupted.
        self.methods_at_once = _METHODS if prefill == "exact" else 1
        self._prompts: tuple[int, SharedPrompts] | None = None  # the newest batch, and the passes over its prompts
        self.work = Work(prompt=context - task.max_new_tokens, decoded=task.max_new_tokens)
        self.config = {
            "task": task.name,
            "context": context,
            "family": task.family,
            **self._samples.config,
            "tokens_to_generate": task.max_new_tokens,
            "metric": task.metric,
            "templates": templates.name,
            "num_fewshot": int(templates.examples and task.family in ("vt", "cwe")),
            "chat_template": chat,
            "prefill": prefill,
            "seed": seed,
            **_source(task, sources),
        }
        self.required = ("prompt",) if save_prompts else ()
        # Records count the padding of their batch.
        batch = {"batch_size": batch_size} if batch_size else {}
        self.resume_key = prompt_key(loaded, self._samples.first_text, chat) | batch
        if self.batch_size > 1:
            self.resume_key["rows"] = "leave at once"  # records count rows when they leave their batch

    def run(
        self, loaded: LoadedModel, attached: Mapping[str, Attached], pending: Mapping[str, Sequence[int]]
    ) -> Iterator[tuple[str, list[Record]]]:
        for unit in self.units(pending):
            prompts = self._shared_prompts(attached, unit)
            for label, indices in unit.items():
                with prompts.used_by(attached[label]), named_failure(label):
                    records = self._batch(loaded, attached[label], indices)
                yield label, records

    def _shared_prompts(self, attached: Mapping[str, Attached], unit: Mapping[str, Sequence[int]]) -> SharedPrompts:
        """The prompts of a unit, which other units of the same batch read, too, until `forget`."""
        batch = min(index for indices in unit.values() for index in indices) // self.batch_size
        if self._prompts is None or self._prompts[0] != batch:
            self._prompts = batch, SharedPrompts([*attached.values()])
        return self._prompts[1]

    def forget(self) -> None:
        self._prompts = None

    def _batch(self, loaded: LoadedModel, attached: Attached, indices: Sequence[int]) -> list[Record]:
        samples = [self._samples[index] for index in indices]
        prompts = [sample.ids for sample in samples]
        answers, report = generate_answers(loaded, attached, prompts, self._task.max_new_tokens)
        cache = cache_record(report, len(samples))
        records = []
        for sample, answer in zip(samples, answers, strict=True):
            record: Record = {
                "index": sample.index,
                "score": score(self._task.metric, answer.text, sample.references),
                "answer": answer.text,
                "references": sample.references,
                "prompt_tokens": len(sample.ids),
                "answer_tokens": answer.tokens,
                "prompt_sha256": hashlib.sha256(sample.prompt.encode()).hexdigest(),
                "cache": cache,
            }
            if self._save_prompts:
                record["prompt"] = sample.prompt
            records.append(record)
        return records

    def metrics(self, records: Sequence[Record]) -> dict[str, float | None]:
        mean, error = mean_and_stderr([record["score"] for record in records])
        return {f"{self.length},none": mean, f"{self.length}_stderr,none": error}


def _source(task: RulerTask, sources: Sources) -> dict[str, str]:
    """Name and hash of the task's questions or haystack text."""
    if task.family == "qa":
        questions = sources.questions(task.args["dataset"])
        return {"questions": questions.name, "questions_sha256": questions.digest}
    if task.args.get("haystack") == "essay":
        return {"haystack_text": sources.essay.name, "haystack_sha256": sources.essay.digest}
    return {}
