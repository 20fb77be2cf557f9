"""Calibrate the Karhunen-Loeve transforms of one stream (keys or values of a layer), and the steps of their codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from kvq_kernels.fields import FIELD
from torch import Tensor

from kvq_cli.calibration.captured import CapturedStream
from kvq_cli.calibration.codebooks import relative, rounded
from kvq_cli.calibration.uniform_steps import losses_by_width, squared_losses
from kvq_cli.codecs.base import Codec
from kvq_cli.codecs.gain import Gain, gain_of
from kvq_cli.codecs.transform import same_widths, transform_codec
from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.transform_specs import Profile, TransformSpec, transform_layout

ERROR_MEASURE = (
    "on held-out samples, relative to the spread around each channel's mean; fisher: squared errors weighted with "
    "squared gradients; plain: without weights; loss: squared products of error and gradient of a token and group"
)
#: Share of the mean eigenvalue that is added to the Fisher matrix, so that directions without gradients keep a bound.
SHRINKAGE = 1e-3
#: Components of at most this variance are constant.
_CONSTANT = 1e-60
#: The mean squared gradient of a group without gradients: its components then cost less than those of all other groups,
#: and are not yet constant.
_NO_GRADIENT = 1e-30
#: Training tokens that steps are fitted to, at most: evenly spaced.
MAX_TOKENS = 1 << 15
#: Tokens of float64 statistics at a time.
_TILE = 4096


@dataclass(frozen=True)
class TransformSettings:
    """How the transforms of a stream, and the widths and steps of their components, are fitted.

    groups: of channels, which have a transform each. metric: see `TransformSpec`. gain: whether tokens have a gain.
    fisher: weight errors of components by squared gradients. damping: share of a component's mean weight that is added
    to the weight of every token.
    """

    groups: int
    metric: str
    gain: bool
    fisher: bool
    damping: float

    @classmethod
    def of(cls, spec: TransformSpec, kind: str, shape: ModelShape, damping: float) -> TransformSettings:
        """Those of keys ("k") or values ("v")."""
        return cls(spec.groups(kind, shape)[0], spec.metric, kind in spec.gains, spec.fisher, damping)


@dataclass(frozen=True)
class Transform:
    """The transforms of a stream, float64; G groups of W channels, components by descending variance.

    mean, std: `[G, W]`. analysis: `[G, W, W]`: z = analysis (x - mean). synthesis: its inverse. variances: of z, where
    there is a gain, of z / gain, `[G, W]`, in units of the loss. losses: `[G, fields, 9]`, see `profiles`.
    """

    mean: Tensor
    std: Tensor
    analysis: Tensor
    synthesis: Tensor
    variances: Tensor
    losses: Tensor

    def tensors(self) -> dict[str, Tensor]:
        return dict(vars(self))


def fit_transform(captured: CapturedStream, settings: TransformSettings) -> Transform:
    """Diagonalize the covariance of y = G^(1/2) (x - mean), where G is the Fisher matrix E[g g^T] of the training
    samples, its diagonal, or the identity (`metric`): z = U^T y. Mean and covariance are those of all samples that are
    not held out.

    The error of a token is proportional to its gain, and what is coded is (x - mean) / gain: with gains, G is
    E[gain^2 g g^T], and the covariance that of (x - mean) / gain. The gains are those of a transform without them.
    """
    x, g = (_grouped(t, settings.groups) for t in (captured.not_held_out, captured.g[: captured.training]))
    mean = torch.stack([each.double().mean(0) for each in x])
    ones = torch.ones(x.shape[:2], dtype=torch.float32, device=x.device)
    covariance = _second_moment(x, mean, ones)
    std = covariance.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
    analysis, synthesis, variances = _diagonalized(covariance, _second_moment(g, 0 * mean, ones), settings.metric)
    if settings.gain:
        gain = _gains(x, mean, analysis, variances, half_of(x.shape[2]))
        covariance, fisher = _second_moment(x, mean, 1 / gain), _second_moment(g, 0 * mean, gain)
        analysis, synthesis, variances = _diagonalized(covariance, fisher, settings.metric)
    fitted = Transform(mean, std, analysis, synthesis, variances, torch.empty(0))
    components = Components(captured, fitted, half_of(x.shape[2]), settings)
    return replace(fitted, losses=losses_by_width(components.y, components.weights) * components.unit**2)


def half_of(width: int) -> int:
    """Half of the components, in whole fields: those whose gain counts until it is known which are kept."""
    return max(1, width // (2 * FIELD)) * FIELD


def _diagonalized(covariance: Tensor, fisher: Tensor, metric: str) -> tuple[Tensor, Tensor, Tensor]:
    """Analysis, synthesis and variances of `Transform`."""
    identity = torch.eye(fisher.shape[1], dtype=torch.float64, device=fisher.device).expand_as(fisher)
    scale = fisher.diagonal(dim1=1, dim2=2).mean(1).view(-1, 1, 1)
    scale = torch.where(scale > 0, scale, _NO_GRADIENT)
    if metric == "none":
        fisher = identity * scale
    elif metric == "diagonal":
        fisher = fisher * identity
    fisher = fisher + SHRINKAGE * scale * identity
    values, vectors = torch.linalg.eigh(fisher)
    root = vectors @ (values.sqrt().unsqueeze(2) * vectors.mT)
    inverse = vectors @ (values.rsqrt().unsqueeze(2) * vectors.mT)
    variances, basis = torch.linalg.eigh(root @ covariance @ root)
    variances, basis = variances.flip(1).clamp_min(0), basis.flip(2)
    # The sign of an eigenvector is arbitrary: make its largest number positive, so that all libraries agree.
    basis = basis * basis.gather(1, basis.abs().argmax(dim=1, keepdim=True)).sign()
    return basis.mT @ root, inverse @ basis, variances


def _gains(x: Tensor, mean: Tensor, analysis: Tensor, variances: Tensor, kept: int) -> Tensor:
    """The gains of tokens from their first `kept` components, `[G, N]` float32. x: `[G, N, W]`."""
    gain = Gain(variances[:, :kept].sqrt().float())
    rows = analysis[:, :kept].float().mT
    tiles = ((tile.float() - mean.float().unsqueeze(1)) @ rows for tile in x.split(_TILE, dim=1))
    return torch.cat([gain_of(gain.index(z.unsqueeze(0)))[0] for z in tiles], dim=1)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """`[samples, tokens, kv_heads, head_dim]` -> `[groups, samples * tokens, channels of a group]`."""
    return x.flatten(0, 1).flatten(1).unflatten(1, (groups, -1)).transpose(0, 1)


def _second_moment(x: Tensor, center: Tensor, factors: Tensor) -> Tensor:
    """Mean of y y^T over tokens, where y = factor (x - center): `[G, N, W]` -> `[G, W, W]` float64. factors: `[G, N]`,
    or of more tokens, of which the first count."""
    total = torch.zeros(len(x), x.shape[2], x.shape[2], dtype=torch.float64, device=x.device)
    for first in range(0, x.shape[1], _TILE):
        tile = slice(first, min(first + _TILE, x.shape[1]))
        y = (x[:, tile].double() - center.unsqueeze(1)) * factors[:, tile].double().unsqueeze(2)
        total += y.mT @ y
    return total / x.shape[1]


class Components:
    """The components of a stream's training tokens, relative to their gains, and the weights of errors of these.

    kept: the gain is that of so many first components. y: `[G, N, K]` float32, divided by `scale` `[G, 1]`; weights: of
    the same shape, times scale^2 / unit^2. Where attention hardly reads packed tokens, gradients are so small that
    their squares are below all float32 numbers.
    """

    def __init__(self, captured: CapturedStream, transform: Transform, kept: int, settings: TransformSettings) -> None:
        x, g = (_grouped(t[: captured.training], settings.groups) for t in (captured.x, captured.g))
        stride = -(-x.shape[1] // MAX_TOKENS)
        x, g = x[:, ::stride].float(), g[:, ::stride].float()
        largest = transform.variances.amax(1, keepdim=True).sqrt()
        self.scale = torch.where(largest > 0, largest, 1.0)
        self.unit = float(g.abs().max()) or 1.0
        z = (x - transform.mean.float().unsqueeze(1)) @ (transform.analysis / self.scale.unsqueeze(2)).float().mT
        gain = torch.ones_like(z[:, :, :1])
        if settings.gain:
            gain = _gains(x, transform.mean, transform.analysis, transform.variances, kept).unsqueeze(2)
        self.y = z / gain
        synthesis = (transform.synthesis * self.scale.unsqueeze(2)).float()
        weights = (self.scale / self.unit).square().float().unsqueeze(2).expand_as(z).clone()
        if settings.fisher:
            weights = ((g / self.unit) @ synthesis).square_()
        mean = weights.mean(1, keepdim=True)
        weights += settings.damping * mean
        self.weights = weights.mul_(gain.square() / (1 + settings.damping))


def calibrate_transform(
    captured: CapturedStream, transform: Transform, profile: Profile, kind: str, settings: TransformSettings
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Steps of a stream's components: tensors as in `transform_layout`, and errors as plain JSON values.

    kind: "k" or "v". Errors are measured on the held-out samples with tensors as stored.
    """
    layout = transform_layout(profile, transform.mean.shape[1]).items()
    tensors = {name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in layout}
    tensors |= {"widths": torch.tensor(profile.rows, dtype=torch.uint8)}
    tensors |= {"mean": transform.mean.float(), "std": transform.std.float()}
    for groups in same_widths(tensors):
        kept = slice(FIELD * len(profile.widths[groups[0]]))
        steps = _steps(captured, transform, profile.widths[groups[0]], groups, settings)
        for name, found in steps.items():
            place = (groups, slice(None), kept) if name == "synthesis" else (groups, kept)
            tensors[name][place] = found.float().cpu()
    tensors = {name: tensor.to(transform.mean.device) for name, tensor in tensors.items()}
    codec = transform_codec(captured.x.shape[2], tensors, values=kind == "v")
    measured = {
        "bytes": profile.nbytes,
        "effective_tokens": rounded(effective_tokens(captured)),
        "chosen": held_out_errors(captured, codec, settings.groups),
    }
    return tensors, measured


