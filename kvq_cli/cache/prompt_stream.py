"""A stream whose codec is fit to the prompt of each row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from kvq_cli.cache.rows import RowSpan
from kvq_cli.cache.snapshot import Snapshot
from kvq_cli.cache.store import PackedStore
from kvq_cli.cache.stream import Stream
from kvq_cli.codecs.base import Codec, Packed, Prompt, PromptCodec, State
from kvq_cli.methods.base import StreamPlan


def new_stream(plan: StreamPlan) -> Stream:
    """The stream of the kind that the plan's codec needs."""
    return PromptStream(plan, plan.codec) if isinstance(plan.codec, PromptCodec) else Stream(plan)


class PromptStream(Stream):
    """A stream with the `state` of its `PromptCodec`, and a separate store of packed prompts where the codec needs one.

    The first `prompt_tokens` packed tokens of a row are in `prompt_store`, later ones in `store`. With `shares_state`
    the state has one row.
    """

    def __init__(self, plan: StreamPlan, codec: PromptCodec) -> None:
        self._prompt_codec = codec
        super().__init__(plan)

    def reset(self) -> None:
        super().reset()
        self.state: dict[str, Tensor] = {}
        self.prompt_store = PackedStore(self.codec.block_tokens)
        #: Tokens of each row in `prompt_store`.
        self._prompt_lengths: list[int] = []
        self._prompts: dict[int, Prompt] = {}
        self._saliency: dict[int, Tensor] = {}

    @property
    def needs_saliency(self) -> bool:
        """Whether `announce` must be given the attention that later tokens receive."""
        return self._prompt_codec.needs_saliency

    def prompt_tokens(self, rows: slice) -> int:
        return self._prompt_lengths[rows.start] if self._prompt_lengths else 0

    @property
    def joins_rows(self) -> bool:
        return not any(self._prompt_lengths)  # prompts that are stored apart end at different places

    @property
    def _joins_encoding(self) -> bool:
        return super()._joins_encoding and not self._prompts and not self._saliency

    def coder(self, rows: slice) -> Codec:
        return self._prompt_codec.with_state(self._state_of(rows))

    def announce(self, spans: Sequence[RowSpan], prompts: Mapping[int, Prompt], saliency: Mapping[int, Tensor]) -> None:
        """Prompts and saliency of the tokens that `append` adds next, keyed by the first row of a span.

        prompts: of the spans whose first tokens they are. saliency: of the others, for a codec that `needs_saliency`.
        """
        self._prompts, self._saliency = dict(prompts), dict(saliency)
        if self._prompt_codec.stores_prompt_apart:
            self._prompt_lengths = self._prompt_lengths or [0] * max(span.rows.stop for span in spans)
            for span in spans:
                if span.rows.start in prompts:
                    count = self.window.packed(span.tokens)
                    self._prompt_lengths[span.rows] = [count] * (span.rows.stop - span.rows.start)

    def _final_of(self, span: RowSpan) -> int:
        # Later blocks are encoded otherwise than those of the prompt.
        return self.window.packed(span.tokens) if span.past == 0 else super()._final_of(span)

    def _pack(self, span: RowSpan, x: Tensor | None, reserve: int) -> None:
        prompt = self._prompts.pop(span.rows.start, None)
        if prompt is not None:
            self._pack_prompt(span, x, prompt, reserve)
        elif x is not None:
            saliency = self._saliency.pop(span.rows.start, None)
            coder = self._prompt_codec.with_state(self._state_of(span.rows), saliency)
            self._write(span, coder.encode(x), reserve)

    def _pack_prompt(self, span: RowSpan, x: Tensor | None, prompt: Prompt, reserve: int) -> None:
        codec = self._prompt_codec
        if codec.shares_state and self.state:
            packed = None if x is None else codec.with_state(self.state).encode(x)
        elif x is None:
            packed = None
            self._keep(codec.fit(prompt), span.rows)
        else:
            packed, state = codec.encode_prompt(x, prompt, self.window.sinks)
            self._keep(state, span.rows)
        if packed is not None and codec.stores_prompt_apart:
            self.prompt_store.write(span.rows, len(self.lengths), 0, packed)
        elif packed is not None:
            self._write(span, packed, reserve)

    def _keep(self, state: State, rows: slice) -> None:
        """Store the state of `rows` beside that of others, filled up with zeros to the largest of each tensor."""
        shared = self._prompt_codec.shares_state
        batch, rows = (1, slice(0, 1)) if shared else (len(self.lengths), rows)
        for name, tensor in state.items():
            before = self.state.get(name)
            shape = tensor.shape[1:] if before is None else map(max, tensor.shape[1:], before.shape[1:])
            joined = tensor.new_zeros(batch, *shape)
            for place, x in ((slice(0, batch), before), (rows, tensor)):
                if x is not None:
                    joined[(place, *(slice(0, size) for size in x.shape[1:]))] = x
            self.state[name] = joined

    def _state_of(self, rows: slice) -> State:
        rows = slice(0, 1) if self._prompt_codec.shares_state else rows
        return {name: x[rows] for name, x in self.state.items()}

    def _tiles(self, rows: slice, start: int, stop: int, size: int) -> Iterator[tuple[int, int, Packed]]:
        border = self.prompt_tokens(rows)
        yield from self.prompt_store.tiles(rows, start, min(stop, border), size)
        for first, last, packed in self.store.tiles(rows, max(start - border, 0), stop - border, size):
            yield first + border, last + border, packed

    def can_capture(self, past: int) -> bool:
        return not self._prompt_codec.needs_saliency and not any(self._prompt_lengths) and super().can_capture(past)

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), *self.state.values()]

    def snapshot(self) -> Snapshot:
        apart = self._used(self.prompt_store, self._prompt_lengths)
        return replace(super().snapshot(), prompt=apart, prompt_lengths=tuple(self._prompt_lengths), state=self.state)

    def restore(self, snapshot: Snapshot) -> None:
        super().restore(snapshot)
        self.state, self._prompt_lengths = dict(snapshot.state), list(snapshot.prompt_lengths)
        if snapshot.prompt is not None:
            self.prompt_store.write(slice(0, len(self.lengths)), len(self.lengths), 0, snapshot.prompt)

    def check(self) -> None:
        for row, tokens in enumerate(self.lengths):
            if tokens:
                self._prompt_codec.check_state(self._state_of(slice(row, row + 1)))
        super().check()

    def select(self, index: Tensor) -> None:
        if not self.lengths:
            return
        index = index.to(self.ring.device)
        super().select(index)
        self._prompt_lengths = [self._prompt_lengths[i] for i in index.tolist()] if self._prompt_lengths else []
        self.prompt_store.select(index)
        if not self._prompt_codec.shares_state:
            self.state = {name: x.index_select(0, index) for name, x in self.state.items()}

    def _packed_bytes(self) -> dict[str, int]:
        apart = sum(self._prompt_lengths)
        parts = Counter(self.prompt_store.bytes_used(apart))
        return dict(parts + Counter(self.store.bytes_used(self.packed_tokens - apart)))

    def _allocated_bytes(self) -> int:
        return self.prompt_store.nbytes + self.store.nbytes

    def bytes_by_part(self) -> dict[str, int]:
        """As `Stream.bytes_by_part`, with the state of the prompts."""
        parts = super().bytes_by_part()
        for name, x in self.state.items() if parts else ():  # later blocks may have parts of the same name
            parts[name] = parts.get(name, 0) + x.numel() * x.element_size()
        return parts
