"""Attention of several queries on a GPU: the tokens that they see are decompressed once, in the model's dtype, and
PyTorch's fused attention computes the rest.

A launch costs as much for a token as for a thousand: tiles that suit a core's cache would be hundreds of launches.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvq_cli.attention.prefill_mask import Part, Sight, hidden_tokens
from kvq_cli.cache.modes import changes_stored_tensors

#: Keys or values that are decompressed at once; a row with more is computed in tiles.
NUMBERS = 1 << 27
#: Numbers of a mask, and of those that are kept for the next layers.
MASK_NUMBERS, KEPT_NUMBERS = 1 << 26, 1 << 27
#: Masks have room for a multiple of so many tokens: else fused attention would copy them.
_ALIGNED = 16


class Tokens(Protocol):
    """Keys or values of tokens."""

    def numbers(self, stored: bool, begin: int, end: int) -> Tensor:
        """Tokens [begin, end), as stored or in full precision: `[rows, kv_heads, end - begin, head_dim]`."""


def whole_attention(
    query: Tensor,
    keys: Callable[[], Tokens],
    values: Callable[[], Tokens],
    sight: Sight,
    first: int,
    past: int,
    scaling: float,
) -> Tensor:
    """Attention of the queries past, past + 1, ... to the tokens from `first` on that they see.

    query: `[rows, query_heads, queries, head_dim]`; the result has its shape and dtype. keys, values: decompress them.
    """
    parts = _parts(sight, first, past, past + query.shape[2])
    k = _joined(keys(), [(part.key_stored, part.start, part.stop) for part in parts], query.dtype)
    v = _joined(values(), [(part.value_stored, part.start, part.stop) for part in parts], query.dtype)
    group = query.shape[1] // k.shape[1]
    grouped, outs = query.unflatten(1, (k.shape[1], group)), []
    for begin, end in _blocks(query.shape[2], group * k.shape[2]):
        mask = _bias(sight, past + begin, past + end, tuple(parts), group, query.dtype, query.device)
        q = grouped[:, :, :, begin:end].flatten(2, 3)  # queries of the heads that share keys, one after another
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        outs.append(out.unflatten(2, (group, end - begin)))
    return (outs[0] if len(outs) == 1 else torch.cat(outs, dim=3)).flatten(1, 2)


def _joined(tokens: Tokens, parts: list[tuple[bool, int, int]], dtype: torch.dtype) -> Tensor:
    """The parts one after another, `[rows, kv_heads, tokens, head_dim]`; what they were decompressed to is freed."""
    numbers = [tokens.numbers(*part) for part in parts]
    return (numbers[0] if len(numbers) == 1 else torch.cat(numbers, dim=2)).to(dtype)


def _parts(sight: Sight, first: int, past: int, tokens: int) -> list[Part]:
    """Tokens of each run that any of the queries [past, tokens) sees."""
    found = []
    for number, (oldest, newest) in enumerate(zip(sight.runs(past), sight.runs(tokens - 1), strict=True)):
        start, stop = max(oldest.start, first), min(newest.stop, tokens)
        if start < stop:
            found.append(Part(number, oldest.key_stored, oldest.value_stored, start, stop))
    return found


def _blocks(queries: int, columns: int) -> Iterator[tuple[int, int]]:
    """Blocks of the queries whose masks, of so many numbers a query, have at most `MASK_NUMBERS`."""
    size = max(1, MASK_NUMBERS // columns)
    for begin in range(0, queries, size):
        yield begin, min(begin + size, queries)


#: The newest masks; threads add to them.
_kept: OrderedDict[Hashable, Tensor] = OrderedDict()
_keeping = threading.Lock()


def forget_masks() -> None:
    """Free the masks that are kept."""
    with _keeping:
        _kept.clear()


def _bias(sight: Sight, begin: int, end: int, parts: tuple[Part, ...], group: int, *kind: Any) -> Tensor:
    """What is added to scores of the queries [begin, end), for each query head of a group: `[group * queries, tokens]`,
    0 or -inf. kind: dtype and device. All layers that see alike have the same."""
    key = sight, begin, end, parts, group, *kind
    mask = _kept.get(key)
    if mask is None:
        mask = _made(*key)
        with _keeping:
            _kept[key] = mask
            while sum(map(Tensor.numel, _kept.values())) > KEPT_NUMBERS:
                _kept.popitem(last=False)
    return mask


@changes_stored_tensors
def _made(
    sight: Sight, begin: int, end: int, parts: tuple[Part, ...], group: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Every query sees a token, itself."""
    hidden = hidden_tokens(sight, begin, end, tuple((part.run, part.start, part.stop) for part in parts), device)
    queries, tokens = hidden.shape
    bias = torch.zeros(group, queries, -(-tokens // _ALIGNED) * _ALIGNED, dtype=dtype, device=device)
    bias[:, :, :tokens].masked_fill_(hidden, -torch.inf)
    return bias.flatten(0, 1)[:, :tokens]
