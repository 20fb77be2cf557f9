"""Choose the attention backend of each layer: Triton kernels or PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from kvq_cli.attention import torch_backend
from kvq_cli.attention.capture_points import AttentionLayer
from kvq_cli.attention.forward_context import Backend
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import LayerPlan

if TYPE_CHECKING:
    from kvq_cli.attention.triton_backend import TritonBackend

BACKENDS = ("auto", "triton", "torch")


class ChosenBackend:
    """The backend of each layer. summary: its name and the reasons for PyTorch, for reports. engine: where kernels
    compute the attention of all layers, the backend that holds their tensors."""

    def __init__(self, by_layer: Mapping[int, Backend], summary: str, engine: TritonBackend | None = None) -> None:
        self._by_layer, self.summary, self.engine = by_layer, summary, engine

    def of(self, layer: int) -> Backend:
        """The backend that computes the attention of this layer."""
        return self._by_layer[layer]

    def by_kernels(self, layer: int) -> bool:
        """Whether kernels, not PyTorch, compute the attention of this layer."""
        return self._by_layer[layer] is not torch_backend


def check_backend(name: str) -> None:
    """Raise UsageError for an unknown backend name."""
    if name not in BACKENDS:
        raise UsageError(f"unknown backend {name!r}; valid: {', '.join(BACKENDS)}")


def choose_backend(
    name: str, device: torch.device, layers: Sequence[tuple[AttentionLayer, LayerPlan]]
) -> ChosenBackend:
    """The backend of each layer. "auto": Triton on a GPU, for layers that its kernels can read, else PyTorch; "triton":
    UsageError where the kernels cannot run or cannot read a layer."""
    check_backend(name)
    by_layer: dict[int, Backend] = dict.fromkeys((layer.index for layer, _ in layers), torch_backend)
    if name == "torch" or (name == "auto" and device.type != "cuda"):
        return ChosenBackend(by_layer, "torch")
    try:
        from kvq_cli.attention import rematerialize_backend, transform_backend, triton_backend
    except ModuleNotFoundError as error:
        if name == "auto":
            return ChosenBackend(by_layer, f"torch (no triton: {error.name} is not installed)")
        raise UsageError(f"--backend triton: {error.name} is not installed; use --backend torch") from None
    if device.type != "cuda" and not triton_backend.interpreted():
        raise UsageError(
            f"--backend triton needs a GPU, the model is on {device}: use --backend torch, or set "
            "TRITON_INTERPRET=1 to run the kernels in Triton's interpreter, slowly"
        )
    refused: dict[str, list[int]] = {}  # reason -> layers
    for layer, plan in layers:
        if (reason := why_torch(layer, plan)) is not None:
            refused.setdefault(reason, []).append(layer.index)
    if refused and name == "triton":
        reason, indices = next(iter(refused.items()))
        raise UsageError(f"--backend triton: {_named(indices, len(layers))}: {reason}; use --backend auto or torch")
    by_torch = {index for indices in refused.values() for index in indices}
    engine = triton_backend.TritonBackend()
    by_kernels = [(layer, plan) for layer, plan in layers if layer.index not in by_torch]
    by_layer |= {layer.index: engine for layer, _ in by_kernels}
    inputs = [layer for layer, plan in by_kernels if plan.keys.source == "input"]
    rematerializing = rematerialize_backend.RematerializeBackend(engine, inputs)
    by_layer |= {layer.index: rematerializing for layer in inputs}
    components = [(layer, plan) for layer, plan in by_kernels if transform_backend.stores_components(plan)]
    transforming = transform_backend.TransformBackend(engine, components)
    by_layer |= {layer.index: transforming for layer, _ in components}
    summary = "triton, interpreted" if triton_backend.interpreted() else "triton"
    if refused:
        reasons = "; ".join(f"{_named(indices, len(layers))}: {reason}" for reason, indices in refused.items())
        summary = f"torch ({reasons})" if len(by_torch) == len(layers) else f"{summary}, partly torch ({reasons})"
    return ChosenBackend(by_layer, summary, None if by_torch else engine)


def why_torch(layer: AttentionLayer, plan: LayerPlan) -> str | None:
    """Why no kernel can compute the attention of a layer; None: one can. Imports Triton."""
    from kvq_cli.attention import rematerialize_backend, transform_backend, triton_backend

    if layer.score_form.unusual is not None:
        return layer.score_form.unusual
    if plan.keys.source == "input":
        return rematerialize_backend.unsupported(layer, plan)
    if transform_backend.stores_components(plan):
        return transform_backend.unsupported(plan, layer.rotation)
    return triton_backend.unsupported(plan, layer.rotation)


def _named(layers: list[int], count: int) -> str:
    """`all layers`, `layer 3`, `layers 0, 2`, of `count` layers."""
    if len(layers) == count:
        return "all layers"
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"
