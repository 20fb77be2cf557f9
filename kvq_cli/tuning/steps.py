"""Run the long steps of a search and store them: transforms, calibrated streams, errors of candidates, KL."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from kvq_cli.calibration import estimate
from kvq_cli.calibration.kinds.base import Progress
from kvq_cli.calibration.kinds.mixed import MixedPlan
from kvq_cli.calibration.parallel import run_parallel
from kvq_cli.calibration.streams import (
    calibrate_part,
    read_captured,
    stored_transform,
    streams_of,
    transform_settings,
)
from kvq_cli.calibration.transforms import held_out_errors
from kvq_cli.calibration.work_folder import WorkFolder
from kvq_cli.codecs.base import Codec
from kvq_cli.methods.base import Method
from kvq_cli.methods.mixed import Mixed
from kvq_cli.methods.registry import to_config
from kvq_cli.methods.transform_specs import TransformSpec
from kvq_cli.tuning.measure import Meter
from kvq_cli.tuning.menus import Floats, Stream, klt_losses
from kvq_cli.tuning.settings import windows_names

UNCOMPRESSED = "fp16"
#: Blocks that are encoded to count their bytes.
_BLOCKS = 8


class Steps:
    """Steps are stored in `work` by what they depend on, not by the goal of the search: a search that was interrupted,
    or goes on with another goal, repeats none of them."""

    def __init__(
        self, plan: MixedPlan, work: WorkFolder, captures: WorkFolder, meter: Meter, progress: Progress
    ) -> None:
        self.plan, self.progress = plan, progress
        self.shape = plan.loaded.shape
        self.streams = streams_of(plan)
        self._work, self._captures, self._meter = work, captures, meter
        self._measured: dict[str, Any] = work.read_json("measured") or {}

    def expected_losses(self, spec: TransformSpec) -> dict[Stream, Floats]:
        """Fit the transforms of klt; returns each stream's expected loss at each rate, see `klt_losses`."""
        losses = {}

        def fit(stream: Stream) -> None:
            settings = transform_settings(self.plan, spec, stream[1])
            fitted = stored_transform(self.plan, self._work, self._captures, stream, settings)
            losses[stream] = klt_losses(fitted.losses.cpu().numpy())

        self._run("transform", fit, self.streams)
        return losses

    def calibrate(self, names: Mapping[Stream, str]) -> None:
        """Calibrate streams by these methods, as far as this was not done."""

        def run(stream: Stream) -> None:
            step, component = _step(stream, names[stream]), self._component(stream, names[stream])
            tensors, errors = calibrate_part(self.plan, self._work, self._captures, stream, component)
            self._work.write_tensors(step, {key: tensor.cpu() for key, tensor in tensors.items()})
            self._work.write_json(step, errors)  # last: marks the step as finished

        missing = [stream for stream, name in names.items() if self._work.read_json(_step(stream, name)) is None]
        self._run("calibrate", run, missing)

    def kl(self, names: Mapping[Stream, str]) -> tuple[float, float]:
        """(KL in nats per token, packed bits) of a calibrated configuration."""
        method = self.method(names)
        key = f"{method.keys} | {method.values}"
        if key not in self._measured:
            self._write(key, self._meter({**self.plan.request(), "method": to_config(method)}, self.tensors(names)))
        kl, bits = self._measured[key]
        return kl, bits

    def has_error(self, stream: Stream, name: str) -> bool:
        """Whether `error` of the stream is known."""
        return _error_key(stream, name) in self._measured

    def error(self, stream: Stream, name: str) -> tuple[float, int]:
        """(loss, bytes of a token, rounded up) of a stream under a method. Loss: squared products of error and gradient
        on held-out captured data, relative to those of dropping all."""
        if not self.has_error(stream, name):
            self.calibrate({stream: name})
            layer, kind = stream
            named = {f"{kind}.{key}": x for key, x in self._work.read_tensors(_step(stream, name)).items()}
            codec = self._component(stream, name).stream_plan(kind, layer, self.shape, named).codec
            assert isinstance(codec, Codec)
            captured = read_captured(self.plan, self._captures, layer, kind)
            blocks = min(_BLOCKS, captured.x.shape[1] // codec.block_tokens)
            x = captured.x[:1, : blocks * codec.block_tokens].to(self.shape.torch_dtype)  # fp16 keeps the model's dtype
            packed = codec.encode(x.transpose(1, 2))
            cost = math.ceil(packed.nbytes / packed.tokens)
            self._write(_error_key(stream, name), (held_out_errors(captured, codec, 1)["loss"], cost))
        loss, cost = self._measured[_error_key(stream, name)]
        return loss, cost

    def method(self, names: Mapping[Stream, str], bits: float = 16.0) -> Mixed:
        """The method with these streams; its windows are the plan's."""
        keys, values = (" ".join(names[layer, kind] for layer in self.shape.cached_layers) for kind in "kv")
        windows = {key: getattr(self.plan.method, key) for key in windows_names()}
        return Mixed(bits=bits, keys=keys, values=values, **windows)

    def tensors(self, names: Mapping[Stream, str]) -> dict[str, Tensor]:
        """The tensors of an artifact with these streams."""
        return {
            f"layers.{stream[0]}.{stream[1]}.{key}": tensor
            for stream, name in names.items()
            if name != UNCOMPRESSED
            for key, tensor in self._work.read_tensors(_step(stream, name)).items()
        }

    def errors(self, names: Mapping[Stream, str]) -> list[dict[str, Any]]:
        """The calibration errors of each layer."""
        return [
            {kind: self._work.read_json(_step((layer, kind), names[layer, kind])) for kind in "kv"}
            for layer in self.shape.cached_layers
        ]

    def _component(self, stream: Stream, name: str) -> Method:
        return self.method(dict.fromkeys(self.streams, name)).component(*stream, self.shape)

    def _run(self, phase: str, task: Callable[[Stream], None], streams: Sequence[Stream]) -> None:
        for done, _ in enumerate(run_parallel(task, streams, estimate.cluster_workers(self.plan)), 1):
            self.progress(phase, done, len(streams))

    def _write(self, key: str, numbers: tuple[float, float]) -> None:
        self._measured[key] = list(numbers)
        self._work.write_json("measured", self._measured)


def _step(stream: Stream, name: str) -> str:
    """The name of a calibrated stream in the work folder."""
    return f"{stream[0]}.{stream[1]}.{name.replace(':', '.')}"


def _error_key(stream: Stream, name: str) -> str:
    return f"error {_step(stream, name)}"