def _steps(
    captured: CapturedStream,
    transform: Transform,
    widths: Sequence[int],
    groups: Sequence[int],
    settings: TransformSettings,
) -> dict[str, Tensor]:
    """Tensors of some groups with the same widths, of the components that they keep."""
    if len(groups) < settings.groups:
        captured = CapturedStream(captured.x[:, :, groups], captured.g[:, :, groups], captured.held_out)
        transform = Transform(**{name: x[groups] for name, x in transform.tensors().items()})
        settings = replace(settings, groups=len(groups))
    kept = FIELD * len(widths)
    components = Components(captured, transform, kept, settings)
    fields = (components.y.split(FIELD, dim=2), components.weights.split(FIELD, dim=2))
    steps = [squared_losses(y, weights, width)[0] for y, weights, width in zip(*fields, widths, strict=False)]
    step = torch.cat(steps, dim=1).double() * components.scale
    # Constant components stay at the mean, whatever their code.
    live = transform.variances[:, :kept] > _CONSTANT
    bits = torch.tensor(widths, device=step.device).repeat_interleave(FIELD).to(step)
    found = {
        "analysis": transform.analysis[:, :kept] * (live / step).unsqueeze(2),
        "synthesis": transform.synthesis[:, :, :kept] * (live * step).unsqueeze(1),
        "center": ((2**bits - 1) / 2).expand_as(step),
    }
    if settings.gain:
        found["deviation"] = transform.variances[:, :kept].sqrt() * live / step
    return found


