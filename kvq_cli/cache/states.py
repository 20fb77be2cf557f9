"""Layers of a compressed cache that are not compressed: transformers' own, with the states of linear attention and
convolutions, and of chunked attention."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import DynamicCache, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from kvq_cli.cache.cross_layer import CrossLayerSum
from kvq_cli.cache.joined import JoinedLayers
from kvq_cli.cache.layer import CompressedLayer

#: What layers of transformers hold, as tensors or as numbered tensors.
_HELD = ("keys", "values", "conv_states", "recurrent_states")


class HybridLayer(CompressedLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]  # theirs differ, too
    """A compressed layer that also holds the recurrent state of the linear attention beside its attention."""

    holds_state = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the recurrent state; see `CompressedLayer.lazy_initialization` for keys and values."""
        if not args:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        super().reset()
        LinearAttentionLayer.__init__(self)  # the next prompt may have another number of rows

    def clone(
        self, cross_layer: CrossLayerSum | None, joined: tuple[JoinedLayers, JoinedLayers] | None
    ) -> CompressedLayer:
        made = super().clone(cross_layer, joined)
        for name in vars(LinearAttentionLayer()):
            setattr(made, name, _cloned(getattr(self, name)))
        return made

    def select(self, index: Tensor) -> None:
        super().select(index)
        LinearAttentionLayer.reorder_cache(self, index)  # type: ignore[arg-type]


def own_layers(config: PretrainedConfig) -> list[Any]:
    """The empty layers of the model's own cache."""
    return DynamicCache(config=config).layers


def clone(layer: Any) -> Any:
    """A copy of a layer of transformers that shares no tensor with it."""
    made = copy.copy(layer)
    for name, value in vars(layer).items():
        setattr(made, name, _cloned(value))
    return made


def nbytes(layer: Any) -> int:
    """The bytes of what a layer of transformers holds, or of the recurrent state of a `HybridLayer`."""
    return sum(x.nbytes for name in _HELD for x in _tensors(getattr(layer, name, None)))


def croppable(layer: Any, tokens: int, left: int) -> bool:
    """Whether the layer can give its last `tokens` tokens back, so that `left` remain: not behind a recurrent state,
    and only where it still holds what the next token sees."""
    if _tensors(getattr(layer, "recurrent_states", None)):
        return False
    convolved = getattr(layer, "conv_states", None) or {}
    if _tensors(convolved) and not layer.record_past:
        return False
    held = [(x.shape[-1], layer.conv_kernel_size[i]) for i, x in convolved.items() if x is not None]
    if (keys := getattr(layer, "keys", None)) is not None:
        held.append((keys.shape[2], layer.get_max_length() - 1))
    return all(count - tokens >= min(seen, left) for count, seen in held)


def _tensors(held: Any) -> list[Tensor]:
    """The tensors of an attribute: one, a numbered set, or none."""
    values = held.values() if isinstance(held, Mapping) else [held]
    return [x for x in values if x is not None]


def _cloned(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _cloned(each) for key, each in value.items()}
    return value.detach().clone() if isinstance(value, Tensor) else value
