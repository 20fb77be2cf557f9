"""The kv heads of one rank under tensor parallelism: the rank's shape, artifact tensors and plans.

vLLM gives each of N ranks kv_heads / N heads; where N is larger, N / kv_heads ranks hold the same head. Codecs treat
each head apart, so that a rank's plan is made of the tensors of its heads. Three codecs do not: KVQuant's values have
one range and one list of outliers for a token of all heads (`gathered`); a joined transform of klt cannot be cut; and
OScaR's norm of a token is of all heads, which is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from kvq_cli.codecs.layout import TensorLike
from kvq_cli.codecs.per_token import PerTokenCodec
from kvq_cli.codecs.wrapped import joins_heads
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import LayerPlan, Method, ModelShape, StreamPlan, of_stream
from kvq_cli.vllm.gathered import GatheredCodec

if TYPE_CHECKING:
    from torch import Tensor

#: `[batch, kv_heads of the rank, ...]` -> those of all ranks, in their order, along dimension 1.
Gather: TypeAlias = "Callable[[Tensor], Tensor]"


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

    def plan(self, method: Method, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> LayerPlan:
        """The plan of the rank's heads. shape, tensors: of all heads, as for `Method.plan`. Raises UsageError for
        tensors that cannot be cut by heads."""
        if self.ranks == 1:
            return method.plan(layer, shape, tensors)
        heads = self.heads(shape.kv_heads)
        plan = method.plan(layer, self.shape(shape), head_tensors(method, layer, shape, tensors, heads))
        if shape.kv_heads > 1 and any(joins_heads(stream.codec) for stream in plan.kept):
            raise UsageError(
                f"method {method.name} cannot be served with tensor parallelism: it divides a token by one norm of all "
                "kv heads, of which a rank has some; use another method"
            )
        return replace(plan, keys=self._gathered(plan.keys, shape), values=self._gathered(plan.values, shape))

    def _gathered(self, stream: StreamPlan, shape: ModelShape) -> StreamPlan:
        """The stream, with a codec that packs tokens of all heads together replaced by one that gathers them."""
        if not isinstance(stream.codec, PerTokenCodec):
            return stream
        copies = max(1, self.ranks // shape.kv_heads)

        def all_heads(x: Tensor) -> Tensor:
            gathered = x.repeat(1, self.ranks, 1, 1) if self.gather is None else self.gather(x)
            return gathered[:, ::copies]

        return replace(stream, codec=GatheredCodec(stream.codec, self.heads(shape.kv_heads), shape.kv_heads, all_heads))


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
    method: Method, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike], heads: Sequence[int]
) -> dict[str, TensorLike]:
    """A layer's artifact tensors for some of its kv heads, in ascending order.

    tensors: as `Method.plan` takes them, of all heads. Raises UsageError where one transform serves all heads.
    """
    cut = dict(tensors)
    for kind, part in (method.calibration(shape).parts(layer) if tensors else {}).items():
        if part.groups(kind, shape)[0] == 1 < shape.kv_heads:
            raise UsageError(_joined(method, kind))
        named = part.of_heads(kind, of_stream(tensors, kind), list(heads))
        cut |= {f"{kind}.{name}": tensor for name, tensor in named.items()}
    return cut


def _joined(method: Method, kind: str) -> str:
    name = {"k": "join_keys", "v": "join_values"}[kind]
    part = "of this artifact" if method.name == "klt" else "of its klt streams"
    return (
        f"method {method.name} cannot be served with tensor parallelism: one transform {part} covers the "
        f"{'keys' if kind == 'k' else 'values'} of all kv heads, of which a rank has some; calibrate with {name}=off"
    )