def effective_tokens(captured: CapturedStream) -> float:
    """(sum w)^2 / sum w^2 of the squared gradients w of the training tokens: about how many tokens a mean that is
    weighted by them is computed from; 0 without gradients."""
    weights = captured.g[: captured.training].double().square().sum((2, 3))
    return float(weights.sum().square() / weights.square().sum().clamp_min(1e-300))


def held_out_errors(captured: CapturedStream, codec: Codec, groups: int) -> dict[str, Any]:
    """Errors of a codec on the held-out samples, as plain JSON values; see `decoded_errors`."""
    tokens = captured.x.shape[1] // codec.block_tokens * codec.block_tokens
    x = captured.x[captured.training : len(captured.g), :tokens].float().transpose(1, 2)
    return decoded_errors(captured, codec.decode(codec.encode(x), torch.float32), groups)


def decoded_errors(captured: CapturedStream, decoded: Tensor, groups: int) -> dict[str, Any]:
    """Errors of what was decoded of the held-out samples' first tokens, `[samples, kv_heads, tokens, head_dim]`, as
    plain JSON values; see `ERROR_MEASURE`. "loss" sums the products of error and gradient within each of `groups`
    groups of heads."""
    held_out = slice(captured.training, len(captured.g)), slice(decoded.shape[2])
    x, g = (t[held_out].float().transpose(1, 2) for t in (captured.x, captured.g))  # [S, H, T, D]
    mean = torch.stack([each.double().mean(0) for each in _grouped(captured.not_held_out, len(x[0]))])  # [H, D]
    lost = decoded - x
    spread = x - mean.float().unsqueeze(1)

    def loss(error: Tensor) -> Tensor:
        return (error * g).unflatten(1, (groups, -1)).sum((2, 4)).double().square().sum()

    def ratio(error: Tensor, whole: Tensor) -> float:
        return rounded(relative(error.sum(), whole.sum()).item())

    weighted, whole = ((each * g).double().square().sum((0, 2, 3)) for each in (lost, spread))
    return {
        "fisher": ratio(weighted, whole),
        "plain": ratio(lost.double().square(), spread.double().square()),
        "loss": ratio(loss(lost), loss(spread)),
        "fisher_per_head": [ratio(one, all_) for one, all_ in zip(weighted, whole, strict=True)],
    }
