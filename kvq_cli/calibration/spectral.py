"""OSCAR's rotations (https://arxiv.org/abs/2605.17757): eigenvectors of what attention reads keys and values by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvq_cli.attention.attach import attach
from kvq_cli.attention.capture_points import decoder_of
from kvq_cli.cache_argument import cache_argument
from kvq_cli.calibration.codebooks import rounded
from kvq_cli.codecs.base import Codec, Prompt, PromptCodec, State
from kvq_cli.codecs.hadamard import hadamard
from kvq_cli.codecs.identity import IdentityCodec
from kvq_cli.codecs.layout import Layout
from kvq_cli.errors import KvqError
from kvq_cli.methods.base import LayerPlan, Method, StreamPlan
from kvq_cli.methods.window import Window

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from kvq_cli.codecs.layout import TensorLike
    from kvq_cli.methods.base import ModelShape

ERROR_MEASURE = (
    "of the rotations R: || R R^T - I || / || I ||, their rounding; energy: share of the first direction, lambda_1 / "
    "sum lambda, of the queries' second moments for keys, and of the values' weighted ones for values"
)
#: Sums of a layer over the text, float64. By `queries_of`: second moments of queries `queries` `[kv_heads, D, D]`,
#: their number `count`; mean squares of a head's keys and values by channel, `k` and `v` `[D]`, added over `tokens`
#: tokens. By `values_of`: second moments of weighted values `values` `[kv_heads, D, D]`, and sums of weights `weights`
#: `[kv_heads]`.
Sums = dict[str, Tensor]


class _PassedOn(PromptCodec):
    """Passes prompts on; stores what it is given as it is."""

    nominal_bits = 16.0

    def __init__(self, receive: Callable[[Prompt], None]) -> None:
        self._receive, self.stored_as = receive, IdentityCodec()

    def layout(self, heads: int, dim: int, dtype: str, tokens: int) -> Layout:
        return self.stored_as.layout(heads, dim, dtype)  # type: ignore[union-attr]

    def fit(self, prompt: Prompt) -> State:
        self._receive(prompt)
        return {}

    def with_state(self, state: State, saliency: Tensor | None = None) -> Codec:
        return IdentityCodec()


@dataclass(frozen=True)
class _Reading(Method):
    """Keys and values of all layers as they are; prompts go to `receive`, with the layer's index."""

    receive: Callable[[int, Prompt], None] = field(kw_only=True)
    name, paper, summary, caches = "reading", "", "", ""
    nominal_bits = 16.0

    def plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> LayerPlan:
        keys = _PassedOn(lambda prompt: self.receive(layer, prompt))
        return LayerPlan(StreamPlan("post_rope", keys, Window()), StreamPlan("value", IdentityCodec(), Window()))


class TextSums:
    """Sums over queries and keys after RoPE, and values, of texts that run through a model."""

    def __init__(self, model: PreTrainedModel, summed: Callable[[int, Prompt], Sums]) -> None:
        """summed: of a layer's index and one text; what it returns is added up by layer."""
        self.by_layer: dict[int, Sums] = {}
        self._model, self._summed = model, summed

    def add(self, tokens: Tensor) -> None:
        """Run one text, `[tokens]`. KvqError names a layer whose numbers are not finite."""
        with torch.no_grad(), attach(self._model, _Reading(receive=self._receive, local="packed")) as kv:
            ids = tokens[None].to(self._model.device)
            decoder_of(self._model)(input_ids=ids, **cache_argument(kv.new_cache()), use_cache=True)

    def _receive(self, layer: int, prompt: Prompt) -> None:
        sums, before = self._summed(layer, prompt), self.by_layer.get(layer, {})
        if not all(x.isfinite().all() for x in sums.values()):
            raise KvqError(
                f"queries, keys or values of layer {layer} are not all finite (NaN or infinity): calibrate with "
                "--dtype float32, or check the model's weights"
            )
        self.by_layer[layer] = {name: x.cpu() + before.get(name, 0) for name, x in sums.items()}


