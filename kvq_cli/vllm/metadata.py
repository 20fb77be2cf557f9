"""What vLLM tells a layer of a step: its requests, their lengths and blocks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvq_cli.vllm.paged_layer import Batch, Sequence, Step


@dataclass
class KvqMetadata:
    """A batch: request i has the queries [starts[i], starts[i + 1]) and `lengths[i]` tokens with them. All are vLLM's
    own tensors, int32, which it fills anew for each step: a captured step reads them where they are.

    starts: `[requests + 1]` on the CPU. lengths: `[requests]`. blocks: `[requests, blocks]`. single: whether every
    request has one query.
    """

    starts: Tensor
    lengths: Tensor
    blocks: Tensor
    single: bool
    _batch: Batch | None = None

    def step(self, exact: Tensor | None) -> Step:
        """The batch where every request has one query; exact: the blocks of exact tokens."""
        return Step(self.lengths, self.blocks, exact)

    def batch(self, exact: Tensor | None) -> Batch:
        """The sequences; made once for all layers. Waits for the device."""
        if self._batch is None:
            starts, blocks = self.starts.tolist(), self.blocks.long()
            exact = None if exact is None else exact.long()
            runs = zip(starts[:-1], starts[1:], self.lengths.tolist(), strict=False)
            self._batch = Batch(
                [
                    Sequence(start, stop, length - (stop - start), blocks[i], None if exact is None else exact[i])
                    for i, (start, stop, length) in enumerate(runs)
                    if stop > start
                ]
            )
        return self._batch
