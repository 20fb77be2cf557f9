"""The compressed cache of a model, usable as `past_key_values`: a `CompressedLayer` for each layer with attention, and
transformers' own for others."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvq_cli.artifact.adapters import Applied
from kvq_cli.cache.cross_layer import CrossLayerSum
from kvq_cli.cache.joined import JoinedLayers
from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.cache.report import CacheReport, report
from kvq_cli.cache.rows import Forward, Rows
from kvq_cli.cache.saved_cache import Origin, SavedPrompt, save
from kvq_cli.cache.shared import CachePosition
from kvq_cli.cache.states import clone, croppable, nbytes
from kvq_cli.errors import KvqError, UsageError


class CompressedCache(Cache):
    """Made by `Attached.new_cache()`; pass it to the model's `generate` or forward as `past_key_values`.

    prefill: "exact" (a forward pass over several tokens attends to its own tokens in full precision and to earlier ones
    as they are stored) or "compressed" (every token attends to what it would see had it been decoded one by one).
    nominal_bits: the method's bits per number, backend: who computes attention over it; both for the report.
    origin: the model and the method that the cache belongs to, for `save`.
    own_layers: makes the empty layers of the model's own cache, where some of them are not compressed.
    rollback: how many of the newest tokens `crop` can remove, also where they have packed others.
    loaded: of a cache from `Attached.load_cache`, the token ids and the text that were saved with it.
    compressed: the compressed layers, in order; `layers` are those of the model.
    """

    def __init__(
        self,
        layers: Sequence[CompressedLayer],
        prefill: str,
        nominal_bits: float,
        backend: str | None = None,
        origin: Callable[[CompressedCache], Origin] | None = None,
        own_layers: Callable[[], list[Any]] = list,
    ) -> None:
        super().__init__(layers=[])
        self.compressed, self._own_layers = list(layers), own_layers
        self._arrange(own_layers())
        self.prefill, self.nominal_bits, self.backend, self._origin = prefill, nominal_bits, backend, origin
        #: The prompt of a cache that was loaded from a file.
        self.loaded: SavedPrompt | None = None
        self.rows = Rows()
        #: The adapters with which the model computed it; see `AdapterWatch`.
        self.adapters: Applied = {}
        #: Whether a pass has begun that is not complete: layers behind the last attention may lack it.
        self.unfinished = False
        #: While a decode step is captured or replayed: the tokens of every row before it, int64 `[1]` on the device.
        self.cache_position: Tensor | None = None
        self.rollback = 0
        #: Whether passes end in drafted tokens, which `generate` may take back: it has announced assisted decoding.
        self.drafts = False
        #: Drafted tokens of the pass that runs, which see what they would see decoded one by one; None: nobody said.
        self.drafted: int | None = None
        #: Whether layers that are not compressed record the newest pass only, until `crop`.
        self._records_pass = False

    def _arrange(self, own: list[Any]) -> None:
        """Put the compressed layers in place of those in `own`, the model's layers; empty: there are no others."""
        for layer in self.compressed if own else ():
            own[layer.index] = layer
        self.layers = own or list(self.compressed)
        #: The layers that are not compressed.
        self.others: list[Any] = [layer for layer in self.layers if layer not in self.compressed]
        #: By index, the layers that hold what is not compressed, some of them beside compressed keys and values.
        self.states = {index: x for index, x in enumerate(self.layers) if getattr(x, "holds_state", True)}

    @property
    def max_cache_len(self) -> int:
        """Refused: PEFT reads it to put a cache of its own, with a prefix of keys and values, in place of this."""
        raise UsageError("PEFT's prefix tuning replaces the cache by one that is not compressed: use another adapter")

    def begin(self, columns: int, batch: int, mask: Tensor | None, positions: Tensor | None) -> Forward:
        """Describe the forward pass that starts; see `Rows.begin`."""
        lengths = {layer.columns for layer in self.compressed}
        if len(lengths) > 1 or self.unfinished or any(layer.absorbing for layer in self.compressed):
            raise KvqError("an interrupted forward pass left the cache half updated: start with a new cache")
        forward = self.rows.begin(lengths.pop(), columns, batch, mask, positions)
        position = self.cache_position
        return forward if position is None else replace(forward, cache_position=CachePosition(position))

    def can_capture(self) -> bool:
        """Whether the next step, one token more in every row, can be captured in a CUDA graph: all rows have as many
        tokens, there are no pads, and all layers are compressed."""
        past = self.get_seq_length()
        alike = past > 0 and not self.states and not any(self.rows.pads) and len(set(self.rows.offsets)) == 1
        return alike and all(
            stream.can_capture(past - layer.dropped) for layer in self.compressed for stream in layer.streams
        )

    def tensors(self) -> list[Tensor]:
        """All tensors of the layers; see `Stream.tensors`."""
        return [tensor for layer in self.compressed for stream in layer.streams for tensor in stream.tensors()]

    def packing_pattern(self) -> tuple[bool, ...]:
        """Which windows pack tokens when one is added to every row: steps of one pattern are the same work."""
        lengths = dict.fromkeys(
            (stream.window, layer.columns - layer.dropped) for layer in self.compressed for stream in layer.streams
        )
        return tuple(window.packed(past + 1) > window.packed(past) for window, past in lengths)

    def dropped(self) -> list[int]:
        """How many tokens of every row layers have dropped, each number once; 0 for layers that keep all."""
        return sorted({layer.dropped for layer in self.compressed})

    def drop_unseen(self) -> None:
        """Drop what no later query sees; see `CompressedLayer.drop_unseen`."""
        for layer in self.compressed:
            layer.drop_unseen()

    def advance(self, positions: Tensor) -> Forward:
        """Count a replayed step: one token more in every row."""
        forward = self.begin(1, self.batch_size, None, positions)
        for layer in self.compressed:
            layer.advance(forward)
        return forward

    def rewind(self, tokens: int) -> None:
        """Set the length of every row back to `tokens`, after a step that was counted but not computed."""
        for layer in self.compressed:
            layer.columns = tokens
            for stream in layer.streams:
                stream.crop(stream.lengths[0] + layer.dropped - tokens)

    def report(self) -> CacheReport:
        """Bytes by part and bits per number, from the tensors that exist."""
        states = sum(map(nbytes, self.states.values()))
        return replace(report(self.compressed, self.nominal_bits, self.backend), states=states)

    @property
    def batch_size(self) -> int:
        """Rows held, -1 before the first forward pass."""
        return len(self.rows.pads) or -1

    def __deepcopy__(self, _memo: object) -> CompressedCache:
        """`clone`: a copy of plans and codebooks, too, would belong to no attach."""
        return self.clone()

    def clone(self) -> CompressedCache:
        """A copy that shares no tensor of the sequences: what is appended to one is not in the other."""
        sums, joined = CrossLayerSum(), (JoinedLayers(), JoinedLayers())
        layers = [layer.clone(sums, joined) for layer in self.compressed]
        copy = CompressedCache(layers, self.prefill, self.nominal_bits, self.backend, self._origin, self._own_layers)
        if self.others:
            copy._arrange([clone(layer) if layer in self.others else layer for layer in self.layers])
        copy.rows, copy.loaded, copy.adapters = self.rows.copy(), self.loaded, self.adapters
        copy.unfinished = self.unfinished
        copy.rollback, copy.drafts = self.rollback, self.drafts
        return copy

    def save(self, path: str | os.PathLike, prompt: Tensor | SavedPrompt, option: str = "path") -> int:
        """Write the cache and the tokens that it holds to a safetensors file, atomically; returns the file's bytes.

        prompt: the token ids `[batch, tokens]` of all columns so far, pads included, or these with their text.
        `Attached.load_cache` reads the file. option: the flag that chooses another path, for messages.
        Raises UsageError where the ids are not as many as the cache holds, and where layers hold other states; KvqError
        where the file cannot be written.
        """
        self.check_saved()
        if self._origin is None:
            raise UsageError("only a cache made by an attach() can be saved")
        if isinstance(prompt, Tensor):
            prompt = SavedPrompt(prompt)
        return save(self, path, prompt, self._origin(self), option)

    def check_saved(self) -> None:
        """UsageError where layers hold states that files of saved caches do not have."""
        if self.states:
            layer = next(iter(self.states))
            raise UsageError(
                f"a cache with other states than keys and values, as layer {layer} has, cannot be saved: keep it in "
                "memory (clone() copies it), or read the text anew"
            )

    def reset(self) -> None:
        for layer in self.compressed:
            layer.reset()
        self._arrange(self._own_layers())  # the next prompt may have another number of rows
        self.rows, self.unfinished, self.drafts, self.drafted = Rows(), False, False, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was (beam search)."""
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        self._select(torch.as_tensor(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        self._select(torch.arange(len(self.rows.pads)).repeat_interleave(repeats))

    def _select(self, index: Tensor) -> None:
        if index.dtype == torch.bool:
            index = index.nonzero().flatten()
        wanted = index.tolist()
        if wanted == list(range(len(self.rows.pads))):
            return  # beams that stay in their places cost nothing
        for layer in self.compressed:
            layer.select(index)
        for other in self.others:
            other.reorder_cache(index)
        self.rows.select(wanted)

    def activate_past_recording(self) -> None:
        """Expect drafted tokens in the passes that follow: `generate` calls this before assisted decoding. See
        `Drafts`, which allows for their rollback."""
        self.drafts = True
        self._set_recording(True)

    @property
    def is_croppable(self) -> bool:
        """Whether `generate` may take tokens back: drafted ones, for which `Drafts` allows. transformers 5.24 asks for
        that after the first pass of assisted decoding; others, which `crop` may refuse, it is not to expect."""
        return self.drafts

    def record(self, drafted: int) -> None:
        """Let layers that are not compressed keep what `crop` needs of the pass that follows, if it has `drafted`
        tokens, until that `crop`: of other passes, they would keep a token more each."""
        if self.get_seq_length():
            self._crop_others(0)
        self._records_pass = drafted > 0
        self._set_recording(self._records_pass)

    def _set_recording(self, records: bool) -> None:
        for other in self.others:
            if hasattr(other, "record_past"):
                other.record_past = records

    def allow_rollback(self, tokens: int) -> None:
        """Let `crop` remove the newest `tokens` tokens, of those that come from now on."""
        if tokens > self.rollback:
            for layer in self.compressed:
                layer.allow_rollback(tokens)
            self.rollback = tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of all rows (a negative number, as in transformers): the cache is
        then as if they had never come.

        UsageError where one of them has packed tokens whose numbers in full precision are gone (see `rollback`) or that
        are of the prompt to which the method is fit; where a layer with a sliding window has dropped tokens that the
        next query would see; and where one has a recurrent state. What a method was fit to stays the whole prompt.
        """
        if tokens_to_remove > 0:
            raise UsageError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number")
        count = min(-int(tokens_to_remove), self.get_seq_length())  # transformers 5.17 passes a tensor
        if count == 0:
            if self.get_seq_length():
                self._crop_others(0)
            return
        if count == self.get_seq_length():
            self.reset()  # the next tokens are a prompt of their own, of as many rows as they bring
            return
        left = self.get_seq_length() - count
        kept = (index for index, each in self.states.items() if not croppable(each, count, left))
        if (index := next(kept, None)) is not None:
            raise UsageError(
                f"crop({-count}): layer {index} holds a state that cannot give tokens back: read the text anew"
            )
        if not all(layer.croppable(count) for layer in self.compressed):
            raise UsageError(
                f"crop({-count}): these tokens have packed others, whose numbers in full precision are gone: make the "
                f"cache with new_cache(rollback={count}); only the prompt of methods that are fit to it stays packed"
            )
        if not all(layer.sees_its_window(count) for layer in self.compressed):
            raise UsageError(
                f"crop({-count}): layers with a sliding window have dropped tokens that the next one would see: read "
                f"the text anew, or make the cache with new_cache(rollback={count})"
            )
        for layer in self.compressed:
            layer.crop(count)
        self._crop_others(count)
        self.rows.pads = [min(pads, left) for pads in self.rows.pads]
        self.rows.prompts = [min(n, left - pads) for n, pads in zip(self.rows.prompts, self.rows.pads, strict=True)]

    def _crop_others(self, count: int) -> None:
        """Remove the last `count` tokens of layers that are not compressed; 0: only what they recorded of the past."""
        for other in self.others:
            if count or getattr(other, "record_past", False):
                other.crop(-count)
        if self._records_pass:
            self._set_recording(False)
