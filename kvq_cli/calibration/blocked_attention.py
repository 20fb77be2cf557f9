"""Causal attention with gradients on a CPU, as plain matrix products over blocks of queries.

The backward pass computes the weights again instead of keeping them, which would take more memory than all else of a
layer. Blocks above the diagonal are skipped. Products run at the full rate of the CPU's instructions, unlike those of
PyTorch's flash kernel for CPUs. A layer that is computed again in the backward pass (checkpointing) takes the output of
its attention from the first time: see `output_contexts`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvq_cli.upcast import gradient_dtype, product_dtype

NAME = "kvq_blocked"
BLOCK = 128
#: The outputs of the layer that a thread computes in checkpointing: `kept` of its first pass, `known` in the second.
_checkpointed = threading.local()


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

    `key` and `value` may have fewer heads. scaling: of the scores; None: 1 / sqrt(head_dim). Returns the output
    `[batch, tokens, query_heads, head_dim]` and None for the weights, as transformers expects. Raises ValueError for
    logit soft-capping and attention sinks (`s_aux`), which are not implemented.
    """
    if unknown := [name for name in ("softcap", "s_aux") if options.get(name) is not None]:
        raise ValueError(f"blocked attention does not implement {', '.join(unknown)}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    known, kept = (getattr(_checkpointed, name, None) for name in ("known", "kept"))
    out = _BlockedAttention.apply(query, key, value, scale, known.pop(0) if known else None)  # type: ignore[no-untyped-call]
    if kept is not None:
        kept.append(out.detach())
    return out.transpose(1, 2).contiguous(), None


def output_contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Contexts for the first and the second computation of a checkpointed layer: the second one takes the output of
    attention from the first. It would need 2 of the 7 products of a forward and backward pass."""
    outputs: list[Tensor] = []
    return _with_outputs("kept", outputs), _with_outputs("known", outputs)


@contextmanager
def _with_outputs(name: str, outputs: list[Tensor]) -> Iterator[None]:
    setattr(_checkpointed, name, outputs)
    try:
        yield
    finally:
        delattr(_checkpointed, name)


class _BlockedAttention(torch.autograd.Function):
    """softmax(scale q k^T) v of causal tokens, and its gradients by the usual five products per block of queries.
    known: the output, where it has been computed before."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, known: Tensor | None) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        if known is not None:
            return known
        blocks = _Blocks(query, key, scale)
        values = blocks.heads(value)
        out = torch.empty_like(blocks.queries)
        for block in blocks:
            torch.bmm(blocks.weights(block), values[:, : block.stop], out=blocks.rows(out, block))
        return blocks.ungrouped(out, query)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value = ctx.saved_tensors
        blocks = _Blocks(query, key, ctx.scale)
        values, grad_out = blocks.heads(value), blocks.grouped(gradients[0])
        # Operands of the products whose results are gradients of arguments. Softmax's backward pass subtracts gradients
        # of weights from their mean: those keep the dtype of scores.
        dtype = gradient_dtype(query)
        queries, keys, grad_rows = (x.to(dtype) for x in (blocks.queries, blocks.keys, grad_out))
        grad_query = torch.empty_like(queries)
        # Transposed: products whose left operand is long and transposed take a third longer.
        grad_key, grad_value = (x.new_zeros(len(x), x.shape[2], x.shape[1]) for x in (blocks.keys, values))
        buffer = torch.empty_like(blocks.buffer)
        for block in blocks:
            seen = slice(block.stop)
            weights = blocks.weights(block)
            _add_product(grad_value[:, :, seen], blocks.rows(grad_rows, block).mT, weights.to(dtype))
            grad = blocks.rows(grad_out, block)
            grad_weights = torch.bmm(grad, values[:, seen].mT, out=blocks.scores(block, buffer))
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype).to(dtype)
            torch.bmm(grad_scores, keys[:, seen], out=blocks.rows(grad_query, block))
            _add_product(grad_key[:, :, seen], blocks.rows(queries, block).mT, grad_scores)
        return (
            blocks.ungrouped(grad_query.mul_(ctx.scale), query),
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

    def __init__(self, query: Tensor, key: Tensor, scale: float) -> None:
        self._kv_heads, self._tokens = key.shape[1], query.shape[2]
        self._groups = query.shape[1] // self._kv_heads
        self._dtype = product_dtype(query)
        self.queries, self.keys = self.grouped(query).mul_(scale), self.heads(key)
        self.buffer = self.queries.new_empty(len(self.keys) * self._groups * min(BLOCK, self._tokens) * self._tokens)
        self._future = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=query.device).triu_(1)

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
        shape = len(self.keys), (block.stop - block.start) * self._groups, block.stop
        return buffer[: shape[0] * shape[1] * shape[2]].view(shape)

    def weights(self, block: slice) -> Tensor:
        """softmax of a block's scores."""
        rows = self.rows(self.queries, block)
        scores = torch.bmm(rows, self.keys[:, : block.stop].mT, out=self.scores(block, self.buffer))
        length = block.stop - block.start
        diagonal = scores.view(len(scores), self._groups, length, -1)[..., block.start :]
        diagonal.masked_fill_(self._future[:length, :length], float("-inf"))
        return torch.softmax(scores, dim=-1)


def register() -> None:
    """Register this attention with transformers under `NAME`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
