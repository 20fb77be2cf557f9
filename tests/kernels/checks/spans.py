"""A random cache of an operation that reads packed tokens in spans, and a check of its kernels against float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from kernel_cases import assert_error_at_most_twice
from kvq_kernels.decode_attention import Rope


class SpanCase:
    """query, keys, values, lengths, scaling, rope, window: the operation's arguments. dtype: the model's type.

    SIZES: of the workspace. operation, reference_of, workspace_of: of the operation, its reference, `Workspace.like`.
    """

    SIZES: tuple[int, ...] = (128, 2)
    operation: Callable
    reference_of: Callable
    workspace_of: Callable

    def make_rope(self, style: str | None, width: int, offset: int, room: int) -> None:
        """Tables of cosines for `room` tokens and some more; style None: no rotation."""
        self.rope = None
        if style is not None:
            rows = len(self.lengths)
            offsets = torch.full((rows,), offset, dtype=torch.int32) if offset else None
            frequencies = 10000.0 ** (-torch.arange(width // 2) * 2 / width)
            self.rope = Rope.tables(style, frequencies, room + 256, scale=1.1, offset=offsets)

    def run(self, *sizes: int) -> torch.Tensor:
        """Output of the kernels; their buffers are filled with NaN before."""
        workspace = type(self).workspace_of(self.query, self.values.rank, *(sizes or self.SIZES))
        out = torch.full_like(self.query, torch.nan)
        for poisoned in vars(workspace).values():
            poisoned.fill_(torch.nan)
        args = (self.query, self.keys, self.values, self.lengths, self.scaling)
        options = {"rope": self.rope, "window": self.window}
        return type(self).operation(*args, **options, workspace=workspace, out=out, backend="triton")

    def reference(self, dtype: torch.dtype, round_to: torch.dtype | None = None) -> torch.Tensor:
        args = (self.query, self.keys, self.values, self.lengths, self.scaling, self.rope, self.window)
        return type(self).reference_of(*args, dtype, round_to)

    def check(self, *sizes: int) -> None:
        """Assert at most twice PyTorch's error in the model's type, against float64."""
        exact, out = self.reference(torch.float64), self.run(*sizes)
        assert_error_at_most_twice(out, self.reference(torch.float32, self.dtype).to(self.dtype), exact)
