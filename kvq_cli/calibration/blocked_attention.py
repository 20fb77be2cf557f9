"""Causal attention with gradients on a CPU, as plain matrix products over blocks of queries.

The backward pass computes the weights again instead of keeping them, which would take more memory than all else of a
layer. Blocks above the diagonal are skipped. Products run at the full rate of the CPU's instructions, unlike those of
PyTorch's flash kernel for CPUs. A layer that is computed again in the backward pass (checkpointing) takes the output of
its attention from the first time: see `output_contexts`.

It also separates the gradients through predictions that read a key and value packed: see `packed_gradients`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvq_cli.upcast import gradient_dtype, product_dtype

NAME = "kvq_blocked"
BLOCK = 128
#: Of a thread: `packed` of `packed_gradients`; in checkpointing, outputs of a layer, `kept` of its first pass, `known`
#: in the second.
_local = threading.local()


@dataclass(frozen=True)
class PackedGradients:
    """The part of keys' and values' gradients that comes through predictions which read them packed.

    near: the predictions of a token and of the `near` - 1 tokens behind it read its key and value in full precision.
    windows: sliding window of each attention module, or None. receive: called in the backward pass with a module and
    the gradients of its keys, as attention gets them, and values, `[batch, kv_heads, tokens, head_dim]`.
    """

    near: int
    windows: Mapping[nn.Module, int | None]
    receive: Callable[[nn.Module, Tensor, Tensor], None]


@contextmanager
def packed_gradients(packed: PackedGradients | None) -> Iterator[None]:
    """Inside the block, attention that this thread computes passes on these gradients, too."""
    _local.packed = packed
    try:
        yield
    finally:
        del _local.packed


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention of `query` `[batch, query_heads, tokens, head_dim]`, without padding or dropout.

    `key` and `value` may have fewer heads. scaling: of the scores; None: 1 / sqrt(head_dim). options: `softcap` of the
    scores and `s_aux`, a score of each query head that takes weight from all tokens, if the model has them. Returns the
    output `[batch, tokens, query_heads, head_dim]` and None for the weights, as transformers expects.
    """
    known, kept, packed = (getattr(_local, name, None) for name in ("known", "kept", "packed"))
    form = _Form(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=packed.windows[module] if packed else None,
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
        near=packed.near if packed else 0,
        receive=partial(packed.receive, module) if packed else None,
    )
    out = _BlockedAttention.apply(query, key, value, form, known.pop(0) if known else None)  # type: ignore[no-untyped-call]
    if kept is not None:
        kept.append(out.detach())
    return out.transpose(1, 2).contiguous(), None


def output_contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Contexts for the first and the second computation of a checkpointed layer, which another thread may make: the
    second one takes the output of attention from the first. It would need 2 of the 7 products of a forward and backward
    pass."""
    outputs: list[Tensor] = []
    packed = getattr(_local, "packed", None)
    return _with_outputs("kept", outputs, packed), _with_outputs("known", outputs, packed)


@contextmanager
def _with_outputs(name: str, outputs: list[Tensor], packed: PackedGradients | None) -> Iterator[None]:
    before = getattr(_local, "packed", None)
    setattr(_local, name, outputs)
    _local.packed = packed
    try:
        yield
    finally:
        _local.packed = before
        delattr(_local, name)


@dataclass(frozen=True)
class _Form:
    """How scores become weights: see `attention` and `PackedGradients`."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    near: int
    receive: Callable[[Tensor, Tensor], None] | None


