"""A task of lm-eval as an evaluation: lm-eval's prompts and scores with kvq's caches, sample logs and resume.

Prompts, filters, scores and aggregation are lm-eval's own. lm-eval's request and response caches are not used: a
finished response is read from the sample log of the same method only.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lm_eval
from lm_eval.api.metrics import mean

from kvq_cli.attention.shared_prompts import SharedPrompts
from kvq_cli.errors import KvqError, reason
from kvq_cli.evaluation.base import Evaluation, Record, Work, default_batch_size, mean_and_stderr, named_failure
from kvq_cli.evaluation.chat_template import chat_prompt, uses_chat_template
from kvq_cli.evaluation.generation import prompt_key
from kvq_cli.evaluation.lm_eval.model import (
    AttachedLM,
    check_generation,
    max_prompt_tokens,
    mean_cache_record,
    stop_strings,
)
from kvq_cli.evaluation.lm_eval.task_groups import PREFIX
from kvq_cli.evaluation.lm_eval.tasks import seeded, silence
from kvq_cli.evaluation.sampling import Sampling

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import ConfigurableTask

    from kvq_cli.attention.attach import Attached
    from kvq_cli.models import LoadedModel

CHARACTERS_PER_TOKEN = 4
"""Approximate; used to choose the batch size and to estimate times."""
#: Of a task's definition: where its documents and examples come from, which are hashed themselves.
_DATA = (
    *("dataset_path", "dataset_name", "dataset_kwargs", "training_split", "validation_split", "test_split"),
    *("fewshot_split", "num_fewshot"),
)
_LM_EVAL = Path(lm_eval.__file__).resolve().parent


class LmEvalEvaluation(Evaluation):
    """One task of lm-eval. A record has `scores` by `metric,filter` and the model's raw `responses`.

    chat: apply the tokenizer's chat template (None: where it has one and the task generates answers, since multiple
    choice scores continuations of plain text by convention); batch_size: prompts per batch (None: about 8192 tokens);
    num_fewshot: the number of examples that was asked for (None: the task's), which zero-shot tasks do not read;
    options: keyword arguments of `AttachedLM`.
    """

    equal_lengths = False

    def __init__(
        self,
        task: ConfigurableTask,
        loaded: LoadedModel,
        *,
        seed: int,
        limit: int | None,
        prefill: str,
        chat: bool | None = None,
        batch_size: int | None = None,
        num_fewshot: int | None = None,
        groups: Mapping[str, bool] | None = None,
        **options: Any,
    ) -> None:
        self._task, self._options, self.groups = task, options, groups or {}
        self.task, self.version = PREFIX + task.task_name, task.VERSION
        self.length = options.get("max_length") or loaded.context
        self._check()
        with silence(), seeded(seed):
            documents = list(task.eval_docs)
        self.available = len(documents)
        self.count = min(limit or self.available, self.available)
        self.higher_is_better = dict(task.higher_is_better())
        chat = uses_chat_template(loaded, chat, default=task.OUTPUT_TYPE == "generate_until")
        self._requests = self._build(loaded, seed, chat)
        self.unread = self._unread(num_fewshot)
        if "--truncation" in self.unread or "--max-new-tokens" in self.unread:
            options |= {"truncation": "left", "new_tokens": None}  # samples do not depend on them: they keep their keys
        self.work = self._work()
        longest = max(len(text) for requests in self._requests for text in map(_text, requests)) // CHARACTERS_PER_TOKEN
        self.batch_size = batch_size or default_batch_size(longest)
        self.config = {
            "task": self.task,
            "task_version": task.VERSION,
            "lm_eval": version("lm_eval"),
            "num_fewshot": task.config.num_fewshot,
            "fewshot_split": task.fewshot_cfg.split,
            "output_type": task.OUTPUT_TYPE,
            "generation": dict(task.config.generation_kwargs or {}),
            "chat_template": chat,
            "prefill": prefill,
            **({} if task.OUTPUT_TYPE == "generate_until" else {"prompt": "context"}),
            "seed": seed,
            **{name: value for name, value in options.items() if value is not None},
            "definition_sha256": sha256(_definition(task).encode()).hexdigest(),
            "docs_sha256": _digest(documents),
            "examples_sha256": _digest(task.sampler.df) if task.config.num_fewshot else None,
        }
        first = json.dumps(documents[0], default=str) if chat else _text(self._requests[0][0])
        stops = stop_strings(task.config.generation_kwargs or {})
        # Records count the padding of their batch.
        self.resume_key = prompt_key(loaded, first, chat, stops) | ({"batch_size": batch_size} if batch_size else {})
        if self.work.decoded and batch_size != 1:  # whatever the batch size is: it depends on the limit
            self.resume_key["rows"] = "leave at once"  # records count rows when they leave their batch
        if task.config.num_fewshot and getattr(task, "fewshot_instead_of", None):
            self.config["note"] = (
                f"{self.task}: --data-dir has no split {task.fewshot_instead_of!r}: few-shot examples are other "
                f"questions of {task.fewshot_cfg.split!r}"
            )

    def _unread(self, num_fewshot: int | None) -> dict[str, str]:
        """The given options that the task does not read, and why."""
        unread = {}
        if num_fewshot is not None and num_fewshot != self._task.config.num_fewshot:
            unread["--num-fewshot"] = "defined as zero-shot"
        generates = self._task.OUTPUT_TYPE == "generate_until" or any(
            request.request_type == "generate_until" for requests in self._requests for request in requests
        )
        if not generates and self._options.get("truncation", "left") != "left":
            unread["--truncation"] = "log-likelihoods, whose long prompts lose their beginning"
        if not generates and self._options.get("new_tokens") is not None:
            unread["--max-new-tokens"] = "log-likelihoods, without generated answers"
        return unread

    def _check(self) -> None:
        if self._task.OUTPUT_TYPE == "generate_until":
            generation = self._task.config.generation_kwargs or {}
            check_generation(self.task, generation)
            max_prompt_tokens(generation, self.length, self._options.get("new_tokens"))

    def _build(self, loaded: LoadedModel, seed: int, chat: bool) -> list[list[Instance]]:
        """Build the requests of each sample. Few-shot examples are drawn in sample order, whatever the limit.

        KvqError if the task cannot build them.
        """
        try:
            with silence(), seeded(seed):
                self._task.set_fewshot_seed(seed)
                self._task.build_all_requests(
                    limit=self.count,
                    apply_chat_template=chat,
                    fewshot_as_multiturn=True,
                    chat_template=partial(chat_prompt, loaded.tokenizer) if chat else None,
                    tokenizer_name=loaded.name,
                )
        except KvqError:
            raise
        except Exception as error:  # tasks run arbitrary code, and need as many examples as --num-fewshot
            examples = f"{self._task.config.num_fewshot} few-shot examples"
            raise KvqError(f"{self.task}: prompts with {examples} cannot be built: {reason(error)}") from error
        requests: list[list[Instance]] = [[] for _ in range(self.count)]
        for request in self._task.instances:
            requests[request.doc_id].append(request)
        return requests

    def _work(self) -> Work:
        """Mean tokens of a sample. Continuations of one letter share a pass (`AttachedLM`)."""
        generation = self._task.config.generation_kwargs or {}
        decoded = 0
        if self._task.OUTPUT_TYPE == "generate_until":
            decoded = self.length - max_prompt_tokens(generation, self.length, self._options.get("new_tokens"))
        passes = [{_text(request)[:-2] for request in requests} for requests in self._requests]
        characters = sum(len(text) for texts in passes for text in texts)
        answers = max((_answers(request) for requests in self._requests for request in requests), default=1)
        return Work(prompt=max(1, characters // CHARACTERS_PER_TOKEN // self.count), decoded=decoded * answers)

    def run(
        self, loaded: LoadedModel, attached: Mapping[str, Attached], pending: Mapping[str, Sequence[int]]
    ) -> Iterator[tuple[str, list[Record]]]:
        for unit in self.units(pending):
            prompts = SharedPrompts([attached[label] for label in unit])
            for label, indices in unit.items():
                model = AttachedLM(
                    loaded, attached[label], batch_size=self.batch_size, seed=self.config["seed"], **self._options
                )
                with prompts.used_by(attached[label]), named_failure(label):
                    records = self._batch(model, indices)
                yield label, records

    def _batch(self, model: AttachedLM, indices: Sequence[int]) -> list[Record]:
        requests = [request for index in indices for request in self._requests[index]]
        model.cache_records.clear()
        responses: dict[int, list[Any]] = {}
        for kind in dict.fromkeys(request.request_type for request in requests):
            of_kind = [each for each in requests if each.request_type == kind for _ in range(_answers(each))]
            for request, response in zip(of_kind, getattr(model, kind)(of_kind, disable_tqdm=True), strict=True):
                responses.setdefault(id(request), []).append(response)
        cache = mean_cache_record(model.cache_records)
        return [self._record(model, index, responses, cache) for index in indices]

    def _record(
        self, model: AttachedLM, index: int, responses: Mapping[int, list[Any]], cache: Mapping[str, float]
    ) -> Record:
        requests = self._requests[index]
        own_responses = [responses[id(request)] for request in requests]
        lengths = [model.prompt_tokens(request) for request in requests]
        scores = self._scores(index, own_responses)
        first = next((value for value in scores.values() if isinstance(value, (bool, int, float))), None)
        return {
            "index": index,
            "score": first,
            "scores": scores,
            "responses": [each[0] if len(each) == 1 else each for each in own_responses],
            "prompt_tokens": max(tokens for tokens, _ in lengths),
            "truncated_tokens": max(truncated for _, truncated in lengths),
            "prompt_sha256": sha256(
                json.dumps([request.args for request in requests], default=str).encode()
            ).hexdigest(),
            "cache": cache,
        }

    def _scores(self, index: int, responses: Sequence[list[Any]]) -> dict[str, Any]:
        """Scores of a sample's responses by `metric,filter`. KvqError if the task cannot score them.

        responses: of each request, its repeats where they are sampled, else one.
        """
        requests = self._requests[index]
        for request, response in zip(requests, responses, strict=True):
            # Repeated greedy answers are identical: generated once.
            request.resps = response if len(response) > 1 else response * (request.repeats or 1)
            request.filtered_resps = {}
        scores: dict[str, Any] = {}
        try:
            with silence():
                for response_filter in self._task._filters:
                    response_filter.apply(requests)
                for name in requests[0].filtered_resps:
                    filtered = [request.filtered_resps[name] for request in requests]
                    metrics = self._task.process_results(requests[0].doc, filtered)
                    scores |= {f"{metric},{name}": _plain(value) for metric, value in metrics.items()}
        except Exception as error:  # tasks run arbitrary scoring code, some with data of other packages
            raise KvqError(f"{self.task}: sample {index} cannot be scored: {reason(error)}") from error
        return scores

    def metrics(self, records: Sequence[Record]) -> dict[str, float | None]:
        metrics: dict[str, float | None] = {}
        for name in dict.fromkeys(name for record in records for name in record["scores"]):  # may differ by document
            metric, _, filter_name = name.partition(",")
            values = [record["scores"][name] for record in records if name in record["scores"]]
            aggregate = self._task.aggregation().get(metric, mean)
            metrics[name] = _plain(aggregate(values))
            # No standard error for other aggregations: lm-eval would draw 100,000 bootstrap samples.
            metrics[f"{metric}_stderr,{filter_name}"] = mean_and_stderr(values)[1] if aggregate is mean else None
        return metrics


def _answers(request: Instance) -> int:
    """How many answers a request asks for: greedy ones are all the same."""
    sampled = request.request_type == "generate_until" and Sampling.of(request.args[1]) is not None
    return (request.repeats or 1) if sampled else 1


def _text(request: Instance) -> str:
    return "".join(argument for argument in request.args if isinstance(argument, str))


def _definition(task: ConfigurableTask) -> str:
    """What a task is defined by, its functions as source code, but for its data and the number of examples."""
    config = task.config.to_dict(keep_callable=True)
    if type(task).__module__.partition(".")[0] != __name__.partition(".")[0]:
        config["class"] = type(task)  # a Python class of its own: others have kvq's, whose version is in the key
    definition = {name: value for name, value in config.items() if name not in _DATA}
    # Addresses, in the text of what has no source code, differ from run to run.
    return re.sub(r" at 0x[0-9a-f]+", "", json.dumps(definition, default=_source))


def _source(value: Any) -> str:
    """The source code of a function or class; outside of lm-eval, whose version is in the key, also the digest of all
    Python files of its folder, of which it may call functions."""
    try:
        source, path = inspect.getsource(value), Path(inspect.getsourcefile(value) or "").resolve()
        if path.is_relative_to(_LM_EVAL):
            return source
        files = sha256()
        for file in sorted(path.parent.glob("*.py")):
            files.update(sha256(file.read_bytes()).digest())
        return f"{source}\n{files.hexdigest()}"
    except (TypeError, OSError):
        return str(value)


def _digest(documents: Iterable[Any]) -> str:
    digest = sha256()
    for document in documents:
        digest.update(json.dumps(document, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """Convert numpy scalars and arrays to Python numbers and lists, also within lists."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
