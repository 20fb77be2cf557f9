"""Low-rank factors of W_k and W_v for groups of heads (PALU), whitened by the activations of a text or plain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvq_cli.calibration.codebooks import rounded
from kvq_cli.codecs.hadamard import hadamard
from kvq_cli.errors import KvqError
from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.specs import LowRankSpec

if TYPE_CHECKING:
    from kvq_cli.attention.capture_points import AttentionLayer
    from kvq_cli.attention.projections import Projection

ERROR_MEASURE = (
    "of the dropped directions: || y - y' || / || y || of y = W x on the calibration text, without the bias, or of W "
    "where no text is read; energy: share of the first direction of each group, sigma_1^2 / sum sigma^2, mean"
)
#: Singular values below this share of the first count as this share: their directions hold rounding errors alone.
_LEAST = 1e-7


class SecondMoments:
    """Hooks that sum y y^T of y = W_k x and W_v x, without bias, over the tokens that run through the model.

    A context: hooks are on the projections inside. Per layer and kind `[groups, W, W]` float64, W channels of a group.
    """

    def __init__(self, layers: Sequence[AttentionLayer], spec: LowRankSpec, shape: ModelShape) -> None:
        from kvq_cli.attention.projections import projections  # imports transformers

        self._groups = shape.kv_heads // spec.heads
        self._points = {layer.index: dict(zip("kv", projections(layer), strict=True)) for layer in layers}
        self._sums: dict[tuple[int, str], Tensor] = {}
        self._counted = (layers[0].index, "k")
        self.tokens = 0
        self._hooks = ExitStack()

    def __enter__(self) -> SecondMoments:
        with ExitStack() as undo:
            for layer, points in self._points.items():
                for kind, point in points.items():
                    hook = point.linear.register_forward_hook(self._hook(layer, kind, point))
                    undo.callback(hook.remove)
            self._hooks = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _hook(self, layer: int, kind: str, point: Projection) -> Any:
        def add(_module: nn.Module, _args: tuple, output: Tensor) -> None:
            y = output.detach()[0, :, point.part].float()
            if point.linear.bias is not None:
                y = y - point.linear.bias[point.part].float()
            if not y.isfinite().all():
                raise KvqError(
                    f"keys or values of layer {layer} are not all finite (NaN or infinity): calibrate with --dtype "
                    "float32, or check the model's weights"
                )
            y = y.unflatten(1, (self._groups, -1)).transpose(0, 1).double()
            moment = y.mT @ y
            self._sums[layer, kind] = moment + self._sums.get((layer, kind), 0)
            if (layer, kind) == self._counted:
                self.tokens += y.shape[1]

        return add

    def sums(self) -> dict[str, Tensor]:
        """The sums so far and their number of tokens, on the CPU, for `resume`."""
        named = {f"{layer}.{kind}": moment.cpu() for (layer, kind), moment in self._sums.items()}
        return {**named, "tokens": torch.tensor([self.tokens])}

    def resume(self, sums: Mapping[str, Tensor]) -> None:
        """Continue from `sums` of an interrupted run."""
        self.tokens = int(sums["tokens"])
        for layer, points in self._points.items():
            for kind, point in points.items():
                self._sums[layer, kind] = sums[f"{layer}.{kind}"].to(point.weight.device)

    def by_layer(self) -> dict[int, dict[str, Tensor]]:
        """The means over tokens, by layer and kind ("k", "v")."""
        return {
            layer: {kind: self._sums[layer, kind] / self.tokens for kind in points}
            for layer, points in self._points.items()
        }


def factorize_groups(
    layer: AttentionLayer, spec: LowRankSpec, shape: ModelShape, moments: Mapping[str, Tensor] | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """W ~ down up of one layer's W_k and W_v: (tensors in the model's dtype, errors by name).

    moments: E[y y^T] of y = W x by kind, `[groups, W, W]`; None: W^T W takes its place, which minimizes the error of
    the weights. Tensors: `<kind>.down` `[hidden_size, groups * latents]`, `<kind>.up` `[groups * latents, kv_heads *
    head_dim]`, block-diagonal. Errors: `rank`, `residual` and `energy`, see ERROR_MEASURE.

    PALU whitens with the Cholesky factor L of E[x x^T] and takes W L = U S V^T: its factors are U S^(1/2) and S^(1/2)
    V^T L^-1 = S^(-1/2) U^T W. U and S^2 are eigenvectors and eigenvalues of W L L^T W^T = E[y y^T], so that neither L
    nor its inverse is needed. (Here E is a mean over tokens, there a sum, which scales all latents alike.)
    """
    from kvq_cli.attention.projections import projections  # imports transformers

    tensors: dict[str, Tensor] = {}
    errors: dict[str, Any] = {}
    groups = shape.kv_heads // spec.heads
    for kind, projection in zip("kv", projections(layer), strict=True):
        weight = projection.weight.detach().double().unflatten(0, (groups, -1))  # [groups, W, hidden_size]
        moment = weight @ weight.mT if moments is None else moments[kind].to(weight.device)
        values, vectors = torch.linalg.eigh(moment)
        values, vectors = values.flip(1).clamp_min(0), vectors.flip(2)
        # The sign of an eigenvector is arbitrary: make its largest number positive, so that all libraries agree.
        vectors = vectors * vectors.gather(1, vectors.abs().argmax(dim=1, keepdim=True)).sign()
        kept, basis = values[:, : spec.latents], vectors[:, :, : spec.latents]
        sigma = kept.sqrt()
        sigma = sigma.maximum(_LEAST * sigma[:, :1]).clamp_min(torch.finfo(torch.float64).tiny)
        down = (basis.mT @ weight) / sigma.sqrt().unsqueeze(2)  # [groups, latents, hidden_size]
        up = basis * sigma.sqrt().unsqueeze(1)  # [groups, W, latents]
        if spec.hadamard:
            down, up = hadamard(down.mT).mT, hadamard(up)
        tensors[f"{kind}.down"] = down.flatten(0, 1).T.to(shape.torch_dtype).contiguous()
        tensors[f"{kind}.up"] = torch.block_diag(*up.mT).to(shape.torch_dtype).contiguous()
        total = values.sum().clamp_min(torch.finfo(torch.float64).tiny)
        first = values[:, 0] / values.sum(1).clamp_min(torch.finfo(torch.float64).tiny)
        errors[kind] = {
            "rank": groups * spec.latents,
            "residual": rounded((1 - kept.sum() / total).clamp_min(0).sqrt().item()),
            "energy": rounded(first.mean().item()),
        }
    return tensors, errors