class _BlockedAttention(torch.autograd.Function):
    """softmax(scale q k^T) v of causal tokens, and its gradients by the usual five products per block of queries.
    known: the output, where it has been computed before."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, form: _Form, known: Tensor | None) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.form = form
        if known is not None:
            return known
        blocks = _Blocks(query, key, form)
        values = blocks.heads(value)
        out = torch.empty_like(blocks.queries)
        for block in blocks:
            torch.bmm(blocks.weights(block), values[:, blocks.seen(block)], out=blocks.rows(out, block))
        return blocks.ungrouped(out, query)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value = ctx.saved_tensors
        form: _Form = ctx.form
        blocks = _Blocks(query, key, form)
        values, grad_out = blocks.heads(value), blocks.grouped(gradients[0])
        # Operands of the products whose results are gradients of arguments. Softmax's backward pass subtracts gradients
        # of weights from their mean: those keep the dtype of scores.
        dtype = gradient_dtype(query)
        queries, keys, grad_rows = (x.to(dtype) for x in (blocks.queries, blocks.keys, grad_out))
        grad_query = torch.empty_like(queries)
        # Transposed: products whose left operand is long and transposed take a third longer.
        shapes = [(len(x), x.shape[2], x.shape[1]) for x in (blocks.keys, values)]
        grad_key, grad_value = map(values.new_zeros, shapes)
        far_key, far_value = map(values.new_zeros, shapes if form.receive else [(0,), (0,)])
        buffer = torch.empty_like(blocks.buffer)
        for block in blocks:
            seen = blocks.seen(block)
            weights = blocks.weights(block)
            _add_product(grad_value[:, :, seen], blocks.rows(grad_rows, block).mT, weights.to(dtype))
            grad = blocks.rows(grad_out, block)
            grad_weights = torch.bmm(grad, values[:, seen].mT, out=blocks.scores(block, buffer))
            grad_scores = blocks.through_softcap(torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype))
            grad_scores = grad_scores.to(dtype)
            torch.bmm(grad_scores, keys[:, seen], out=blocks.rows(grad_query, block))
            _add_product(grad_key[:, :, seen], blocks.rows(queries, block).mT, grad_scores)
            if form.receive:
                for x in (weights, grad_scores):
                    blocks.remove_near(x, block)
                _add_product(far_value[:, :, seen], blocks.rows(grad_rows, block).mT, weights.to(dtype))
                _add_product(far_key[:, :, seen], blocks.rows(queries, block).mT, grad_scores)
        if form.receive:
            form.receive(far_key.mT.reshape(key.shape), far_value.mT.reshape(value.shape))
        return (
            blocks.ungrouped(grad_query.mul_(form.scale), query),
            grad_key.mT.reshape(key.shape).to(key.dtype),
            grad_value.mT.reshape(value.shape).to(value.dtype),
            None,
            None,
        )


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left right, in `total`'s dtype."""
    if left.dtype == total.dtype:
        total.baddbmm_(left, right)
    else:
        total += torch.bmm(left, right)


