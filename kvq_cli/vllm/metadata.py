"""What vLLM tells a layer of a step: its requests, their lengths and blocks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvq_cli.vllm.batch import Batch, Sequence
from kvq_cli.vllm.step import Step


@dataclass
class KvqMetadata:
    """A batch: request i has the queries [starts[i], starts[i + 1]) and `lengths[i]` tokens with them. All are vLLM's
    own tensors, int32, which it fills anew for each step: a captured step reads them where they are.

    starts: `[requests + 1]` on the CPU. lengths: `[requests]`. blocks: `[requests, blocks]`. alike: queries of
    every request, where all decode and have as many; 0 otherwise. known: the lengths on the host, where vLLM has them
    there. captured: whether CUDA graphs hold steps: those that run before a graph is captured must be the same work.
    queries: most queries of a request that decodes.
    """

    starts: Tensor
    lengths: Tensor
    blocks: Tensor
    alike: int
    known: list[int] | None = None
    captured: bool = True
    queries: int = 1
    _batch: Batch | None = None
    _step: Step | None = None

    def step(self, exact: Tensor | None) -> Step:
        """Return the batch where requests are `alike`; made once for all layers. exact: the blocks of exact tokens."""
        if self._step is None:
            known, count = None if self.captured else self.known, self.alike
            rows = None if known is None else [n - behind for n in known for behind in reversed(range(count))]
            self._step = Step(self.lengths, self.blocks, exact, rows, queries=count)
        return self._step

    def batch(self, exact: Tensor | None) -> Batch:
        """The sequences; made once for all layers. Waits for the device where the lengths are not `known`."""
        if self._batch is None:
            starts, blocks = self.starts.tolist(), self.blocks.long()
            lengths = self.lengths.tolist() if self.known is None else self.known
            exact = None if exact is None else exact.long()
            runs = zip(starts[:-1], starts[1:], lengths, strict=False)
            self._batch = Batch(
                [
                    Sequence(start, stop, length - (stop - start), blocks[i], None if exact is None else exact[i])
                    for i, (start, stop, length) in enumerate(runs)
                    if stop > start
                ],
                self.queries,
            )
        return self._batch
