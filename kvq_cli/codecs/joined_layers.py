"""Principal components of the keys, or of the values, of all layers and heads together: a layer's view of the codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvq_cli.codecs.base import Codec, Packed
from kvq_cli.codecs.component_groups import ComponentGroups, Group
from kvq_cli.codecs.exact_product import ExactProduct, product_layout
from kvq_cli.codecs.layout import Layout, TensorLike, TensorSpec
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class JoinedLayersCodec(Codec):
    """z = sum over layers of B_l^T (x_l - mean_l), coded by `ComponentGroups`; x'_l = B_l z' + mean_l.

    B, whose columns are orthonormal, has the rows of all layers; this codec has those of one, and reads that layer's
    numbers of the codes. `encode` is for a model of one layer: of others, `project` the numbers of each layer, add the
    components up, and `quantize` their sum. A layer's components are an `ExactProduct`: a token gets the same codes
    alone as among others.

    tensors: `basis` B_l `[kv_heads * head_dim, components]`, `mean` and `spread` `[kv_heads, head_dim]`, the root mean
    square of x_l - mean_l, float32; `groups` int32 `[groups, 2]`, components and bits of each, the same in all layers.
    holds: whether the codes of all layers are stored with this layer, and counted there.
    """

    joins_layers = True
    unread_by_kernels = "codes stand for components of all layers together"

    def __init__(
        self, tensors: Mapping[str, TensorLike], numbers: int, dtype: str, holds: bool, deflates: bool = False
    ) -> None:
        """numbers: of a token in all layers. deflates: see `BlockFormat`."""
        self._coding = ComponentGroups([Group(*row) for row in tensors["groups"].tolist()], dtype)
        self.components, self.holds, self.deflates = self._coding.components, holds, deflates
        self.nominal_bits = 8 * self._coding.nbytes / numbers
        self.waiting_bytes = 4 * self.components * holds
        self._shape = tuple(tensors["mean"].shape)
        if not isinstance(tensors["basis"], TensorSpec):
            self._make_tables(tensors)  # type: ignore[arg-type]  # all are tensors

    def _make_tables(self, tensors: Mapping[str, Tensor]) -> None:
        self._basis, self._mean, spread = (tensors[name].float() for name in ("basis", "mean", "spread"))
        self._product = ExactProduct(spread.reshape(1, -1), self._basis.T.unsqueeze(0))

    def layout(self, heads: int, dim: int, dtype: str) -> Layout:
        width = self._shape[0] * self._shape[1]
        integers, tables = product_layout((1, width), (1, self.components, width))
        constants = {
            "basis": TensorSpec((width, self.components), "float32"),
            "mean": TensorSpec(self._shape, "float32"),
            "integers.gain": integers,
            **tables,
        }
        return Layout(self._coding.layout() if self.holds else {}, constants)

    def constants(self) -> Mapping[str, Tensor]:
        tables = {"integers.gain": self._product.integers, **self._product.tables()}
        return {"basis": self._basis, "mean": self._mean, **tables}

    def project(self, x: Tensor) -> Tensor:
        """What the layer adds to the components: `[B, kv_heads, T, head_dim]` -> `[B, 1, T, components]` float32."""
        centered = x.float() - self._mean.unsqueeze(1)
        return self._product(centered.transpose(1, 2).flatten(2).unsqueeze(1))

    def quantize(self, z: Tensor) -> Packed:
        """Pack the components of all layers, `[B, 1, T, components]` float32."""
        return self._coding.encode(z)

    def _encode(self, x: Tensor) -> Packed:
        return self.quantize(self.project(x))

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        x = self._coding.decode(packed) @ self._basis.T  # [B, 1, T, kv_heads * head_dim]
        x = x.squeeze(1).unflatten(2, self._shape).transpose(1, 2)
        return (x + self._mean.unsqueeze(1)).to(dtype).contiguous()

    def check(self, packed: Packed) -> None:
        self._coding.check(packed)