class _Blocks:
    """Blocks of queries, as slices of tokens, and their attention weights.

    Query heads that share a kv head stand in one matrix, block by block: `[batch * kv_heads, groups * tokens,
    head_dim]`.
    """

    def __init__(self, query: Tensor, key: Tensor, form: _Form) -> None:
        self._kv_heads, self._tokens = key.shape[1], query.shape[2]
        self._groups, self._form = query.shape[1] // self._kv_heads, form
        self._dtype = product_dtype(query)
        self.queries, self.keys = self.grouped(query).mul_(form.scale), self.heads(key)
        self.buffer = self.queries.new_empty(len(self.keys) * self._groups * min(BLOCK, self._tokens) * self._tokens)
        self._slope: Tensor | None = None  # of soft-capping, at the newest block's scores

    def __iter__(self) -> Iterator[slice]:
        for start in range(0, self._tokens, BLOCK):
            yield slice(start, min(start + BLOCK, self._tokens))

    def heads(self, x: Tensor) -> Tensor:
        """Keys or values, `[batch, kv_heads, tokens, head_dim]` -> `[batch * kv_heads, tokens, head_dim]`."""
        return x.to(self._dtype).flatten(0, 1)

    def grouped(self, x: Tensor) -> Tensor:
        """`[batch, query_heads, tokens, head_dim]` -> `[batch * kv_heads, groups * tokens, head_dim]`, a copy."""
        x = x.unflatten(1, (self._kv_heads, self._groups)).flatten(0, 1)  # [B * KV, groups, T, D]
        out = x.new_empty(len(x), self._groups * self._tokens, x.shape[-1], dtype=self._dtype)
        for block in self:
            self.rows(out, block).view(len(x), self._groups, -1, x.shape[-1]).copy_(x[:, :, block])
        return out

    def ungrouped(self, x: Tensor, like: Tensor) -> Tensor:
        """The inverse of `grouped`, in `like`'s shape and dtype."""
        out = torch.empty_like(like, memory_format=torch.contiguous_format)
        heads = out.view(len(x), self._groups, self._tokens, -1)
        for block in self:
            heads[:, :, block] = self.rows(x, block).view(len(x), self._groups, -1, x.shape[-1])
        return out

    def rows(self, x: Tensor, block: slice) -> Tensor:
        """The rows of a block's tokens in a matrix of `grouped`."""
        return x[:, block.start * self._groups : block.stop * self._groups]

    def scores(self, block: slice, buffer: Tensor) -> Tensor:
        """Room for a block's scores in `buffer`: `[batch * kv_heads, groups * block, tokens seen]`."""
        seen = self.seen(block)
        shape = len(self.keys), (block.stop - block.start) * self._groups, seen.stop - seen.start
        return buffer[: shape[0] * shape[1] * shape[2]].view(shape)

    def seen(self, block: slice) -> slice:
        """The keys that a block's queries see, all together."""
        window = self._form.window
        return slice(0 if window is None else max(0, block.start + 1 - window), block.stop)

    def _distances(self, block: slice, seen: slice) -> Tensor:
        """Tokens from each of these keys to each query of the block, `[queries, keys]`."""
        tokens = torch.arange(self._tokens, device=self.keys.device)
        return tokens[block, None] - tokens[None, seen]

    def weights(self, block: slice) -> Tensor:
        """softmax of a block's scores."""
        rows, seen, form = self.rows(self.queries, block), self.seen(block), self._form
        scores = torch.bmm(rows, self.keys[:, seen].mT, out=self.scores(block, self.buffer))
        if form.softcap is not None:
            scores.div_(form.softcap).tanh_()
            self._slope = 1 - scores.square()
            scores.mul_(form.softcap)
        by_query = scores.view(len(scores), self._groups, block.stop - block.start, -1)
        if form.window is None:
            diagonal = slice(block.start, block.stop)
            by_query[..., diagonal].masked_fill_(self._distances(block, diagonal) < 0, float("-inf"))
        else:
            distances = self._distances(block, seen)
            by_query.masked_fill_((distances < 0) | (distances >= form.window), float("-inf"))
        if form.sinks is None:
            return torch.softmax(scores, dim=-1)
        sinks = form.sinks.detach().to(scores.dtype).view(self._kv_heads, self._groups, 1, 1)
        sinks = sinks.repeat(len(scores) // self._kv_heads, 1, by_query.shape[2], 1)
        return torch.softmax(torch.cat([by_query, sinks], dim=-1), dim=-1)[..., :-1].reshape(scores.shape)

    def through_softcap(self, grad_scores: Tensor) -> Tensor:
        """Gradients of the newest block's scores before soft-capping."""
        return grad_scores if self._slope is None else grad_scores.mul_(self._slope)

    def remove_near(self, x: Tensor, block: slice) -> None:
        """Set a block's weights, or gradients of scores, of keys that its queries read in full precision to 0."""
        seen = self.seen(block)
        near = slice(max(seen.start, block.start + 1 - self._form.near), block.stop)
        by_query = x.view(len(x), self._groups, block.stop - block.start, -1)[..., near.start - seen.start :]
        by_query.masked_fill_(self._distances(block, near) < self._form.near, 0)


def register() -> None:
    """Register this attention with transformers under `NAME`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
