"""The report of a cache: bytes by part and bits per cached number, counted from the tensors held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvq_cli.codecs.base import TABLES

if TYPE_CHECKING:
    from torch import Tensor

    from kvq_cli.cache.layer import CompressedLayer

FULL_PRECISION_BITS = 16


@dataclass(frozen=True)
class CacheReport:
    """nominal_bits:  bits of the codes per number, as the papers count them.
    parts:           bytes by part, keys and values of all layers together: packed parts ("codes", "scale", ...),
                     "sinks" and "recent" (full precision), "rollback" (packed tokens that are held in full precision,
                     too), "unused" (allocated, not yet filled).
    constants:       bytes by name of the tensors that all sequences share (codebooks, channel statistics); apart.
    tables:          bytes by name of the tensors that codecs computed from these and hold while they run: no part of
                     the format. A CPU keeps `ranked` and `decoded`, several times as large as the codebooks; a GPU not.
    numbers:         cached numbers (tokens x kv heads x head_dim, keys and values of all layers) that later queries
                     see: those within the sliding windows of their layers, as transformers' own cache holds them.
    packed_numbers:  the numbers of packed tokens, seen or not.
    tokens:          tokens cached, all rows together.
    compressed:      how many are held packed, averaged over layers, keys and values.
    working:         most bytes by name that passes held beside the cache, and freed again ("accumulator": xquant-cl's
                     X^ and latents, see `CrossLayerSum.peak`; "components": of kvtc, those that waited for all layers;
                     "joined": copies that let kernels read a store as one tensor).
    backend:         who computed the attention of single queries; None: nobody.
    reserved:        those of the "unused" bytes that are room for tokens behind the longest row.
    beyond_window:   numbers that are held, too, though their tokens are beyond the sliding window of their layer.
    states:          bytes of what layers hold that are not compressed (recurrent states, chunked attention); apart.
    """

    nominal_bits: float
    parts: Mapping[str, int]
    constants: Mapping[str, int]
    numbers: int
    tokens: int
    compressed: float
    tables: Mapping[str, int] = field(default_factory=dict)
    working: Mapping[str, int] = field(default_factory=dict)
    backend: str | None = None
    reserved: int = 0
    beyond_window: int = 0
    packed_numbers: float = 0
    states: int = 0

    def __add__(self, other: CacheReport) -> CacheReport:
        """The report of this cache's rows and `other`'s, both of the same method."""
        names = dict.fromkeys([*self.parts, *other.parts])
        peaks = dict.fromkeys([*self.working, *other.working])
        return replace(
            self,
            parts={name: self.parts.get(name, 0) + other.parts.get(name, 0) for name in names},
            numbers=self.numbers + other.numbers,
            tokens=self.tokens + other.tokens,
            compressed=self.compressed + other.compressed,
            working={name: max(self.working.get(name, 0), other.working.get(name, 0)) for name in peaks},
            reserved=self.reserved + other.reserved,
            beyond_window=self.beyond_window + other.beyond_window,
            packed_numbers=self.packed_numbers + other.packed_numbers,
            states=self.states + other.states,
        )

    @property
    def bytes(self) -> int:
        """All bytes that the sequences hold, shared constants not included."""
        return sum(self.parts.values())

    @property
    def constant_bytes(self) -> int:
        return sum(self.constants.values())

    @property
    def table_bytes(self) -> int:
        return sum(self.tables.values())

    @property
    def fp16_bytes(self) -> int:
        """Bytes of the same numbers in 16 bits: what transformers' own cache holds."""
        return self.numbers * FULL_PRECISION_BITS // 8

    @property
    def measured_bits(self) -> float:
        """Bits per cached number, everything held counted except shared constants; 0 for an empty cache."""
        return 8 * self.bytes / self.numbers if self.numbers else 0.0

    @property
    def measured_bits_with_constants(self) -> float:
        """Bits per cached number of a single sequence of this length, shared constants included."""
        return 8 * (self.bytes + self.constant_bytes) / self.numbers if self.numbers else 0.0

    @property
    def packed_bits(self) -> float:
        """Bits per packed number: codes with their scales, zero-points and outliers, no windows, no unused room."""
        windows = ("sinks", "recent", "rollback", "unused")
        size = sum(count for name, count in self.parts.items() if name not in windows)
        return 8 * size / self.packed_numbers if self.packed_numbers else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "nominal_bits": self.nominal_bits,
            "measured_bits": self.measured_bits,
            "measured_bits_with_constants": self.measured_bits_with_constants,
            "packed_bits": self.packed_bits,
            "bytes": self.bytes,
            "fp16_bytes": self.fp16_bytes,
            "constant_bytes": self.constant_bytes,
            "table_bytes": self.table_bytes,
            "parts": dict(self.parts),
            "constants": dict(self.constants),
            "tables": dict(self.tables),
            "working": dict(self.working),
            "beyond_window": self.beyond_window,
            "tokens": self.tokens,
            "compressed_tokens": self.compressed,
            **({"states": self.states} if self.states else {}),
            **({} if self.backend is None else {"backend": self.backend}),
        }

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size:,}" for name, size in self.parts.items() if size)
        working = "".join(f"; {name} during a pass {size:,} bytes" for name, size in self.working.items())
        tables = f", tables made from them {self.table_bytes:,} bytes" if self.tables else ""
        states = f"; other states {self.states:,} bytes" if self.states else ""
        backend = "" if self.backend is None else f"; attention by {self.backend}"
        beyond = f", {self.beyond_window:,} numbers beyond sliding windows not counted" if self.beyond_window else ""
        return (
            f"{self.tokens:,} tokens, {self.compressed:,.0f} compressed; {self.bytes:,} bytes ({parts}) "
            f"against {self.fp16_bytes:,} in 16 bits{beyond}; {self.measured_bits:.2f} bits per number "
            f"(nominal {self.nominal_bits:g}); shared constants {self.constant_bytes:,} bytes{tables}{working}"
            f"{states}{backend}"
        )


