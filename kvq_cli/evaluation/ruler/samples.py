"""RULER samples whose prompt and answer fill a context length, counted by the model's tokenizer.

A sample depends on the task, context length, seed and its index alone: not on the number of samples, their order or the
method under evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import TYPE_CHECKING, Any

from kvq_cli.errors import UsageError
from kvq_cli.evaluation.chat_template import chat_prompt, encode_prompt
from kvq_cli.evaluation.ruler.families import FAMILIES, Sources
from kvq_cli.evaluation.ruler.sample_types import Prompt
from kvq_cli.evaluation.ruler.tasks import RulerTask
from kvq_cli.evaluation.ruler.templates import Templates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class RulerSample:
    """prompt: the full text; ids: its token ids with the tokenizer's BOS; references: expected answers."""

    index: int
    prompt: str
    ids: list[int]
    references: list[str]


class RulerSamples:
    """The samples of one task at one context length.

    chat: apply the tokenizer's chat template and put the answer prefix behind it, as RULER does for instruction-tuned
    models.
    """

    def __init__(
        self,
        task: RulerTask,
        context: int,
        tokenizer: PreTrainedTokenizerBase,
        templates: Templates,
        sources: Sources,
        seed: int,
        chat: bool = False,
    ) -> None:
        self.task = task
        self.context = context
        self.seed = seed
        self._tokenizer = tokenizer
        self._chat = chat
        self._family = FAMILIES[task.family](task, context, templates, sources, self._count)

    @property
    def config(self) -> dict[str, Any]:
        """The family's parameters at this context length."""
        return self._family.config

    @property
    def count(self) -> int | None:
        """Number of samples; None if they are generated without end."""
        return self._family.count

    def check(self, count: int) -> None:
        """Raise UsageError if one of the first `count` samples does not fit the context length, before anything is
        evaluated."""
        _ = self._typical_size
        if self.count is None and self._smallest(0) <= 0.8 * self.context:
            return  # generated samples differ by a few tokens; questions bring their own passages
        largest = max(range(count), key=self._smallest)
        self._require(self._family.min_size(largest), largest)

    def __getitem__(self, index: int) -> RulerSample:
        """Generate sample `index`. UsageError if its smallest size does not fit the context length."""
        size = self._fit(self._typical_size, index)
        prompt, references = self._draw(size, index)
        return RulerSample(index, self._prompt_text(prompt), self._encode(prompt), references)

    @property
    def first_text(self) -> str:
        """The prompt of sample 0 without the chat template."""
        return str(self._draw(self._typical_size, 0)[0])

    @cached_property
    def _typical_size(self) -> int:
        """The largest size with which sample 0 fits, found by doubling and bisection."""
        fits, too_large = self._family.min_size(0), None
        self._require(fits, 0)
        largest = self._family.max_size
        while too_large is None or too_large - fits > 1:
            size = 2 * fits if too_large is None else (fits + too_large) // 2
            if largest is not None and size > largest:
                size, too_large = largest, largest + 1
                if fits >= largest:
                    break
            if self._tokens(size, 0) <= self.context:
                fits = size
            else:
                too_large = size
        return fits

    def _fit(self, size: int, index: int) -> int:
        """The largest size near `size` with which sample `index` fits; samples of one size differ by a few tokens."""
        smallest, largest = self._family.min_size(index), self._family.max_size
        size = max(size, smallest)
        step = max(1, size // 100)
        while self._tokens(size, index) > self.context:
            if size == smallest:
                self._require(size, index)
            size = max(smallest, size - step)
        while (largest is None or size + step <= largest) and self._tokens(size + step, index) <= self.context:
            size += step
        return size

    def _require(self, size: int, index: int) -> None:
        """UsageError if sample `index` does not fit with this size."""
        needed = self._tokens(size, index)
        if needed > self.context:
            enough = -(-needed // 64) * 64
            raise UsageError(
                f"--seqlen {self.context} is too short for {self.task.name}: sample {index} needs at least {needed} "
                f"tokens, {self.task.max_new_tokens} of them for the answer: pass --seqlen {enough} or more"
            )

    def _draw(self, size: int, index: int) -> tuple[Prompt, list[str]]:
        # Random hashes a string seed with SHA-512: the same in every process and Python version.
        rng = Random(f"{self.task.name} {self.context} {self.seed} {index}")
        return self._family.draw(rng, size, index)

    def _tokens(self, size: int, index: int) -> int:
        """Tokens of the prompt of a sample of this size and of its answer."""
        return len(self._encode(self._draw(size, index)[0])) + self.task.max_new_tokens

    def _smallest(self, index: int) -> int:
        """Tokens that sample `index` needs at least."""
        return self._tokens(self._family.min_size(index), index)

    def _prompt_text(self, prompt: Prompt) -> str:
        if not self._chat:
            return str(prompt)
        turn = [{"role": "user", "content": prompt.text}]
        return chat_prompt(self._tokenizer, turn) + prompt.prefix

    def _encode(self, prompt: Prompt) -> list[int]:
        return encode_prompt(self._tokenizer, self._prompt_text(prompt), not self._chat)

    def _count(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
