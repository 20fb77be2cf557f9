"""One layer of a compressed cache: its keys, its values, and the forward pass that is under way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvq_cli.cache.cross_layer import CrossLayerSum, DifferenceStream
from kvq_cli.cache.prompt_stream import PromptStream, new_stream
from kvq_cli.cache.rematerialize import Rematerialize, RematerializedStream
from kvq_cli.cache.rows import Forward, RowGroup, would_sync
from kvq_cli.cache.stream import Stream
from kvq_cli.codecs.base import Prompt, side_dtype
from kvq_cli.codecs.salient import attention_received
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.methods.base import LayerPlan


class CompressedLayer(CacheLayerMixin):
    """Keys and values of one layer, compressed as `plan` says.

    A forward pass over the layer is: `begin` (from the decoder's pre-hook), `capture_key` (the key before RoPE, where
    the plan caches that) or `capture_input` (the layer input, likewise), `update` (transformers, with the key after
    RoPE), `absorb` (with the query), then attention, which reads the streams, and `release`.

    rotation: how keys before RoPE are rotated when they are read. sliding_window: tokens that a query sees.
    rematerialize: where the plan caches the layer input, how keys before RoPE and values are computed of it.
    cross_layer: the sum that the layers share, where the plan says so.
    """

    is_sliding = False  # tokens outside a sliding window are kept, and masked by the attention
    is_compileable = False
    is_croppable = False  # only as far as `crop` says
    supports_early_init = False

    def __init__(
        self,
        index: int,
        plan: LayerPlan,
        rotation: Any = None,
        sliding_window: int | None = None,
        rematerialize: tuple[Rematerialize | None, Rematerialize | None] = (None, None),
        cross_layer: CrossLayerSum | None = None,
    ) -> None:
        super().__init__()
        self.index, self.plan, self.rotation, self.sliding_window = index, plan, rotation, sliding_window
        self.cross_layer = cross_layer if plan.cross_layer else None
        #: What is stored: keys' and values' numbers, or one stream that serves both.
        make = DifferenceStream if self.cross_layer else new_stream
        self.streams: tuple[Stream, ...] = tuple(make(kept) for kept in plan.kept)
        self._prompt_streams = [stream for stream in self.streams if isinstance(stream, PromptStream)]
        #: What attention reads: keys and values.
        self.key_stream, self.value_stream = (
            stream if one is None else RematerializedStream(stream, one)
            for stream, one in zip((self.streams[0], self.streams[-1]), rematerialize, strict=True)
        )
        #: What weighted sums over tokens are taken of, for one query per row, and what makes sums of values of them.
        self.summed: tuple[Stream | RematerializedStream, Callable[[Tensor], Tensor] | None] = (self.value_stream, None)
        if rematerialize[1] is not None and rematerialize[1].sums is not None:
            self.summed = (self.streams[-1], rematerialize[1].sums)
        self.columns = self.kv_heads = self.numbers_per_token = 0
        self.forward: Forward | None = None
        #: Full-precision keys and values that were not yet packed when the forward pass began, per group of rows.
        self.tails: list[tuple[Tensor | None, Tensor | None]] = []
        #: The pass that was announced and whose keys and values have not come yet.
        self.expected: Forward | None = None
        self._key: Tensor | None = None
        self._input: Tensor | None = None
        #: What came for each stream and is not yet in it.
        self._arrived: tuple[Tensor, ...] = ()

    def reserve(self, tokens: int) -> None:
        """Make room for rows of `tokens` tokens at once, when the first of them come."""
        for stream in self.streams:
            stream.reserve(tokens)

    # -- a forward pass ------------------------------------------------------------------------------------------

    def begin(self, forward: Forward) -> None:
        """Announce the pass whose keys and values the next `update` brings."""
        self.expected, self._key, self._input = forward, None, None

    def capture_input(self, x: Tensor) -> None:
        """The pass's layer input, `[batch, columns, hidden_size]`."""
        self._input = x.detach()

    def capture_key(self, key: Tensor) -> None:
        """The pass's keys before RoPE, `[batch, kv_heads, columns, head_dim]`."""
        self._key = key

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Take in the keys (after RoPE) and values `[batch, kv_heads, columns, head_dim]` of the announced pass.

        Returns them as they are: the layer never gives out a decompressed cache. KvqError for numbers that are not
        finite, and outside `attach`.
        """
        forward, self.expected = self.expected, None
        if forward is None:
            raise KvqError("this compressed cache works only with the model and inside the attach() that it is from")
        self._arrived = self._kept(key_states, value_states)
        self._key = self._input = None
        self._check_finite(forward)
        self.kv_heads = key_states.shape[1]
        self.numbers_per_token = self.kv_heads * (key_states.shape[3] + value_states.shape[3])
        self.columns += forward.columns
        self.forward, self.is_initialized = forward, True
        return key_states, value_states

    def _kept(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """What the streams are to keep of a pass."""
        source = self.plan.keys.source
        if source == "input":
            if self._input is None:
                raise KvqError(f"layer {self.index}: the layer input was not seen")
            return tuple(plan.latents(self._input) for plan in self.plan.kept)
        keys = keys if source == "post_rope" else self._key
        if keys is None:
            raise KvqError(f"layer {self.index}: the key before RoPE was not seen")
        return keys.detach(), values.detach()

    def absorb(self, query: Tensor) -> None:
        """Append what came; `query` `[batch, query_heads, columns, head_dim]` after RoPE is that of the pass."""
        arrived, self._arrived = self._arrived, ()
        self._keep_tails(self.forward)
        if self._prompt_streams:
            self._announce_prompts(*arrived, query.detach())
        if self.cross_layer is not None:
            self.cross_layer.enter(self.plan, self.streams[0], arrived[0], self.forward)
        for stream, x in zip(self.streams, arrived, strict=True):
            stream.append(x, self.forward.row_groups, self.forward.cache_position)
        if self.cross_layer is not None:
            self.cross_layer.leave(self.plan, self.streams[0], self.forward)

    def advance(self, forward: Forward) -> None:
        """Count a pass whose numbers are in their places: one that was recorded and has been repeated."""
        self.forward = forward
        self.columns += forward.columns
        for stream in self.streams:
            stream.advance(forward.row_groups)

    def release(self) -> None:
        """After the pass's attention: forget what only that needed."""
        self.tails = []
        if self.cross_layer is not None:
            self.streams[0].close()

    def _announce_prompts(self, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        """Give the streams whose codecs are fit to prompts what these need of the pass."""
        prompts: dict[int, Prompt] = {}
        saliency: dict[int, Tensor] = {}
        needs_saliency = any(stream.needs_saliency for stream in self._prompt_streams)
        for group in self.forward.row_groups:
            first = group.past == 0 and group.tokens > 0
            if not (first or needs_saliency):
                continue
            key, value, query = (x[group.rows, :, group.pads :] for x in (keys, values, queries))
            if first:
                if self.plan.keys.source == "pre_rope":
                    query = self.rotation.undo(query.float(), group.offset).to(query.dtype)
                prompts[group.rows.start] = Prompt(key, value, query)
            elif (received := _saliency(self.streams[0], group, key, query)) is not None:
                saliency[group.rows.start] = received
        for stream in self._prompt_streams if prompts or saliency else ():
            stream.announce(self.forward.row_groups, prompts, saliency)

    def _keep_tails(self, forward: Forward) -> None:
        """Before they may get packed: what several new queries still have to see in full precision."""
        self.tails = []
        if forward.columns > 1 and not forward.is_first:
            for group in forward.row_groups:
                self.tails.append(
                    tuple(_recent(s, group.rows, group.past) for s in (self.key_stream, self.value_stream))
                )

    def _check_finite(self, forward: Forward) -> None:
        if self._arrived[0].is_meta or would_sync(self._arrived[0].device, forward.columns):
            return  # there are no numbers, or it was checked at the prompt
        for group in forward.row_groups:
            for name, x, stream in zip(("keys", "values"), self._arrived, self.streams, strict=False):
                x = x[group.rows, :, group.pads :]
                if x.numel() == 0:
                    continue
                # One sum is finite only if all numbers are; 32 bits cannot overflow on numbers of 16.
                if not math.isfinite(x.sum(dtype=torch.float32).item()):
                    raise KvqError(f"layer {self.index}: the {name} contain NaN or infinity (try --dtype float32)")
                most = torch.finfo(side_dtype(x.dtype)).max
                if x.dtype == torch.float32 and stream.codec.nominal_bits < 16 and x.abs().amax() > most:
                    raise KvqError(
                        f"layer {self.index}: the {name} have numbers beyond {most:g}, which scales and zero-points in "
                        "16 bits cannot hold (try --dtype bfloat16)"
                    )

    # -- what transformers asks ----------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the streams allocate when the first tokens come."""

    def get_seq_length(self) -> int:
        """Columns seen, pads included."""
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def offload(self) -> None:
        raise UsageError("a compressed cache cannot be offloaded")

    prefetch = offload

    def reset(self) -> None:
        for stream in self.streams:
            stream.reset()
        self.columns, self.is_initialized, self.forward, self.tails = 0, False, None, []

    # -- rows ----------------------------------------------------------------------------------------------------

    def select(self, index: Tensor) -> None:
        """Keep the rows `index` (int64), in that order."""
        for stream in self.streams:
            stream.select(index)

    def croppable(self, tokens: int) -> bool:
        """Are the last `tokens` tokens of all rows still in full precision?"""
        return all(stream.croppable(tokens) for stream in self.streams)

    def crop(self, tokens: int) -> None:
        """Remove the last `tokens` tokens (a count, checked by the cache)."""
        for stream in self.streams:
            stream.crop(tokens)
        self.columns -= tokens


def _saliency(stream: Stream, group: RowGroup, keys: Tensor, queries: Tensor) -> Tensor | None:
    """The attention received by the tokens that are packed when `keys` come, `[rows, kv_heads, tokens]`, if any are.

    stream: the keys'; values are packed with the same windows.
    """
    block, window = stream.ready(group, keys), stream.window
    if block is None:
        return None
    # Each flush is seen by the query of the token with which it is packed, so that passes may be cut anywhere.
    column = window.sinks + window.packed(group.past) + window.recent - 1 - group.past
    received = []
    for flush in block.split(window.flush, dim=2):
        column += window.flush
        received.append(attention_received(queries[:, :, column : column + 1], flush))
    return torch.cat(received, dim=2)


def _recent(stream: Stream, rows: slice, tokens: int) -> Tensor | None:
    """A copy of the full-precision tokens after the packed ones; None where there are none."""
    _, last = stream.split(tokens)
    pieces = [x for _, _, x in stream.exact(rows, tokens, last, tokens)]
    return torch.cat(pieces, dim=2) if pieces else None
