"""The kinds of a model's layers: which of them have a cache to compress."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvq_cli.errors import UsageError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: Kinds, as transformers names them, whose keys and values are compressed; "hybrid" has a recurrent state beside them.
_COMPRESSED = ("full_attention", "sliding_attention", "hybrid")
#: Kinds that keep what the model itself stores of them: nothing for "moe" and "mlp".
_UNCOMPRESSED = ("linear_attention", "conv", "chunked_attention", "moe", "mlp")
#: Kinds with a recurrent state; those of "conv" are the last inputs of a convolution.
_RECURRENT = ("linear_attention", "hybrid")


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """The kind of each layer of a text decoder, as transformers names it: "full_attention", "linear_attention", ...."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return list(kinds)
    kind = "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"
    if getattr(config, "attention_chunk_size", None) is not None:
        kind = "chunked_attention"
    return [kind] * config.num_hidden_layers


def attention_layers(config: PretrainedConfig) -> tuple[int, ...]:
    """The layers of a text decoder whose keys and values are compressed; empty: all. UsageError for a layer of another
    kind, and where there is none to compress."""
    kinds = layer_kinds(config)
    for layer, kind in enumerate(kinds):
        if kind not in (*_COMPRESSED, *_UNCOMPRESSED):
            valid = ", ".join((*_COMPRESSED, *_UNCOMPRESSED))
            raise UsageError(
                f"{config.model_type}: layer {layer} is of kind {kind}, which kvq does not support: choose a --model "
                f"whose layers are of kinds {valid}"
            )
    compressed = tuple(layer for layer, kind in enumerate(kinds) if kind in _COMPRESSED)
    if not compressed:
        raise UsageError(
            f"{config.model_type}: all layers are of kind {', '.join(sorted({*kinds}))}: none to compress; choose a "
            "--model with full attention in some layers"
        )
    return () if len(compressed) == len(kinds) else compressed


def has_states(config: PretrainedConfig) -> bool:
    """Whether layers of a text decoder store something in the model's cache that is not compressed."""
    return not {*layer_kinds(config)} <= {"full_attention", "sliding_attention"}


def recurrent_layer(config: PretrainedConfig) -> int | None:
    """Return the first layer of a text decoder with a recurrent state, which cannot give tokens back; None: there is
    none."""
    return next((layer for layer, kind in enumerate(layer_kinds(config)) if kind in _RECURRENT), None)


def has_chunks(config: PretrainedConfig) -> bool:
    """Whether layers of a text decoder have chunked attention, which is not compressed."""
    return "chunked_attention" in layer_kinds(config)
