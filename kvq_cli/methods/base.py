"""What a compression method is: hyper-parameters in, one plan per layer out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Mapping

import torch
from torch import Tensor

from kvq_cli.methods.window import Window
from kvq_cli.codecs.base import Codec


@dataclass(frozen=True)
class ModelShape:
    """The numbers of an architecture that a method needs to know."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    dtype: torch.dtype


@dataclass(frozen=True)
class StreamPlan:
    """How one of the two streams of a layer (keys or values) is kept.

    source: "post_rope" or "pre_rope" for keys, "value" for values.
    """

    source: str
    codec: Codec
    window: Window


@dataclass(frozen=True)
class LayerPlan:
    keys: StreamPlan
    values: StreamPlan


@dataclass(frozen=True)
class Method(ABC):
    """Base of all methods: a frozen dataclass of hyper-parameters, registered by class in `methods/registry.py`."""

    name: ClassVar[str]
    paper: ClassVar[str]  # link
    summary: ClassVar[str]  # one line for `kvq methods`
    calibrates: ClassVar[bool] = False  # True: needs an artifact

    @abstractmethod
    def plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, Tensor]) -> LayerPlan:
        """The plan of one layer.

        tensors: the artifact's tensors of this layer without the `layers.<i>.` prefix ("k.centroids", "v.mean");
        empty for methods that do not calibrate. Raises UsageError where the shape does not allow the options.
        """
