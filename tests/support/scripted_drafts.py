"""Drafts of vLLM's speculative decoding of which a known number of tokens is right."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

#: vLLM's `speculative_config`.
CONFIG = {"method": "custom_class", "model": "scripted_drafts.ScriptedDrafts", "num_speculative_tokens": 4}


class ScriptedDrafts:
    """A proposer of vLLM that knows the answers. By the length of the text so far, it drafts no tokens, or as many as
    vLLM takes, of which none, some or all are right.

    answers: prompt -> the tokens that follow it.
    """

    answers: ClassVar[dict[tuple[int, ...], list[int]]] = {}

    def __init__(self, vllm_config: Any) -> None:
        self._most = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, *_: Any) -> None:
        """vLLM's CPU runner calls it."""

    def propose(self, sampled: list[list[int]], lengths: np.ndarray, tokens: np.ndarray, **_: Any) -> list[list[int]]:
        """Drafted tokens of each row that has new ones, which has `tokens[row, : lengths[row]]`."""
        rows = enumerate(sampled)
        return [self._draft(tuple(tokens[row, : lengths[row]].tolist())) if new else [] for row, new in rows]

    def _draft(self, text: tuple[int, ...]) -> list[int]:
        right = len(text) % (self._most + 2) - 1
        prompt = max((prompt for prompt in self.answers if text[: len(prompt)] == prompt), key=len)
        answer = self.answers[prompt][len(text) - len(prompt) :][: self._most]
        return [token if i < right else token ^ 1 for i, token in enumerate(answer)] if right >= 0 else []
