"""Decompose the keys, and the values, of all layers together, and choose the groups of their components."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from kvq_cli.calibration.captured import CapturedStream
from kvq_cli.calibration.kinds.base import Calibrated, Progress
from kvq_cli.calibration.kinds.capture import CapturePlan
from kvq_cli.calibration.principal import (
    GROUP_TOKENS,
    MAX_TOKENS,
    best_groups,
    evenly,
    group_errors,
    principal_components,
)
from kvq_cli.calibration.settings import CalibrationOptions
from kvq_cli.calibration.streams import KINDS, Stream, StreamFunction, read_captured
from kvq_cli.calibration.transforms import ERROR_MEASURE, decoded_errors
from kvq_cli.calibration.work_folder import WorkFolder
from kvq_cli.codecs.component_groups import SIZES, ComponentGroups, Group
from kvq_cli.distributed import Workers
from kvq_cli.errors import KvqError
from kvq_cli.methods.base import Method
from kvq_cli.methods.joined_spec import JoinedSpec
from kvq_cli.models import LoadedModel


@dataclass(frozen=True)
class JoinedPlan(CapturePlan):
    """One transform of the keys of all layers, one of the values, and the groups of their components."""

    measure = ERROR_MEASURE

    spec: JoinedSpec

    @classmethod
    def make(cls, loaded: LoadedModel, method: Method, options: CalibrationOptions) -> Self:
        # No gradient is used: two samples have them, of which one is held out.
        return super().make(loaded, method, replace(options, gradients=options.gradients or 2))

    @property
    def _tokens(self) -> int:
        """Tokens whose covariance is decomposed: those of `evenly`."""
        training = (self.settings.samples - self.settings.held_out) * self.capture.tokens
        return -(-training // -(-training // MAX_TOKENS))

    def step_bytes(self) -> int:
        numbers = self.spec.numbers(self.loaded.shape)
        return 2 * 8 * numbers * min(numbers, self._tokens)

    def sizes(self, resident: int) -> dict[str, Any]:
        numbers = self.spec.numbers(self.loaded.shape)
        # Tokens and their differences from the mean in 32 bits; products, their eigenvectors, workspace and the basis
        # in 64.
        decomposing = 8 * self._tokens * numbers + 6 * 8 * min(numbers, self._tokens) * max(numbers, self._tokens)
        sizes = super().sizes(resident)
        return sizes | {"memory_bytes": max(sizes["memory_bytes"], resident + decomposing)}

    def functions(
        self, work: WorkFolder, captures: WorkFolder, progress: Progress, workers: Workers | None
    ) -> Callable[[Stream], StreamFunction]:
        for done, kind in enumerate(KINDS):
            progress("transform", done, len(KINDS))
            if not work.has_tensors(f"joined.{kind}"):
                tensors = self._decompose(captures, kind)
                work.write_tensors(f"joined.{kind}", {name: x.cpu() for name, x in tensors.items()})
        progress("transform", len(KINDS), len(KINDS))
        joined = {kind: work.read_tensors(f"joined.{kind}") for kind in KINDS}
        shape = self.loaded.shape

        def calibrate(stream: Stream) -> StreamFunction:
            tensors = joined[stream[1]]
            place = shape.cached_layers.index(stream[0])
            width = shape.kv_heads * shape.head_dim
            rows = slice(place * width, (place + 1) * width)
            own = {name: tensors[name][rows] for name in ("mean", "spread", "basis")}
            own |= {name: tensors[name] for name in ("groups", "components")}
            return partial(layer_tensors, tensors=own, dtype=shape.dtype, tokens=self._tokens)

        return calibrate

    def _decompose(self, captures: WorkFolder, kind: str) -> dict[str, Tensor]:
        """Mean, spread and basis of all layers, the groups, and what their codes give of the held-out components."""
        training, held_out = [], []
        for layer in self.loaded.shape.cached_layers:
            captured = read_captured(self, captures, layer, kind)
            training.append(evenly(captured.not_held_out.flatten(2).flatten(0, 1), MAX_TOKENS).float())
            held_out.append(held_out_of(captured).flatten(2).flatten(0, 1).float())
        x = torch.cat(training, dim=1)
        training.clear()
        if not x.isfinite().all():
            what = "keys" if kind == "k" else "values"
            raise KvqError(f"{what} are not all finite (NaN or infinity): calibrate with --dtype float32")
        mean, basis = principal_components(x)
        if not basis.shape[1]:
            raise KvqError(f"{len(x)} tokens differ in fewer than {SIZES[0]} components: raise --samples or --seqlen")
        spread = (x - mean.float()).square().mean(0).sqrt()
        z = evenly(x - mean.float(), GROUP_TOKENS) @ basis.float()
        energies = z.double().square().sum(0).unflatten(0, (-1, SIZES[0])).sum(1).cpu().numpy()
        words, dtype = self.spec.words(self.loaded.shape), self.loaded.shape.dtype
        groups = best_groups(group_errors(z, dtype, words), energies, words)
        basis = basis[:, : sum(group.components for group in groups)].float()
        coding = ComponentGroups(groups, dtype)
        components = ((torch.cat(held_out, dim=1) - mean.float()) @ basis)[None, None]
        return {
            "mean": mean.float(),
            "spread": spread,
            "basis": basis,
            "groups": torch.tensor(groups, dtype=torch.int32),
            "components": coding.decode(coding.encode(components))[0, 0],
        }


def held_out_of(captured: CapturedStream) -> Tensor:
    """The activations of the held-out samples, `[samples, tokens, kv_heads, head_dim]`."""
    return captured.x[captured.training : len(captured.g)]


def layer_tensors(captured: CapturedStream, tensors: dict[str, Tensor], dtype: str, tokens: int) -> Calibrated:
    """A layer's tensors as `JoinedLayersCodec` takes them, and its errors.

    tensors: those of the layer, flat, and the decoded `components` of the held-out tokens. tokens: decomposed ones.
    """
    x = held_out_of(captured)
    own = {name: tensor.to(x.device) for name, tensor in tensors.items()}
    decoded = (own.pop("components") @ own["basis"].T + own["mean"]).view(x.shape).transpose(1, 2)
    stored = {**own, **{name: own[name].view(x.shape[2:]).contiguous() for name in ("mean", "spread")}}
    return stored, {
        "bytes": ComponentGroups([Group(*row) for row in own["groups"].tolist()], dtype).nbytes,
        "effective_tokens": float(tokens),
        "chosen": decoded_errors(captured, decoded, groups=1),
    }
