"""RULER samples that fill a context length of the model's own tokenizer, the room for the answer included.

A sample depends on the task, the context length, the seed and its own number, and on nothing else: not on how many
samples are drawn, nor in which order, nor on the method that is being evaluated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from random import Random

from kvq_cli.errors import UsageError
from kvq_cli.evaluation.ruler.content import Prompt
from kvq_cli.evaluation.ruler.families import FAMILIES, Sources
from kvq_cli.evaluation.ruler.tasks import RulerTask
from kvq_cli.evaluation.ruler.templates import Templates


@dataclass(frozen=True)
class Sample:
    """prompt: the whole of it; ids: its tokens, with the tokenizer's own first token."""

    index: int
    prompt: str
    ids: list[int]
    references: list[str]


class Samples:
    """The samples of one task at one context length.

    chat: wrap the prompt in the tokenizer's chat template, the answer's beginning behind it (RULER does this for
    instruction-tuned models).
    """

    def __init__(
        self,
        task: RulerTask,
        context: int,
        tokenizer,
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
    def count(self) -> int | None:
        """How many samples there are; None where there is no end to them."""
        return self._family.count

    def check(self) -> None:
        """Raise UsageError now, not after an hour, when the task does not fit the context length."""
        _ = self._typical_size

    def __getitem__(self, index: int) -> Sample:
        """Sample `index`. Raises UsageError when even the smallest one does not fit the context length."""
        size = self._fit(self._typical_size, index)
        prompt, references = self._draw(size, index)
        return Sample(index, self._whole(prompt), self._encode(prompt), references)

    @cached_property
    def _typical_size(self) -> int:
        """The largest haystack with which sample 0 fits, found by bisection."""
        fits, too_large = self._family.smallest(0), None
        self._require(fits, 0)
        largest = self._family.largest
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
        """The largest size near `size` with which sample `index` fits: samples of one size differ by some tokens."""
        smallest, largest = self._family.smallest(index), self._family.largest
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
        needed = self._tokens(size, index)
        if needed > self.context:
            raise UsageError(
                f"--context {self.context} is too short for {self.task.name}: sample {index} needs {needed} tokens at "
                f"least, {self.task.budget} of them for the answer: pass --context {-(-needed // 64) * 64} or more"
            )

    def _draw(self, size: int, index: int) -> tuple[Prompt, list[str]]:
        # A string seeds by its hash (SHA-512), the same in every process and version.
        rng = Random(f"{self.task.name} {self.context} {self.seed} {index}")
        return self._family.draw(rng, size, index)

    def _tokens(self, size: int, index: int) -> int:
        """Tokens of a sample of this size and of its answer."""
        return len(self._encode(self._draw(size, index)[0])) + self.task.budget

    def _whole(self, prompt: Prompt) -> str:
        if not self._chat:
            return str(prompt)
        turn = [{"role": "user", "content": prompt.text}]
        return self._tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) + prompt.prefix

    def _encode(self, prompt: Prompt) -> list[int]:
        # A chat template writes the first token itself.
        return self._tokenizer(self._whole(prompt), add_special_tokens=not self._chat, verbose=False).input_ids

    def _count(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
