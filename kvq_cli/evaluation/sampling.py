"""Sampled answers with the same random numbers for every method.

A token is drawn as the most probable one of log p + Gumbel noise (Gumbel-max: argmax of it has distribution p). Each
answer has its own stream of noise, whatever batch it is computed in: methods whose probabilities are alike draw the
same tokens, so that differences of scores between them are paired.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

SAMPLING_OPTIONS = ("do_sample", "temperature", "top_p", "top_k", "min_p")


@dataclass(frozen=True)
class Sampling:
    """How a task samples its answers; top_k 0, top_p 1 and min_p 0 leave all tokens."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Sampling | None:
        """Read a task's generation options; None if it answers greedily: `do_sample` false, or a temperature of 0.

        A top_k below 1 leaves all tokens. ValueError for numbers that cannot be sampled with.
        """
        given = {name: options[name] for name in SAMPLING_OPTIONS if options.get(name) is not None}
        samples = given.pop("do_sample", float(given.get("temperature", 0)) > 0)
        temperature = float(given.pop("temperature", 1.0))
        if not samples or temperature == 0:
            return None
        top_p, min_p = float(given.get("top_p", 1)), float(given.get("min_p", 0))
        if temperature < 0 or not 0 < top_p <= 1 or not 0 <= min_p <= 1:
            raise ValueError("sampling needs a temperature above 0, top_p above 0, and both top_p and min_p up to 1")
        return cls(temperature, top_p, max(0, int(given.get("top_k", 0))), min_p)

    def sampler(self, keys: Sequence[str]) -> RowSampler:
        """Return the sampler of answers, one a row; keys: what identifies each, to seed its noise."""
        return RowSampler(self, [int.from_bytes(sha256(key.encode()).digest()[:8], "big") >> 1 for key in keys])

    def _warpers(self) -> list[Any]:
        from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        warpers: list[Any] = [TemperatureLogitsWarper(self.temperature)]
        warpers += [TopKLogitsWarper(self.top_k)] if self.top_k else []
        warpers += [TopPLogitsWarper(self.top_p)] if self.top_p < 1 else []
        return warpers + ([MinPLogitsWarper(self.min_p)] if self.min_p else [])


class RowSampler:
    """Logits processor of transformers' greedy search, which then takes a sampled token of each row."""

    def __init__(self, sampling: Sampling, seeds: Sequence[int]) -> None:
        self._warpers = sampling._warpers()
        self._streams = [torch.Generator().manual_seed(seed) for seed in seeds]

    def reorder(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self._streams = [self._streams[row] for row in rows]

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """scores: logits `[rows, vocabulary]`; returns log p + noise, up to a constant of each row, in float32."""
        scores = scores.float()
        for warper in self._warpers:
            scores = warper(ids, scores)
        noise = torch.empty(scores.shape, dtype=torch.float32)
        for row, stream in zip(noise, self._streams, strict=True):
            row.exponential_(generator=stream)
        return scores - noise.log().to(scores.device)
