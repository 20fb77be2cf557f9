"""What a stream holds, as named tensors: to copy it, to write it to a file, and to check what a file holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvq_cli.codecs.base import AnyCodec, Packed, Part, PromptCodec
from kvq_cli.codecs.layout import Layout, PartSpec, TensorSpec, dtype_name
from kvq_cli.methods.window import Window

#: Tensors without memory have a shape and a dtype.
_META = torch.device("meta")


@dataclass(frozen=True)
class Snapshot:
    """The tokens of a stream, without room for later ones: as long as the longest row, others filled up with zeros.

    lengths:        tokens of each row.
    sinks, recent:  tokens in full precision, before and after the packed ones, `[batch, kv_heads, tokens, head_dim]`.
    packed:         the packed tokens; None where there are none.
    prompt:         of a codec that stores prompts apart, their packed tokens, likewise.
    prompt_lengths: how many of them each row has; empty for other codecs.
    state:          of a `PromptCodec`, the state of the rows by name.
    dropped:        tokens of every row that are not held, and that `lengths` leave out.
    """

    lengths: tuple[int, ...]
    sinks: Tensor
    recent: Tensor
    packed: Packed | None = None
    prompt: Packed | None = None
    prompt_lengths: tuple[int, ...] = ()
    state: Mapping[str, Tensor] = field(default_factory=dict)
    dropped: int = 0

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


def expected(
    codec: AnyCodec,
    window: Window,
    like: Tensor,
    lengths: Sequence[int],
    prompts: Sequence[int],
    dropped: int = 0,
) -> Snapshot:
    """The snapshot of a stream that was given rows of `lengths` tokens and dropped the first ones, as tensors without
    memory.

    like: numbers of the stream, `[..., kv_heads, ..., head_dim]` in its dtype. prompts: how many tokens each row had
    after its first pass.
    """
    heads, dim, dtype, batch = like.shape[1], like.shape[3], dtype_name(like.dtype), len(lengths)
    apart: tuple[int, ...] = ()
    prompt: Packed | None = None
    state: dict[str, Tensor] = {}
    if isinstance(codec, PromptCodec):
        counts = {window.packed(tokens) for tokens in prompts if tokens}
        layouts = {count: codec.layout(heads, dim, dtype, count) for count in counts}
        state = _largest_state(layouts, 1 if codec.shares_state else batch)
        if codec.stores_prompt_apart:
            apart = tuple(window.packed(tokens) for tokens in prompts)
            prompt = _without_memory(layouts[max(apart)].parts, batch, max(apart)) if any(apart) else None
        codec = codec.with_state(state, torch.empty(0, device=_META))
    window, lengths = window.behind(dropped), [tokens - dropped for tokens in lengths]
    packed = [window.packed(tokens) for tokens in lengths]
    recent = [n - min(n, window.sinks) - held for n, held in zip(lengths, packed, strict=True)]
    later = [held - before for held, before in zip(packed, apart or [0] * batch, strict=True)]
    parts = codec.layout(heads, dim, dtype).parts if any(later) else {}
    return Snapshot(
        tuple(lengths),
        like.new_empty(batch, heads, min(max(lengths), window.sinks), dim, device=_META),
        like.new_empty(batch, heads, max(recent), dim, device=_META),
        _without_memory(parts, batch, max(later)) if any(later) else None,
        prompt,
        apart,
        state,
        dropped,
    )


def _largest_state(layouts: Mapping[int, Layout], rows: int) -> dict[str, Tensor]:
    """The state of rows beside each other: each tensor as large as the largest row's. layouts: by packed tokens."""
    largest: dict[str, TensorSpec] = {}
    for count, layout in layouts.items():
        for name, spec in layout.state.items():
            if count or name in layout.fitted:
                before = largest.get(name, spec)
                largest[name] = replace(spec, shape=tuple(map(max, spec.shape, before.shape)))
    return {
        name: torch.empty(rows, *spec.shape[1:], dtype=getattr(torch, spec.dtype), device=_META)
        for name, spec in largest.items()
    }


def _without_memory(parts: Mapping[str, PartSpec], batch: int, tokens: int) -> Packed:
    """A packed run of `batch` rows of `tokens` tokens."""
    tensors = {}
    for name, part in parts.items():
        shape = (batch, part.heads, tokens // part.unit, *part.entry)
        tensors[name] = Part(torch.empty(shape, dtype=getattr(torch, part.dtype), device=_META), part.unit)
    return Packed(tokens, tensors)
