"""What is calibrated of methods that join all layers: principal components, and the bits of their groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvq_cli.codecs.component_groups import BITS, EXACT, SIZES, Group
from kvq_cli.codecs.layout import TensorLike, TensorSpec
from kvq_cli.errors import UsageError
from kvq_cli.methods.specs import StreamSpec, Tensors

if TYPE_CHECKING:
    from kvq_cli.methods.base import ModelShape

#: Bits of a 32-bit word, in which budgets are counted.
WORD = 32


@dataclass(frozen=True)
class JoinedSpec(StreamSpec):
    """Calibration of one transform for the keys of all layers and heads, and of one for the values.

    bits: bits per number of all that packed keys, and packed values, hold, at most. skip: see `CaptureSpec`.
    """

    unit = 1
    entries: ClassVar[AbstractSet[int]] = frozenset()
    same_in_all_layers = ("k.groups", "v.groups")

    bits: float
    skip: int

    def needed_tokens(self, shape: ModelShape) -> Iterator[tuple[int, str]]:
        yield SIZES[0], f"{SIZES[0]} components"

    def numbers(self, shape: ModelShape) -> int:
        """Keys, or values, of a token in all layers."""
        return len(shape.cached_layers) * shape.kv_heads * shape.head_dim

    def words(self, shape: ModelShape) -> int:
        """Most 32-bit words of the keys, or of the values, of a packed token."""
        return math.floor(self.bits * self.numbers(shape) / WORD + 1e-9)

    def tensors(self, kind: str, shape: ModelShape, choice: Sequence[Any]) -> Tensors:
        heads = (shape.kv_heads, shape.head_dim)
        rows = [list(group) for group in choice]
        components = sum(row[0] for row in rows)
        return {
            "groups": TensorSpec((len(rows), 2), "int32", rows),
            "mean": TensorSpec(heads, "float32"),
            "spread": TensorSpec(heads, "float32"),
            "basis": TensorSpec((shape.kv_heads * shape.head_dim, components), "float32"),
        }

    def first_choice(self, kind: str, shape: ModelShape) -> list[Group]:
        """Groups of 64 components, with the fewest bits, but 4, that use the budget up; then of 16 with 2."""
        words, left, groups = self.words(shape), self.numbers(shape), list[Group]()
        widths = (Group(64, bits) for bits in BITS[1:])
        first = next((group for group in widths if group.words * left >= words * group.components), Group(64, EXACT))
        for group in (first, Group(16, 2)):
            count = min(words // group.words, left // group.components)
            words, left = words - count * group.words, left - count * group.components
            groups += [group] * count
        return groups

    def of_heads(self, kind: str, tensors: Mapping[str, TensorLike], heads: Sequence[int]) -> dict[str, TensorLike]:
        dim = tensors["mean"].shape[1]
        rows = [head * dim + channel for head in heads for channel in range(dim)]
        of_each = {name: tensors[name][heads] for name in ("mean", "spread")}
        return {"groups": tensors["groups"], **of_each, "basis": tensors["basis"][rows]}

    def check(self, shape: ModelShape) -> None:
        """Raise UsageError unless a token has a group of components, and the budget its codes."""
        least = Group(SIZES[0], 2)
        if self.numbers(shape) < least.components:
            raise UsageError(f"kvtc: all layers have {self.numbers(shape)} keys for a token: choose another method")
        if self.words(shape) < least.words:
            bits = WORD * least.words / self.numbers(shape)
            raise UsageError(
                f"kvtc: bits={self.bits:g} are too few for a group of {least.components} components: set "
                f"bits={math.ceil(bits * 1e4) / 1e4:g} or more"
            )
