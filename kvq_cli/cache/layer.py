"""One layer of a compressed cache: its keys, its values, and the current forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvq_cli.cache.cross_layer import CrossLayerSum, DifferenceStream
from kvq_cli.cache.joined import JoinedLayers, JoinedStream
from kvq_cli.cache.modes import changes_stored_tensors
from kvq_cli.cache.prompt_stream import PromptStream, new_stream
from kvq_cli.cache.rematerialize import Rematerialize, RematerializedStream
from kvq_cli.cache.rows import Forward, RowSpan, would_sync
from kvq_cli.cache.sliding import Sliding
from kvq_cli.cache.snapshot import Snapshot
from kvq_cli.cache.stream import Stream, StreamReader
from kvq_cli.codecs.base import Prompt, side_dtype
from kvq_cli.codecs.salient import attention_received
from kvq_cli.errors import KvqError, NotFiniteError, UsageError
from kvq_cli.methods.base import LayerPlan


class CompressedLayer(CacheLayerMixin):
    """Keys and values of one layer, compressed as `plan` says.

    A forward pass over the layer is: `begin` (from the decoder's pre-hook), `capture_key` (the key before RoPE, where
    the plan caches that) or `capture_input` (the layer input, likewise), `update` (transformers, with the key after
    RoPE), `absorb` (with the query), then attention, which reads the streams, and `release`.

    With a sliding window, `release` drops tokens that no later query sees, some time after: see `Sliding`. The streams
    and `forward` then count the tokens of each row from behind them.

    rotation: how keys before RoPE are rotated when they are read. sliding_window: tokens that a query sees.
    rematerialize: where the plan caches the layer input, how keys before RoPE and values are computed from it.
    cross_layer: the sum that the layers share, where the plan says so. joined: of keys and of values, the codes that
    they share, likewise.

    streams: what is stored, keys and values, or one stream that serves both. key_stream, value_stream: what attention
    reads. summed: the stream that is reduced by the attention weights of a single query, and its projection to values.
    tails: of each row spans, the keys and values in full precision that were not yet packed when the pass began.
    """

    is_sliding = False  # masks are of all tokens, also of those that were dropped
    is_compileable = False
    is_croppable = False  # only as far as `crop` says
    supports_early_init = False
    holds_state = False  # beside keys and values

    def __init__(
        self,
        index: int,
        plan: LayerPlan,
        rotation: Any = None,
        sliding_window: int | None = None,
        rematerialize: tuple[Rematerialize | None, Rematerialize | None] = (None, None),
        cross_layer: CrossLayerSum | None = None,
        joined: tuple[JoinedLayers, JoinedLayers] | None = None,
    ) -> None:
        super().__init__()
        self.index, self.plan, self.rotation, self.sliding_window = index, plan, rotation, sliding_window
        self._sliding = Sliding.of(plan, sliding_window)
        self.cross_layer, self._rematerialize = cross_layer if plan.cross_layer else None, rematerialize
        self.joined = joined if plan.joins_layers else None
        self.streams: tuple[Stream, ...]
        if self.joined is not None:
            self.streams = tuple(map(JoinedStream, plan.kept, self.joined))
        else:
            new = DifferenceStream if self.cross_layer else new_stream
            self.streams = tuple(new(stream) for stream in plan.kept)
        self._prompt_streams = [stream for stream in self.streams if isinstance(stream, PromptStream)]
        self.key_stream = _read_by(self.streams[0], rematerialize[0])
        self.value_stream = _read_by(self.streams[-1], rematerialize[1])
        self.summed: tuple[StreamReader, Callable[[Tensor], Tensor] | None] = (self.value_stream, None)
        if rematerialize[1] is not None and rematerialize[1].sums is not None:
            self.summed = (self.streams[-1], rematerialize[1].sums)
        self.columns = self.kv_heads = self.numbers_per_token = 0
        #: Whether a pass is being added, or was interrupted while it was: streams may have it in part.
        self.absorbing = False
        self.forward: Forward | None = None
        self.tails: list[tuple[Tensor | None, Tensor | None]] = []
        #: The pass that was announced and whose keys and values have not come yet.
        self.expected: Forward | None = None
        self._key: Tensor | None = None
        self._input: Tensor | None = None
        #: The numbers of the pass for each stream, until `absorb`; layer inputs, latents and short passes until
        #: `release`.
        self._arrived: tuple[Tensor, ...] = ()

    def reserve(self, tokens: int) -> None:
        """Make room for rows of `tokens` tokens at once, when the first of them come."""
        if self._sliding is not None:
            tokens = min(tokens, self._sliding.longest)
        for stream in self.streams:
            stream.reserve(tokens)

    @changes_stored_tensors
    def allow_rollback(self, tokens: int) -> None:
        """Let `crop` remove the newest `tokens` tokens, of those that come from now on."""
        for stream in self.streams:
            stream.allow_rollback(tokens)
        if self._sliding is not None:
            self._sliding = replace(self._sliding, rollback=max(tokens, self._sliding.rollback))

    # -- a forward pass ------------------------------------------------------------------------------------------

    def begin(self, forward: Forward) -> None:
        """Announce the pass whose keys and values the next `update` brings."""
        self.expected, self._key, self._input = forward, None, None

    def capture_input(self, x: Tensor) -> None:
        """Store the layer input of the pass, `[batch, columns, hidden_size]`."""
        self._input = x.detach()

    def capture_key(self, key: Tensor) -> None:
        """Store the keys of the pass before RoPE, `[batch, kv_heads, columns, head_dim]`."""
        self._key = key

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Receive the keys (after RoPE) and values `[batch, kv_heads, columns, head_dim]` of the announced pass.

        Returns them as they are: the layer never gives out a decompressed cache. KvqError for numbers that are not
        finite, and outside `attach`.
        """
        forward, self.expected = self.expected, None
        if forward is None:
            raise KvqError("this cache belongs to another or closed attach()")
        self._arrived = self._to_cache(key_states, value_states)
        self._key = self._input = None
        self._check_finite(forward)
        self.kv_heads = key_states.shape[1]
        self.numbers_per_token = self.kv_heads * (key_states.shape[3] + value_states.shape[3])
        self.forward, self.is_initialized = forward.behind(self.dropped), True
        return key_states, value_states

    def _to_cache(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """The numbers of the pass that each stream caches."""
        source = self.plan.keys.source
        if source == "input":
            if self._input is None:
                raise KvqError(f"layer {self.index}: the layer input was not captured")
            return tuple(plan.latents(self._input) for plan in self.plan.kept)
        if source == "post_rope":
            return keys.detach(), values.detach()
        if self._key is None:
            raise KvqError(f"layer {self.index}: the key before RoPE was not captured")
        return self._key.detach(), values.detach()

    @changes_stored_tensors
    def absorb(self, query: Tensor) -> None:
        """Add the keys and values of the pass to the streams; `query` `[batch, query_heads, columns, head_dim]` after
        RoPE is that of the pass. The pass is counted last: one that is interrupted here leaves `absorbing`, or layers
        of unequal columns."""
        forward = self.forward
        if forward is None:
            raise KvqError(f"layer {self.index}: attention without keys and values")
        self.absorbing = True
        arrived, self._arrived = self._arrived, ()
        self._keep_tails(forward)
        if self.plan.keys.source == "input" or forward.is_short:
            self._arrived = arrived
        if self._prompt_streams:
            self._announce_prompts(forward, arrived[0], arrived[1], query.detach())
        if self.cross_layer is not None:
            self._add_differences(self.cross_layer, forward, arrived[0])
        else:
            for stream, x in zip(self.streams, arrived, strict=True):
                stream.append(x, forward.row_spans, forward.cache_position)
        self.columns += forward.columns
        self.absorbing = False

    @property
    def arrived(self) -> tuple[Tensor, Tensor]:
        """Keys and values of a short pass as the streams cache them, `[batch, kv_heads, columns, head_dim]`."""
        return self._arrived[0], self._arrived[-1]

    def rematerialized(self) -> tuple[Tensor, Tensor] | None:
        """Keys before RoPE and values of the pass as later passes read them in full precision, `[batch, kv_heads,
        columns, head_dim]`; None where keys and values are cached themselves."""
        keys, values = self.key_stream, self.value_stream
        if not isinstance(keys, RematerializedStream) or not isinstance(values, RematerializedStream):
            return None
        return keys.numbers(self._arrived[0]), values.numbers(self._arrived[-1])

    def _add_differences(self, cross_layer: CrossLayerSum, forward: Forward, x: Tensor) -> None:
        """The layer's turn in the sum over layers."""
        (stream,), part = self.streams, self.plan.cross_layer
        if not isinstance(stream, DifferenceStream) or part is None:
            raise TypeError("a layer of a cross-layer sum has one stream of differences")
        cross_layer.enter(part, stream, forward, x.dtype)
        stream.append(x, forward.row_spans, forward.cache_position)
        cross_layer.leave(part, stream, forward)

    def advance(self, forward: Forward) -> None:
        """Count a replayed pass, whose numbers are stored already."""
        self.forward = forward.behind(self.dropped)
        self.columns += forward.columns
        for stream in self.streams:
            stream.advance(self.forward.row_spans)

    def release(self) -> None:
        """After the attention of the pass: free tensors that only the attention needed, and drop unseen tokens. A step
        that is captured drops none: it would at every replay."""
        self.tails, self._arrived = [], ()
        for stream in self.streams:
            if isinstance(stream, DifferenceStream):
                stream.close()
        if self.forward is None or self.forward.cache_position is None:
            self.drop_unseen()

    @property
    def dropped(self) -> int:
        """Tokens of every row that the layer no longer holds."""
        return self.streams[0].dropped

    @changes_stored_tensors
    def drop_unseen(self, all_of_them: bool = False) -> None:
        """Drop the tokens that no later query sees, once there are enough of them. all_of_them: also few."""
        if self._sliding is None or not self.key_stream.lengths:
            return
        lengths = [length + self.dropped for length in self.key_stream.lengths]
        start = self.saved_from(lengths) if all_of_them else self._sliding.dropped(lengths, self.dropped)
        if start > self.dropped:
            self.absorbing = True  # until all streams have dropped them
            for stream in self.streams:
                stream.drop(start, self._sliding.room(stream.window))
            self.absorbing = False

    def saved_from(self, lengths: Sequence[int]) -> int:
        """How many tokens are left out of each row when rows of `lengths` tokens are written to a file."""
        return 0 if self._sliding is None else self._sliding.start(min(lengths))

    def _announce_prompts(self, forward: Forward, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        """Pass prompts and saliency to the streams whose codecs are fit to prompts."""
        prompts: dict[int, Prompt] = {}
        saliency: dict[int, Tensor] = {}
        needs_saliency = any(stream.needs_saliency for stream in self._prompt_streams)
        for span in forward.row_spans:
            is_prompt = span.past == 0 and span.tokens > 0 and not self.dropped
            if not (is_prompt or needs_saliency):
                continue
            key, value, query = (x[span.rows, :, span.pads :] for x in (keys, values, queries))
            if is_prompt:
                if self.plan.keys.source == "pre_rope":
                    query = self.rotation.undo(query.float(), span.offset).to(query.dtype)
                prompts[span.rows.start] = Prompt(key, value, query)
            elif (received := _saliency(self.streams[0], span, key, query)) is not None:
                saliency[span.rows.start] = received
        for stream in self._prompt_streams if prompts or saliency else ():
            stream.announce(forward.row_spans, prompts, saliency)

    def _keep_tails(self, forward: Forward) -> None:
        """Copy the tokens that new queries see in full precision, before this pass packs them."""
        self.tails = []
        if forward.columns > 1 and not forward.is_first:
            for span in forward.row_spans:
                keys = _recent(self.key_stream, span.rows, span.past)
                values = _recent(self.value_stream, span.rows, span.past)
                self.tails.append((keys, values))

    def _check_finite(self, forward: Forward) -> None:
        if would_sync(self._arrived[0].device, forward.columns):
            return  # the prompt was checked
        for span in forward.row_spans:
            for name, numbers, stream in zip(("keys", "values"), self._arrived, self.streams, strict=False):
                x = numbers[span.rows, :, span.pads :]
                if x.numel() == 0:
                    continue
                # One sum is finite only if all numbers are; 32 bits cannot overflow on numbers of 16.
                if not math.isfinite(x.sum(dtype=torch.float32).item()):
                    raise NotFiniteError(
                        f"layer {self.index}: the {name} contain NaN or infinity (try --dtype float32)"
                    )
                most = torch.finfo(getattr(torch, side_dtype(x.dtype))).max
                if x.dtype == torch.float32 and stream.codec.nominal_bits < 16 and x.abs().amax() > most:
                    raise KvqError(
                        f"layer {self.index}: the {name} have numbers beyond {most:g}, which scales and zero-points in "
                        "16 bits cannot hold (try --dtype bfloat16)"
                    )

    # -- the interface of transformers -------------------------------------------------------------------------------

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
        self.absorbing = False

    # -- copies --------------------------------------------------------------------------------------------------

    @changes_stored_tensors
    def clone(
        self, cross_layer: CrossLayerSum | None, joined: tuple[JoinedLayers, JoinedLayers] | None
    ) -> CompressedLayer:
        """A copy that shares no tensor of the sequences; `cross_layer` and `joined` are those of the copy's layers."""
        settings = (self.plan, self.rotation, self.sliding_window, self._rematerialize, cross_layer, joined)
        copy = type(self)(self.index, *settings)
        copy._sliding = self._sliding
        for stream, own in zip(copy.streams, self.streams, strict=True):
            stream.reserve_like(own)
        if self.columns:
            snapshots = [stream.snapshot().map(lambda _, tensor: tensor.clone()) for stream in self.streams]
            copy.restore(snapshots, self.columns, self.kv_heads, self.numbers_per_token)
        for stream, own in zip(copy.streams, self.streams, strict=True):
            stream.rollback_like(own)
        copy.absorbing = self.absorbing  # a pass that ended inside a layer: no more may follow
        return copy

    @changes_stored_tensors
    def restore(self, snapshots: Iterable[Snapshot], columns: int, kv_heads: int, numbers_per_token: int) -> None:
        """Hold the tokens of the streams' snapshots instead, which are taken one at a time; see `Stream.restore`."""
        for stream, snapshot in zip(self.streams, snapshots, strict=True):
            stream.restore(snapshot)
        self.columns, self.kv_heads, self.numbers_per_token = columns, kv_heads, numbers_per_token
        self.is_initialized = True

    # -- rows ----------------------------------------------------------------------------------------------------

    @changes_stored_tensors
    def select(self, index: Tensor) -> None:
        """Keep the rows `index` (int64), in that order."""
        for stream in self.streams:
            stream.select(index)

    def croppable(self, tokens: int) -> bool:
        """Whether the last `tokens` tokens of all rows can be removed: see `Stream.croppable`."""
        return all(stream.croppable(tokens) for stream in self.streams)

    def sees_its_window(self, tokens: int) -> bool:
        """Whether the next query sees no dropped token once the last `tokens` tokens of all rows are removed."""
        return not self.dropped or min(self.key_stream.lengths) - tokens + 1 >= (self.sliding_window or 0)

    def crop(self, tokens: int) -> None:
        """Remove the last `tokens` tokens (a count, checked by the cache)."""
        for stream in self.streams:
            stream.crop(tokens)
        self.columns -= tokens


def _read_by(stream: Stream, rematerialize: Rematerialize | None) -> StreamReader:
    return stream if rematerialize is None else RematerializedStream(stream, rematerialize)


def _saliency(stream: Stream, span: RowSpan, keys: Tensor, queries: Tensor) -> Tensor | None:
    """The attention received by the tokens that are packed when `keys` come, `[rows, kv_heads, tokens]`, if any are.

    stream: the keys'; values are packed with the same windows.
    """
    block, window = stream.to_pack(span, keys), stream.window
    if block is None:
        return None
    # Each flush is seen by the query of the token with which it is packed, so that passes may be cut anywhere.
    column = window.sinks + window.packed(span.past) + window.recent - 1 - span.past
    received = []
    for flush in block.split(window.flush, dim=2):
        column += window.flush
        received.append(attention_received(queries[:, :, column : column + 1], flush))
    return torch.cat(received, dim=2)


def _recent(stream: StreamReader, rows: slice, tokens: int) -> Tensor | None:
    """A copy of the tokens after the packed ones, in full precision; None where there are none."""
    _, last = stream.split(tokens)
    pieces = [x for _, _, x in stream.exact(rows, tokens, last, tokens)]
    return torch.cat(pieces, dim=2) if pieces else None
