"""The kv heads of one rank under tensor parallelism: the rank's shape, artifact tensors and plans.

vLLM gives each of N ranks kv_heads / N heads; where N is larger, N / kv_heads ranks hold the same head. Codecs treat
each head apart, so that a rank's plan is made of the tensors of its heads. Two codecs do not: KVQuant's values have one
range and one list of outliers for a token of all heads (`gathered`), and a joined transform of klt cannot be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvq_cli.codecs.per_token import PerTokenCodec
from kvq_cli.codecs.transform import CHUNKS
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import (
    CalibrationSpec,
    FactorSpec,
    LayerPlan,
    Method,
    ModelShape,
    StreamPlan,
    TransformSpec,
    stream_spec,
)
from kvq_cli.vllm.gathered import GatheredCodec

#: `[batch, kv_heads of the rank, ...]` -> those of all ranks, in their order, along dimension 1.
Gather = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `ranks` that share a layer's heads.

    gather: exchanges values with the other ranks; None: for plans that are measured, never run.
    """

    rank: int = 0
    ranks: int = 1
    gather: Gather | None = None

    def heads(self, kv_heads: int) -> range:
        """The kv heads of the rank."""
        if kv_heads >= self.ranks:
            count = kv_heads // self.ranks
            return range(self.rank * count, (self.rank + 1) * count)
        head = self.rank // (self.ranks // kv_heads)
        return range(head, head + 1)

    def shape(self, shape: ModelShape) -> ModelShape:
        """The sizes of the rank's attention. Raises UsageError for heads that cannot be split evenly."""
        check_ranks(shape, self.ranks)
        heads = len(self.heads(shape.kv_heads))
        return replace(shape, query_heads=shape.query_heads // self.ranks, kv_heads=heads)

    def plan(self, method: Method, layer: int, shape: ModelShape, tensors: Mapping[str, Tensor]) -> LayerPlan:
        """The plan of the rank's heads. shape, tensors: of all heads, as for `Method.plan`. Raises UsageError for
        tensors that cannot be cut by heads."""
        if self.ranks == 1:
            return method.plan(layer, shape, tensors)
        heads = self.heads(shape.kv_heads)
        plan = method.plan(layer, self.shape(shape), head_tensors(method, layer, shape, tensors, heads))
        return replace(plan, keys=self._gathered(plan.keys, shape), values=self._gathered(plan.values, shape))

    def _gathered(self, stream: StreamPlan, shape: ModelShape) -> StreamPlan:
        """The stream, with a codec that packs tokens of all heads together replaced by one that gathers them."""
        if not isinstance(stream.codec, PerTokenCodec):
            return stream
        copies = max(1, self.ranks // shape.kv_heads)

        def all_heads(x: Tensor) -> Tensor:
            gathered = x.repeat(1, self.ranks, 1, 1) if self.gather is None else self.gather(x)
            return gathered[:, ::copies]

        return replace(stream, codec=GatheredCodec(stream.codec, self.heads(shape.kv_heads), all_heads))


#: The only rank, which has all heads.
WHOLE = Shard()


def check_ranks(shape: ModelShape, ranks: int) -> None:
    """Raise UsageError unless vLLM can share out the heads over `ranks`."""
    if shape.query_heads % ranks or max(shape.kv_heads, ranks) % min(shape.kv_heads, ranks):
        raise UsageError(
            f"--tensor-parallel-size {ranks}: the model has {shape.query_heads} query heads and {shape.kv_heads} kv "
            "heads, which cannot be split evenly; choose another number of ranks"
        )


def head_tensors(
    method: Method, layer: int, shape: ModelShape, tensors: Mapping[str, Tensor], heads: Sequence[int]
) -> dict[str, Tensor]:
    """A layer's artifact tensors for some of its kv heads, in ascending order.

    tensors: as `Method.plan` takes them, of all heads. Raises UsageError where one transform serves all heads.
    """
    cut = dict(tensors)
    spec = method.calibration(shape) if tensors else None
    if spec is None or isinstance(spec, FactorSpec):
        return cut
    for kind in "kv":
        stream = stream_spec(spec, layer, kind)
        named = {key[2:]: tensor for key, tensor in tensors.items() if key.startswith(f"{kind}.")}
        if isinstance(stream, TransformSpec):
            if stream.groups(kind, shape)[0] == 1 < shape.kv_heads:
                raise UsageError(_joined(method, kind))
            named = _transform_tensors(named, list(heads))
        elif isinstance(stream, CalibrationSpec):
            names = [block.name for block in stream.stream(kind).shapes]
            named = _codebook_tensors(named, names, list(heads))
        cut |= {f"{kind}.{name}": tensor for name, tensor in named.items()}
    return cut


def _joined(method: Method, kind: str) -> str:
    name = {"k": "join_keys", "v": "join_values"}[kind]
    part = "of this artifact" if method.name == "klt" else "of its klt streams"
    return (
        f"method {method.name} cannot be served with tensor parallelism: one transform {part} covers the "
        f"{'keys' if kind == 'k' else 'values'} of all kv heads, of which a rank has some; calibrate with {name}=off"
    )


def _codebook_tensors(named: Mapping[str, Tensor], shapes: Sequence[str], heads: list[int]) -> dict[str, Tensor]:
    """See `methods.tensors.stream_layout`. A block shape that none of the heads has is left out."""
    choice = named["choice"].tolist()
    cut = {name: tensor[heads] for name, tensor in named.items() if not name.startswith("centroids.")}
    for index, name in enumerate(shapes):
        books = named.get(f"centroids.{name}")
        of_shape = [head for head, chosen in enumerate(choice) if chosen == index]
        kept = [place for place, head in enumerate(of_shape) if head in heads]
        if books is not None and kept:
            shared = books.shape[0] == 1 < len(of_shape)
            cut[f"centroids.{name}"] = books if shared else books[kept]
    return cut


def _transform_tensors(named: Mapping[str, Tensor], heads: list[int]) -> dict[str, Tensor]:
    """See `methods.tensors.transform_layout`; one group for each head."""
    cut = {name: tensor[heads] for name, tensor in named.items() if not name.startswith("centroids.")}
    for size, chunks in zip(CHUNKS, named["allocation"].long().T, strict=True):
        books = named.get(f"centroids.{size}")
        if books is not None:
            kept = [group for head, group in enumerate(books.split(chunks.tolist())) if head in heads]
            if sum(map(len, kept)):
                cut[f"centroids.{size}"] = torch.cat(kept)
    return cut