def queries_of(_layer: int, prompt: Prompt) -> Sums:
    """Return the sums of one text that its queries have; see `Sums`."""
    keys, values = prompt.keys[0].double(), prompt.values[0].double()
    queries = prompt.queries[0].double().unflatten(0, (keys.shape[0], -1)).flatten(1, 2)  # [H, heads * T, D]
    return {
        "queries": queries.mT @ queries,
        "count": torch.tensor([queries.shape[1]], dtype=torch.float64),
        **{kind: x.square().mean(0).sum(0) for kind, x in (("k", keys), ("v", values))},
        "tokens": torch.tensor([keys.shape[1]], dtype=torch.float64),
    }


def values_of(by_layer: Mapping[int, Sums]) -> Callable[[int, Prompt], Sums]:
    """Return the sums of one text's values, weighted by w = k^T C k, with C the second moments of a kv head's
    queries."""

    def summed(layer: int, prompt: Prompt) -> Sums:
        keys, values = prompt.keys[0].double(), prompt.values[0].double()
        moments = (by_layer[layer]["queries"] / by_layer[layer]["count"]).to(keys.device)
        weights = (keys @ moments * keys).sum(2, keepdim=True)
        return {"values": (weights * values).mT @ values, "weights": weights.sum((1, 2))}

    return summed


def layer_rotations(queries: Sums, values: Sums) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a layer's rotations of keys and of values from its `Sums`, and their errors, see ERROR_MEASURE.

    Keys: of C_Q, the mean over kv heads of their queries' second moments. Values: of C_S, the mean over kv heads of sum
    w v v^T / sum w. Tensors, float32: `<kind>.rotation` `[1, D, D]`, whose rows are the new channels, and
    `<kind>.spread` `[1, D]`, the root mean square of each channel before.
    """
    least = torch.finfo(torch.float64).tiny
    of_kind = {
        "k": (queries["queries"] / queries["count"]).mean(0),
        "v": (values["values"] / values["weights"].clamp_min(least).view(-1, 1, 1)).mean(0),
    }
    tensors: dict[str, Tensor] = {}
    errors: dict[str, Any] = {}
    for kind, covariance in of_kind.items():
        rotation, energy = spectral_rotation(covariance)
        tensors[f"{kind}.rotation"] = rotation.unsqueeze(0)
        tensors[f"{kind}.spread"] = (queries[kind] / queries["tokens"]).sqrt().float().unsqueeze(0)
        identity = torch.eye(len(rotation), dtype=torch.float64)
        residual = (rotation.double() @ rotation.double().T - identity).norm() / identity.norm()
        errors[kind] = {"rank": len(rotation), "residual": rounded(residual.item()), "energy": rounded(energy)}
    return tensors, errors


def spectral_rotation(covariance: Tensor) -> tuple[Tensor, float]:
    """(R^T, lambda_1 / sum lambda) of a symmetric matrix `[D, D]` float64: R = U H P, float32, with the eigenvectors U,
    in ascending order of their values, a Hadamard matrix H, and the permutation P that puts the column of the i-th
    largest value where the reversed bits of i say."""
    values, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
    # The sign of an eigenvector is arbitrary: make its largest number positive, so that all libraries agree.
    vectors = vectors * vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True)).sign()
    width = len(values)
    columns = torch.empty(width, dtype=torch.int64)
    columns[reversed_bits(width)] = torch.arange(width - 1, -1, -1)
    rotation = hadamard(vectors)[:, columns]
    total = values.clamp_min(0).sum().clamp_min(torch.finfo(torch.float64).tiny)
    return rotation.T.contiguous(), (values[-1].clamp_min(0) / total).item()


def reversed_bits(width: int) -> Tensor:
    """0 to width - 1 in the order of their reversed bits, int64; for a width that is no power of two, those of the next
    one that are below it."""
    bits = max(1, (width - 1).bit_length())
    order = [int(f"{i:0{bits}b}"[::-1], 2) for i in range(2**bits)]
    return torch.tensor([i for i in order if i < width])
