"""Choose who computes the attention of each layer: kernels or PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from kvq_cli.attention import torch_backend
from kvq_cli.attention.forward_context import Backend
from kvq_cli.attention.taps import AttentionSite
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import LayerPlan

if TYPE_CHECKING:
    from kvq_cli.attention.triton_backend import TritonBackend

BACKENDS = ("auto", "triton", "torch")


class ChosenBackend:
    """The backend of each layer. summary: which, and why not another, in words. engine: where kernels compute the
    attention of all layers, the holder of their tensors."""

    def __init__(self, by_layer: Mapping[int, Backend], summary: str, engine: TritonBackend | None = None) -> None:
        self._by_layer, self.summary, self.engine = by_layer, summary, engine

    def of(self, layer: int) -> Backend:
        """The backend that computes the attention of this layer."""
        return self._by_layer[layer]

    def by_kernels(self, layer: int) -> bool:
        """Whether kernels, not PyTorch, compute the attention of this layer."""
        return self._by_layer[layer] is not torch_backend


def check_backend(name: str) -> None:
    """UsageError for a name that is none."""
    if name not in BACKENDS:
        raise UsageError(f"unknown backend {name!r}; valid: {', '.join(BACKENDS)}")


def choose_backend(name: str, device: torch.device, layers: Sequence[tuple[AttentionSite, LayerPlan]]) -> ChosenBackend:
    """The backend of each layer. "auto": Triton on a GPU, for layers that its kernels can read, else PyTorch; "triton":
    UsageError where the kernels cannot run or cannot read a layer."""
    check_backend(name)
    everywhere_torch = dict.fromkeys((site.index for site, _ in layers), torch_backend)
    if name == "torch" or (name == "auto" and device.type != "cuda"):
        return ChosenBackend(everywhere_torch, "torch")
    try:
        from kvq_cli.attention import remade_kernel as remade
        from kvq_cli.attention import triton_backend as kernels
    except ModuleNotFoundError as error:
        if name == "auto":
            return ChosenBackend(everywhere_torch, f"torch (no triton: {error.name} is not installed)")
        raise UsageError(f"--backend triton: {error.name} is not installed; use --backend torch") from None
    if device.type != "cuda" and not kernels.interpreted():
        raise UsageError(
            f"--backend triton needs a GPU, the model is on {device}: use --backend torch, or set "
            "TRITON_INTERPRET=1 to run the kernels in Triton's interpreter, slowly"
        )
    refused: dict[str, list[int]] = {}
    for site, plan in layers:
        if site.score_form.unusual:
            why = site.score_form.unusual
        elif plan.keys.source == "input":
            why = remade.unsupported(site, plan)
        else:
            why = kernels.unsupported(plan, site.rotation)
        if why:
            refused.setdefault(why, []).append(site.index)
    if refused and name == "triton":
        why, where = next(iter(refused.items()))
        raise UsageError(f"--backend triton: {_said(where, len(layers))}: {why}; use --backend auto or torch")
    engine, left_out = kernels.TritonBackend(), {index for where in refused.values() for index in where}
    chosen = {index: torch_backend if index in left_out else engine for index in everywhere_torch}
    kept_inputs = [site for site, plan in layers if plan.keys.source == "input" and site.index not in left_out]
    chosen |= dict.fromkeys((site.index for site in kept_inputs), remade.RemadeBackend(engine, kept_inputs))
    summary = "triton, interpreted" if kernels.interpreted() else "triton"
    if refused:
        reasons = "; ".join(f"{_said(where, len(layers))}: {why}" for why, where in refused.items())
        summary = f"torch ({reasons})" if len(left_out) == len(layers) else f"{summary}, partly torch ({reasons})"
    return ChosenBackend(chosen, summary, None if left_out else engine)


def _said(layers: list[int], count: int) -> str:
    """`all layers`, `layer 3`, `layers 0, 2`."""
    if len(layers) == count:
        return "all layers"
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"
