"""A block of tokens as bytes: the packed parts of its keys and values, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from kvq_cli.attention.rotary import Rotation
from kvq_cli.codecs.base import Packed, Part
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import LayerPlan, ModelShape, StreamPlan
from kvq_cli.methods.fp16 import Fp16
from kvq_cli.vllm.layout import ALIGNMENT, PagePart, codec_of
from kvq_cli.vllm.prefix_store.pages import ExactPages
from kvq_cli.vllm.rope import unrotate


class LayerRecord:
    """The bytes of a block in one layer: parts of its keys, then of its values, each aligned."""

    def __init__(self, plan: LayerPlan, shape: ModelShape, block_size: int, rotation: Rotation) -> None:
        self._keys, self._values, self._rotation = plan.keys, plan.values, rotation
        self._block_size, self._dtype, self.nbytes = block_size, getattr(torch, shape.dtype), 0
        self._parts: list[dict[str, PagePart]] = []
        for stream in plan.kept:
            parts = {}
            for name, spec in codec_of(stream).layout(shape.kv_heads, shape.head_dim, shape.dtype).parts.items():
                parts[name] = PagePart(spec.heads, spec.unit, spec.entry, spec.dtype, 0, self.nbytes)
                self.nbytes += -(-spec.nbytes(block_size) // ALIGNMENT) * ALIGNMENT
            self._parts.append(parts)

    def encode(self, keys: Tensor, values: Tensor, indices: Tensor) -> Tensor:
        """Pack keys after RoPE and values, `[blocks, kv_heads, block_size, head_dim]`, into uint8 `[blocks, nbytes]`.

        indices: `[blocks]`, int64, of the blocks in their sequences; they give the positions of keys.
        """
        if self._keys.source == "pre_rope":
            keys = unrotate(self._rotation, keys.float(), self._positions(indices))
        record = keys.new_zeros(len(keys), self.nbytes, dtype=torch.uint8)
        for stream, parts, x in ((self._keys, self._parts[0], keys), (self._values, self._parts[1], values)):
            packed = codec_of(stream).encode(x)
            for name, part in parts.items():
                part.view([record], self._block_size).copy_(packed.parts[name].tensor)
        return record

    def decode(self, record: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `encode`, in the model's dtype."""
        keys = self._decoded(self._keys, self._parts[0], record)
        if self._keys.source == "pre_rope":
            keys = self._rotation.rotate(keys, *self._rotation.tables(self._positions(indices)))
        return keys.to(self._dtype), self._decoded(self._values, self._parts[1], record).to(self._dtype)

    def _decoded(self, stream: StreamPlan, parts: dict[str, PagePart], record: Tensor) -> Tensor:
        """Return float32 `[blocks, kv_heads, block_size, head_dim]`."""
        views = {name: Part(part.view([record], self._block_size), part.unit) for name, part in parts.items()}
        return codec_of(stream).decode(Packed(self._block_size, views), torch.float32)

    def _positions(self, indices: Tensor) -> Tensor:
        """Return positions, `[blocks, 1, block_size]`."""
        return (indices[:, None] * self._block_size + torch.arange(self._block_size, device=indices.device))[:, None]


#: The records of all layers.
Records: TypeAlias = "Sequence[LayerRecord]"


def exact_records(shape: ModelShape, block_size: int, rotation: Rotation) -> Records:
    """Return records of keys and values as they are."""
    plan = Fp16().plan(0, shape, {})
    return [LayerRecord(plan, shape, block_size, rotation)] * shape.layers


def coded_records(
    plans: Sequence[LayerPlan], shape: ModelShape, block_size: int, rotations: Sequence[Rotation]
) -> Records:
    """Return records of klt's codes. Raises UsageError for a block size that cuts what is packed together."""
    unit = math.lcm(*(stream.codec.block_tokens for plan in plans for stream in plan.kept))
    if block_size % unit:
        raise UsageError(f"--block-size {block_size}: the prefix store packs {unit} tokens together; use a multiple")
    return [LayerRecord(plan, shape, block_size, rotation) for plan, rotation in zip(plans, rotations, strict=True)]


@dataclass(frozen=True)
class ExactBlocks:
    """Blocks of vLLM's cache with keys and values in the model's dtype, as `exact` or `coded` bytes.

    exact_blocks: blocks at the start of a sequence that are stored exactly: they have the sinks.
    """

    pages: ExactPages
    exact: Records
    coded: Records
    exact_blocks: int

    def nbytes(self, index: int) -> int:
        """Return the bytes of the block `index` of a sequence."""
        return sum(record.nbytes for record in self._records(index < self.exact_blocks))

    def read(self, blocks: Sequence[int], indices: Sequence[int]) -> list[Tensor]:
        """Copy the bytes of vLLM's `blocks`, which are those of `indices` in their sequences: uint8 on the CPU."""
        found: dict[int, Tensor] = {}
        for places, records in self._split(indices):
            ids, index = self._at(blocks, places), self._at(indices, places)
            layers = [record.encode(*self.pages.read(layer, ids), index) for layer, record in enumerate(records)]
            found |= zip(places, torch.cat(layers, dim=1).cpu().unbind(), strict=True)
        return [found[place] for place in range(len(blocks))]

    def write(self, blocks: Sequence[int], indices: Sequence[int], stored: Sequence[Tensor]) -> None:
        """Fill vLLM's `blocks` with what `read` gave for the same `indices`."""
        for places, records in self._split(indices):
            ids, index = self._at(blocks, places), self._at(indices, places)
            rows = torch.stack([stored[place] for place in places]).to(self.pages.device)
            parts = rows.split([record.nbytes for record in records], dim=1)
            for layer, (record, part) in enumerate(zip(records, parts, strict=True)):
                self.pages.write(layer, ids, *record.decode(part, index))

    def _records(self, exact: bool) -> Records:
        return self.exact if exact else self.coded

    def _split(self, indices: Sequence[int]) -> list[tuple[list[int], Records]]:
        """Return (places in `indices`, the records of their blocks), none without places."""
        by_kind: dict[bool, list[int]] = {}
        for place, index in enumerate(indices):
            by_kind.setdefault(index < self.exact_blocks, []).append(place)
        return [(places, self._records(exact)) for exact, places in by_kind.items()]

    def _at(self, numbers: Sequence[int], places: Sequence[int]) -> Tensor:
        return torch.tensor([numbers[place] for place in places], device=self.pages.device)


@dataclass(frozen=True)
class PackedBlocks:
    """Blocks of kvq's own pages, stored byte for byte. pages: of all layers, uint8 `[pages, bytes]` each."""

    pages: Sequence[Tensor]

    def nbytes(self, index: int) -> int:
        """Return the bytes of a block."""
        return sum(page.shape[1] for page in self.pages)

    def read(self, blocks: Sequence[int], indices: Sequence[int]) -> list[Tensor]:
        """Copy as `ExactBlocks.read`."""
        return list(torch.cat([page[list(blocks)] for page in self.pages], dim=1).cpu().unbind())

    def write(self, blocks: Sequence[int], indices: Sequence[int], stored: Sequence[Tensor]) -> None:
        """Fill as `ExactBlocks.write`."""
        rows = torch.stack(list(stored)).to(self.pages[0].device)
        for page, part in zip(self.pages, rows.split([page.shape[1] for page in self.pages], dim=1), strict=True):
            page[list(blocks)] = part
