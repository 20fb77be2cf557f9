"""What is calibrated of methods that rotate keys and values by a matrix per layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvq_cli.codecs.layout import TensorSpec
from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.specs import Spec, StreamSpec, Tensors

#: The streams of a layer that are rotated.
ROTATED = ("k", "v")


@dataclass(frozen=True)
class RotationSpec(Spec):
    """Calibration of one rotation for the keys, and one for the values, of all heads of a layer, from text that is read
    without gradients (OSCAR)."""

    captures = False

    @property
    def reads_text(self) -> bool:
        return True

    def parts(self, layer: int) -> dict[str, StreamSpec]:
        return {}

    def layout(self, shape: ModelShape, layer: int, choices: Mapping[str, Sequence[Any]]) -> Tensors:
        dim = shape.head_dim
        sizes = {"rotation": (1, dim, dim), "spread": (1, dim)}
        return {f"{kind}.{name}": TensorSpec(size, "float32") for kind in ROTATED for name, size in sizes.items()}


def rotated_streams(spec: Spec) -> tuple[str, ...]:
    """Return the streams of a layer whose rotation is calibrated, and nothing else; empty for other kinds of
    calibration."""
    return ROTATED if isinstance(spec, RotationSpec) else ()