def report(layers: Sequence[CompressedLayer], nominal_bits: float, backend: str | None = None) -> CacheReport:
    """The report of a cache's layers."""
    parts: Counter[str] = Counter()
    constants: dict[int, tuple[str, Tensor]] = {}
    working: dict[str, int] = {}
    numbers, packed, tokens, streams, reserved, beyond, packed_numbers = 0, 0, 0, 0, 0, 0, 0.0
    for layer in layers:
        for stream in layer.streams:
            parts.update(stream.bytes_by_part())
            reserved += stream.reserved_bytes()
            if stream.store.joined:
                working["joined"] = max(working.get("joined", 0), stream.store.joined)
            constants |= {_identity(x): (name, x) for name, x in stream.codec.constants().items()}
        for plan in (layer.plan.keys, layer.plan.values):
            factors = {"down": plan.down, "up": plan.up}
            constants |= {_identity(x): (name, x) for name, x in factors.items() if x is not None}
        for reader in (layer.key_stream, layer.value_stream):  # the same one twice, where one serves both
            if reader.lengths:
                tokens = sum(reader.lengths) + len(reader.lengths) * layer.dropped
                packed += reader.packed_tokens
                packed_numbers += reader.packed_tokens * layer.numbers_per_token / 2
            streams += 1
        lengths = layer.key_stream.lengths
        seen = sum(seen_tokens(length + layer.dropped, layer.sliding_window) for length in lengths)
        numbers += seen * layer.numbers_per_token
        beyond += (sum(lengths) - seen) * layer.numbers_per_token
        if layer.cross_layer is not None and layer.cross_layer.peak:
            working["accumulator"] = layer.cross_layer.peak
        if layer.joined is not None and (peak := sum(each.peak for each in layer.joined)):
            working["components"] = peak
    named: Counter[str] = Counter()
    tables: Counter[str] = Counter()
    for name, tensor in constants.values():
        kind = tables if name.rpartition(".")[2] in TABLES else named
        kind[name] += tensor.numel() * tensor.element_size()
    compressed = packed / max(1, streams)
    return CacheReport(
        nominal_bits,
        dict(parts),
        dict(named),
        numbers,
        tokens,
        compressed,
        tables=dict(tables),
        working=working,
        backend=backend,
        reserved=reserved,
        beyond_window=beyond,
        packed_numbers=packed_numbers,
    )


def seen_tokens(tokens: int, window: int | None) -> int:
    """How many tokens of a row of `tokens` tokens the next query of a layer sees, itself not included; transformers'
    own cache holds as many. window: the layer's sliding window, the query included; None: it has none."""
    return tokens if window is None else min(tokens, window - 1)


def _identity(tensor: Tensor) -> int:
    """Equal for views of the same memory; empty tensors are each their own."""
    return tensor.data_ptr() or id(tensor)
