# DECISION OF THE LEAD (09:22): no C code in kvq. DESIGN says Triton on GPU, PyTorch on CPU, one way each. Remove kvq_cli/native and
# cpu_backend.py and every use (nearest.py, backend.py, pyproject.toml); keep the best plain-PyTorch path; commit by 09:35 and report.
"""Decoding on a CPU with compiled kernels, which multiply with packed numbers without writing decoded ones.

The same products as in `torch_backend`, stream by stream: where a codec, a rotation or a shape has no kernel here, that
module's are used, and always for several queries per row, where matrix products pay for the decoding.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvq_cli.attention import torch_backend
from kvq_cli.attention.rotary import Rotation
from kvq_cli.attention.torch_backend import first_seen, prefill_attention
from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.cache.rows import Run
from kvq_cli.cache.stream import Stream
from kvq_cli.codecs.base import Codec, Packed
from kvq_cli.codecs.codebook import CodebookCodec
from kvq_cli.codecs.uniform import UniformCodec
from kvq_cli.native.library import library, share

__all__ = ["available", "decode_attention", "prefill_attention"]

#: The constants of the C file.
TURNS, MAX_LANES, MAX_CHANNELS, MAX_GROUP = 64, 2048, 256, 8


def available() -> bool:
    """Is there a compiled library on this machine? The first call builds it."""
    return library() is not None


def decode_attention(query: Tensor, layer: CompressedLayer, scaling: float) -> Tensor:
    """softmax(q K^T) V for one query per row, `[batch, query_heads, 1, head_dim]`; see `Backend`."""
    return torch_backend.decode_runs(_decode, query, layer, scaling)


def _decode(query: Tensor, layer: CompressedLayer, run: Run, scaling: float) -> Tensor:
    heads, dim = layer.key_stream.ring.shape[1], query.shape[3]
    q = (query.float() * scaling).reshape(query.shape[0], heads, -1, dim).contiguous()
    turn = layer.rotation if layer.plan.keys.source == "pre_rope" and layer.rotation.style != "none" else None
    start = first_seen(layer, run.tokens - 1)
    keys, values = (_kernel(stream.codec) for stream in (layer.key_stream, layer.value_stream))
    if start == 0 and keys is not None and keys.has_scores(q, turn):
        scores = _key_scores(q, layer.key_stream, run, turn, keys)
    else:
        scores = torch_backend.key_scores(q, layer, run, start)
    weights = scores.softmax(dim=-1)
    if start == 0 and values is not None and values.has_sum(q):
        out = _value_sum(weights, layer.value_stream, run, values)
    else:
        out = torch_backend.value_sum(weights, layer, run, start)
    return out.to(query.dtype).view(query.shape)


def _key_scores(q: Tensor, stream: Stream, run: Run, turn: Rotation | None, kernel: _Codebook | _Uniform) -> Tensor:
    """As `torch_backend.key_scores`, for all tokens."""
    out = q.new_empty(*q.shape[:3], run.tokens)
    exact = list(stream.exact(run.rows, run.tokens, 0, run.tokens, torch_backend.DECODE_TILE))
    packed = list(stream.segments(run.rows, run.tokens))
    queries = iter([])
    if turn is not None:
        # One query for each exact piece, then one for every TURNS-th block of each packed one.
        blocks = [range(first, last, TURNS * kernel.tokens) for first, last, _ in packed]
        starts = [first for first, _, _ in exact] + [start for piece in blocks for start in piece]
        turned = turn.back(q, tuple(start + run.offset for start in starts))
        queries = iter(turned.split([1] * len(exact) + [len(piece) for piece in blocks]))
    for first, last, x in exact:
        one, x = (q, x.float()) if turn is None else (next(queries)[0], turn.ahead(x.float()))
        torch.matmul(one, x.transpose(2, 3), out=out[..., first:last])
    for first, _, piece in packed:
        kernel.scores(q[None] if turn is None else next(queries), piece, turn, out[..., first:], run.tokens)
    return out


def _value_sum(weights: Tensor, stream: Stream, run: Run, kernel: _Codebook | _Uniform) -> Tensor:
    """As `torch_backend.value_sum`, for all tokens."""
    out = kernel.sum(weights, list(stream.segments(run.rows, run.tokens)))
    for first, last, x in stream.exact(run.rows, run.tokens, 0, run.tokens):
        out += weights[..., first:last] @ x.float()
    return out


# -- kernels of the codecs -----------------------------------------------------------------------------------------

_KERNELS: WeakKeyDictionary[Codec, _Codebook | _Uniform | None] = WeakKeyDictionary()


def _kernel(codec: Codec) -> _Codebook | _Uniform | None:
    """The kernels of a codec; None where it has none."""
    if codec not in _KERNELS:
        kind = {CodebookCodec: _Codebook, UniformCodec: _Uniform}.get(type(codec))
        _KERNELS[codec] = kind(codec) if kind is not None and kind.fits(codec) else None
    return _KERNELS[codec]


class _Codebook:
    """Codebooks of 256 entries of 2, 4 or 8 numbers. Lanes of a block: code column, token, channel of the column."""

    def __init__(self, codec: CodebookCodec) -> None:
        self.tokens, self.channels = codec.block
        heads, groups, entries, size = codec.centroids.shape
        self.dim, self.columns = codec.head_dim, codec.head_dim // self.channels
        self.table = codec.centroids.float().reshape(-1, size)
        book = torch.arange(heads * groups, dtype=torch.int32).view(heads, groups) * entries
        self.book = book.repeat_interleave(self.columns // groups, dim=1).contiguous()
        column = torch.arange(self.dim).view(self.columns, 1, self.channels)
        self.lane_channel = column.expand(-1, self.tokens, -1).flatten()
        named = codec.constants()
        self.normalized = "std" in named or "mean" in named
        one, zero = torch.ones(heads, self.dim), torch.zeros(heads, self.dim)
        given = (named.get("std", one), named.get("mean", zero))
        self.std, self.mean = (x.float().reshape(heads, self.dim) for x in given)
        self.lane_std, self.lane_mean = (x[:, self.lane_channel].contiguous() for x in (self.std, self.mean))

    @staticmethod
    def fits(codec: CodebookCodec) -> bool:
        _, _, entries, size = codec.centroids.shape
        columns = codec.head_dim // codec.block[1]
        return entries == 256 and size in (2, 4, 8) and columns % 2 == 0 and columns * size <= MAX_LANES

    def has_scores(self, q: Tensor, turn: Rotation | None) -> bool:
        return turn is None or (turn.style == "half" and turn.width // 2 % self.channels == 0)

    def has_sum(self, q: Tensor) -> bool:
        return True

    def scores(self, queries: Tensor, packed: Packed, turn: Rotation | None, out: Tensor, row: int) -> None:
        """Write q . k of a packed run into `out` (rows `row` numbers apart). queries: `[starts, B, H, G, D]`."""
        codes, (batch, heads, group, _) = packed.parts["codes"].tensor, queries.shape[1:]
        q = queries.index_select(4, self.lane_channel)
        cos, sin = (None, None) if turn is None else turn.keep(("lanes", *self._block), lambda: self._tables(turn))
        pairs = 0 if turn is None else cos.shape[1]
        shape = (group, codes.shape[2], self.columns, *self._block)

        def call(begin: int, end: int) -> None:
            library().codebook_scores(
                *(batch, heads, begin, end, *shape, *_packed(codes), _at(self.table), _at(self.book)),
                *(_at(self.lane_std), _at(self.lane_mean), _at(q), pairs, _at(cos), _at(sin), _at(out), row),
            )

        share(call, heads, packed.tokens * batch * heads * self.dim)

    def sum(self, weights: Tensor, pieces: list[tuple[int, int, Packed]]) -> Tensor:
        """Sum of weight times value over packed runs: weights `[B, H, G, tokens]` -> `[B, H, G, D]`."""
        batch, heads, group, row = weights.shape
        lanes = weights.new_zeros(batch, heads, group, len(self.lane_channel))
        total = weights.new_zeros(batch, heads, group, 1)
        for first, last, packed in pieces:
            codes, own = packed.parts["codes"].tensor, weights[..., first:last]
            shape = (group, codes.shape[2], self.columns, *self._block)

            def call(begin: int, end: int, codes=codes, own=own, shape=shape) -> None:
                library().codebook_sums(
                    *(batch, heads, begin, end, *shape, *_packed(codes), _at(self.table), _at(self.book)),
                    *(_at(own), row, _at(lanes)),
                )

            share(call, heads, packed.tokens * batch * heads * self.dim)
            if self.normalized:
                total += own.sum(dim=-1, keepdim=True)
        out = lanes.unflatten(3, (self.columns, self.tokens, self.channels)).sum(dim=4).flatten(3)
        return out * self.std.unsqueeze(1) + total * self.mean.unsqueeze(1) if self.normalized else out

    @property
    def _block(self) -> tuple[int, int]:
        return self.tokens, self.channels

    def _tables(self, turn: Rotation) -> tuple[Tensor, Tensor]:
        """cos, sin `[TURNS, pairs]` of the first lane of each pair in each of `TURNS` blocks."""
        size = self.tokens * self.channels
        lane = torch.arange(turn.width // 2 // self.channels * size)
        token, channel = lane % size // self.channels, self.lane_channel[lane]
        position = torch.arange(TURNS).unsqueeze(1) * self.tokens + token
        angles = position.float() * turn.frequencies[channel]
        return angles.cos() * turn.scale, angles.sin() * turn.scale


class _Uniform:
    """Uniform codes of 1, 2, 4 or 8 bits: keys in groups of tokens, values in groups of channels."""

    tokens = 1

    def __init__(self, codec: UniformCodec) -> None:
        self.bits, self.axis, self.group, self.dim = codec.bits, codec.axis, codec.group, codec.head_dim

    @staticmethod
    def fits(codec: UniformCodec) -> bool:
        return codec.bits in (1, 2, 4, 8) and codec.head_dim <= MAX_CHANNELS

    def has_scores(self, q: Tensor, turn: Rotation | None) -> bool:
        return self.axis == "channel" and turn is None and q.shape[2] <= MAX_GROUP

    def has_sum(self, q: Tensor) -> bool:
        return self.axis == "token" and q.shape[2] <= MAX_GROUP

    def scores(self, queries: Tensor, packed: Packed, turn: None, out: Tensor, row: int) -> None:
        """As `_Codebook.scores`."""
        codes, (batch, heads, group, dim) = packed.parts["codes"].tensor, queries.shape[1:]
        scale, zero = (packed.parts[name].tensor.float().contiguous() for name in ("scale", "zero"))
        shape = (group, packed.tokens, dim, self.bits, codes.shape[3], self.group)

        def call(begin: int, end: int) -> None:
            library().uniform_scores(
                *(batch, heads, begin, end, *shape, *_packed(codes), _at(scale), _at(zero), _at(queries)),
                *(_at(out), row),
            )

        share(call, heads, packed.tokens * batch * heads * dim)

    def sum(self, weights: Tensor, pieces: list[tuple[int, int, Packed]]) -> Tensor:
        """As `_Codebook.sum`."""
        batch, heads, group, row = weights.shape
        out = weights.new_zeros(batch, heads, group, self.dim)
        for first, last, packed in pieces:
            codes, own = packed.parts["codes"].tensor, weights[..., first:last]
            scale, zero = (packed.parts[name].tensor.float().contiguous() for name in ("scale", "zero"))
            shape = (group, packed.tokens, self.dim, self.bits, codes.shape[3], self.group)

            def call(begin: int, end: int, codes=codes, own=own, scale=scale, zero=zero, shape=shape) -> None:
                library().uniform_sums(
                    *(batch, heads, begin, end, *shape, *_packed(codes), _at(scale), _at(zero)),
                    *(_at(own), row, _at(out)),
                )

            share(call, heads, packed.tokens * batch * heads * self.dim)
        return out


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _packed(codes: Tensor) -> tuple[int, int, int, int]:
    """Address of a packed part and its strides over batch, head and block."""
    return codes.data_ptr(), *codes.stride()[:3]
