"""What a stream holds, as named tensors: to copy it, to write it to a file, and to check what a file holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvq_cli.codecs.base import AnyCodec, Packed, Part, Prompt, PromptCodec, State
from kvq_cli.methods.window import Window


@dataclass(frozen=True)
class Snapshot:
    """The tokens of a stream, without room for later ones: as long as the longest row, others filled up with zeros.

    lengths:        tokens of each row.
    sinks, recent:  tokens in full precision, before and after the packed ones, `[batch, kv_heads, tokens, head_dim]`.
    packed:         the packed tokens; None where there are none.
    prompt:         of a codec that stores prompts apart, their packed tokens, likewise.
    prompt_lengths: how many of them each row has; empty for other codecs.
    state:          of a `PromptCodec`, the state of the rows by name.
    """

    lengths: tuple[int, ...]
    sinks: Tensor
    recent: Tensor
    packed: Packed | None = None
    prompt: Packed | None = None
    prompt_lengths: tuple[int, ...] = ()
    state: Mapping[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """`sinks`, `recent`, `packed.<part>`, `prompt.<part>` and `state.<name>`."""
        found: dict[str, Tensor] = {}
        self.map(lambda name, tensor: found.setdefault(name, tensor))
        return found

    def map(self, function: Callable[[str, Tensor], Tensor]) -> Snapshot:
        """The snapshot with `function(name, tensor)` in place of each tensor."""

        def each(name: str, packed: Packed | None) -> Packed | None:
            if packed is None:
                return None
            parts = {key: Part(function(f"{name}.{key}", part.tensor), part.unit) for key, part in packed.parts.items()}
            return Packed(packed.tokens, parts)

        return replace(
            self,
            sinks=function("sinks", self.sinks),
            recent=function("recent", self.recent),
            packed=each("packed", self.packed),
            prompt=each("prompt", self.prompt),
            state={name: function(f"state.{name}", tensor) for name, tensor in self.state.items()},
        )


def expected(codec: AnyCodec, window: Window, like: Tensor, lengths: Sequence[int], prompts: Sequence[int]) -> Snapshot:
    """The snapshot of a stream that holds rows of `lengths` tokens, as tensors without memory.

    like: numbers of the stream, `[..., kv_heads, ..., head_dim]` in its dtype. prompts: how many tokens each row had
    after its first pass.
    """
    batch, packed, zeros = len(lengths), [window.packed(tokens) for tokens in lengths], _Zeros(like, codec)
    apart: tuple[int, ...] = ()
    prompt: Packed | None = None
    state: dict[str, Tensor] = {}
    if isinstance(codec, PromptCodec):
        prompt, state = zeros.prompts(codec, window, prompts)
        if codec.stores_prompt_apart:
            apart = tuple(window.packed(tokens) for tokens in prompts)
        if not codec.shares_state:
            state = {name: x.expand(batch, *x.shape[1:]) for name, x in state.items()}
    recent = [n - min(n, window.sinks) - held for n, held in zip(lengths, packed, strict=True)]
    later = [held - before for held, before in zip(packed, apart or [0] * batch, strict=True)]
    snapshot = Snapshot(
        tuple(lengths),
        zeros.tokens(min(max(lengths), window.sinks)).expand(batch, -1, -1, -1),
        zeros.tokens(max(recent)).expand(batch, -1, -1, -1),
        _resized(zeros.block(codec, state), batch, max(later)) if any(later) else None,
        None if prompt is None else _resized(prompt, batch, max(apart)),
        apart,
        state,
    )
    return snapshot.map(lambda _, tensor: tensor.to("meta"))


class _Zeros:
    """Encodes zeros to see the shapes of what a codec stores; without memory, unless the codec holds constants."""

    def __init__(self, like: Tensor, codec: AnyCodec) -> None:
        constants = list(codec.constants().values())
        self._device = constants[0].device if constants else torch.device("meta")
        self._heads, self._dim, self._dtype = like.shape[1], like.shape[3], like.dtype

    def tokens(self, count: int) -> Tensor:
        return torch.zeros(1, self._heads, count, self._dim, dtype=self._dtype, device=self._device)

    def block(self, codec: AnyCodec, state: State) -> Packed:
        """A block of tokens after the prompt."""
        x = self.tokens(codec.block_tokens)
        if isinstance(codec, PromptCodec):
            codec = codec.with_state({name: tensor[:1] for name, tensor in state.items()}, x[..., 0])
        return codec.encode(x)

    def prompts(
        self, codec: PromptCodec, window: Window, prompts: Sequence[int]
    ) -> tuple[Packed | None, dict[str, Tensor]]:
        """A packed prompt, if any is stored apart, and the largest state of rows with prompts of so many tokens."""
        packed: Packed | None = None
        largest: dict[str, Tensor] = {}
        for tokens in sorted(set(prompts) - {0}):
            x, count = self.tokens(tokens), window.packed(tokens)
            prompt = Prompt(x, x, x)
            if count:
                run, state = codec.encode_prompt(x[:, :, window.sinks : window.sinks + count], prompt, window.sinks)
                packed = run if codec.stores_prompt_apart else None
            else:
                state = codec.fit(prompt)
            for name, tensor in state.items():
                sizes = zip(tensor.shape, largest.get(name, tensor).shape, strict=True)
                largest[name] = tensor.new_zeros([max(both) for both in sizes])
        return packed, largest


def _resized(packed: Packed, batch: int, tokens: int) -> Packed:
    """The parts as they are for `batch` rows of `tokens` tokens."""
    parts = {}
    for name, part in packed.parts.items():
        shape = (batch, part.tensor.shape[1], tokens // part.unit, *part.tensor.shape[3:])
        parts[name] = Part(torch.empty(shape, dtype=part.tensor.dtype, device="meta"), part.unit)
    return Packed(tokens, parts)
