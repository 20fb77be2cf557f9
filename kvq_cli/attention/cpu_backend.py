"""Decoding on a CPU with compiled kernels, which multiply with packed numbers without writing decoded ones.

The same products as in `torch_backend`: where a codec, a rotation or a shape has no kernel, that module's are used, and
always for several queries per row, where matrix products pay for the decoding.
"""

from __future__ import annotations

from ctypes import byref

from torch import Tensor

from kvq_cli.attention import torch_backend
from kvq_cli.attention.cpu_formats import Reader, reader_of
from kvq_cli.attention.torch_backend import first_seen, prefill_attention
from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.cache.rows import Run
from kvq_cli.native.library import CHANNELS, HEADS, Shape, Turn, library, share

__all__ = ["available", "decode_attention", "prefill_attention"]


def available() -> bool:
    """Is there a compiled library on this machine? The first call builds it."""
    return library() is not None


def decode_attention(query: Tensor, layer: CompressedLayer, scaling: float) -> Tensor:
    """softmax(q K^T) V for one query per row, `[batch, query_heads, 1, head_dim]`; see `Backend`."""
    return torch_backend.decode_runs(_decode, query, layer, scaling)


def _decode(query: Tensor, layer: CompressedLayer, run: Run, scaling: float) -> Tensor:
    rows, heads, dim = query.shape[0], layer.key_stream.ring.shape[1], query.shape[3]
    q = (query.float() * scaling).reshape(rows, heads, -1, dim).contiguous()  # [rows, kv_heads, group, head_dim]
    start = first_seen(layer, run.tokens - 1)
    keys = values = turn = None
    if start == 0 and q.shape[2] <= HEADS and dim <= CHANNELS:
        keys, values = reader_of(layer.key_stream), reader_of(layer.value_stream)
        turn = keys and keys.format.turn(layer.rotation if layer.plan.keys.source == "pre_rope" else None)
    scores = _scores(q, keys, turn, run) if turn else torch_backend.key_scores(q, layer, run, start)
    weights = scores.softmax(dim=-1)
    out = _sum(weights, values, run, dim) if values else torch_backend.value_sum(weights, layer, run, start)
    return out.to(query.dtype).view(query.shape)


def _scores(q: Tensor, keys: Reader, turn: Turn, run: Run) -> Tensor:
    """As `torch_backend.key_scores`, for all tokens."""
    rows, heads, group, dim = q.shape
    shape, out = Shape(rows, run.rows.start, heads, group, dim), q.new_empty(rows, heads, group, run.tokens)
    turn.offset = run.offset
    pieces = keys.pieces(run)
    fixed = (len(pieces), pieces, byref(keys.format.codec), byref(turn), q.data_ptr(), out.data_ptr(), run.tokens)

    def call(begin: int, end: int) -> None:
        library().key_scores(byref(shape), begin, end, *fixed)

    share(call, heads, rows * heads * dim * run.tokens)
    return out


def _sum(weights: Tensor, values: Reader, run: Run, dim: int) -> Tensor:
    """As `torch_backend.value_sum`, for all tokens."""
    rows, heads, group, tokens = weights.shape
    shape, out = Shape(rows, run.rows.start, heads, group, dim), weights.new_empty(rows, heads, group, dim)
    pieces = values.pieces(run)
    fixed = (len(pieces), pieces, byref(values.format.codec), weights.data_ptr(), tokens, out.data_ptr())

    def call(begin: int, end: int) -> None:
        library().value_sums(byref(shape), begin, end, *fixed)

    share(call, heads, rows * heads * dim * tokens)
    return out
