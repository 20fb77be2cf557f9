"""Inputs of `transform_attention`: codes of a transform's components, the transform, and the workspace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvq_kernels.decode_attention.parts import Side
from kvq_kernels.spans import Workspace


@dataclass(frozen=True)
class Steps:
    """The components of all groups of kv heads, divided into steps: number i of a step is component
    `first + i * size` of its group, whose code is number `code + i` of the token's and whose centroids are row
    `row + i * size`.

    groups: int32 `[G, 4]`: first step, end of the steps, offset of the group's numbers in `Transform.synthesis`,
            components.
    steps:  int32 `[steps, 6]`: group, code, how many (at most `words`), size, row, first.
    components: of the group that has most. words: components of a step at most, a power of two.
    """

    groups: Tensor
    steps: Tensor
    components: int
    words: int

    @classmethod
    def of(cls, counts: Mapping[int, Sequence[int]], channels: int, words: int, device: torch.device) -> Steps:
        """counts: by the components of a chunk, how many chunks each group has; codes and rows are in the order of the
        mapping, within it by group, a group's components in the order of the mapping. channels: of a group.
        """
        number = len(next(iter(counts.values())))
        steps: list[list[list[int]]] = [[] for _ in range(number)]
        kept = [0] * number
        code = row = 0
        for size, chunks in counts.items():
            for group, count in enumerate(chunks):
                for start in range(0, count, words):
                    many, at = min(words, count - start), start * size
                    each = ([group, code + start, many, size, row + at + i, kept[group] + at + i] for i in range(size))
                    steps[group] += each
                code, row, kept[group] = code + count, row + size * count, kept[group] + size * count
        groups, first, offset = [], 0, 0
        for group, (own, components) in enumerate(zip(steps, kept, strict=True)):
            own += [[group, 0, 0, 1, 0, 0]] * (not own)  # sums of a group without components have weights, too
            groups.append([first, first + len(own), offset, components])
            first, offset = first + len(own), offset + channels * components
        all_steps = [step for own in steps for step in own]
        at_groups, at_steps = (torch.tensor(rows, dtype=torch.int32, device=device) for rows in (groups, all_steps))
        return cls(at_groups, at_steps, max(kept), words)


@dataclass(frozen=True)
class Transform:
    """x' = S z' + mean of each group of kv heads, where z' are centroids' components.

    centroids: `[components of all groups, 256]`, 16 or 32 bits: a row has the numbers of one component.
    synthesis: S of each group, `[channels of the group, its components]`, one after the other.
    mean:      `[H, D]`. steps: see `Steps`; H is a multiple of its groups.
    """

    centroids: Tensor
    synthesis: Tensor
    mean: Tensor
    steps: Steps

    @property
    def group_heads(self) -> int:
        """Kv heads of a group."""
        return self.mean.shape[0] // self.steps.groups.shape[0]


@dataclass(frozen=True)
class Transformed:
    """Keys (before RoPE) or values, packed as codes of a transform's components.

    codes: uint8 `[B, 1, T, codes]`, or None where nothing was packed yet.
    exact: count, sinks and ring as in any `Side`; its `packed` is not read.
    """

    codes: Tensor | None
    transform: Transform
    exact: Side

    @property
    def rank(self) -> int:
        """Numbers of a token that are summed for a query head."""
        return max(1, self.transform.steps.components)


@dataclass
class TransformWorkspace(Workspace):
    """With the results of exact tokens. R: components of the group that has most.

    exact:        float32 `[B, Q, exact splits, D]`, attention to sinks and recent tokens.
    exact_logsum: float32 `[B, Q, exact splits]`, their log-sum-exp (base 2).
    """

    exact: Tensor
    exact_logsum: Tensor

    @classmethod
    def like(cls, query: Tensor, rank: int, span: int, splits: int, exact_splits: int = 1) -> TransformWorkspace:
        packed, (rows, heads, dim) = Workspace.like(query, rank, span, splits), query.shape
        exact = packed.scores.new_empty(rows, heads, exact_splits, dim)
        return cls(packed.scores, packed.partial, packed.logsum, exact, exact.new_empty(rows, heads, exact_splits))

    @property
    def exact_splits(self) -> int:
        return self.exact_logsum.shape[2]
