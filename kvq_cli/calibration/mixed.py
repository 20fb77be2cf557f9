"""Calibrate one stream (keys or values of a layer) by the method that serves it in a `mixed` artifact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvq_cli.calibration.allocation import stream_rate
from kvq_cli.calibration.captured import CapturedStream, ClusterSettings
from kvq_cli.calibration.codebooks import calibrate_stream
from kvq_cli.calibration.kinds.base import Calibrated
from kvq_cli.calibration.profiles import Profiles
from kvq_cli.calibration.transforms import (
    Transform,
    TransformSettings,
    calibrate_transform,
    fit_transform,
    held_out_errors,
)
from kvq_cli.codecs.base import Codec
from kvq_cli.methods.base import Method, ModelShape
from kvq_cli.methods.mixed import part_spec
from kvq_cli.methods.specs import CalibrationSpec, StreamSpec, Uncalibrated
from kvq_cli.methods.transform_specs import Profile, TransformSpec

ERROR_MEASURE = (
    "on held-out samples, relative to the spread around each channel's mean; fisher: squared errors weighted with "
    "squared gradients; plain: without weights; loss, where it is given: squared products of error and gradient"
)


def calibrate_component(
    captured: CapturedStream,
    method: Method,
    layer: int,
    kind: str,
    shape: ModelShape,
    settings: ClusterSettings,
    transform: Callable[[TransformSpec], Transform] | None = None,
) -> Calibrated:
    """Tensors of the stream's method, named without `layers.<i>.<kind>.`, and errors as plain JSON values.

    kind: "k" or "v". settings: `fisher` and `hybrid` are those of the method instead. transform: returns the stream's
    transforms, from their spec; None: fit them. Their bits are given out inside the stream.
    """
    spec = part_spec(method, shape)
    return _BY_SPEC[type(spec)](Part(captured, method, layer, kind, shape, settings, transform), spec)


@dataclass(frozen=True)
class Part:
    """The arguments of `calibrate_component`."""

    captured: CapturedStream
    method: Method
    layer: int
    kind: str
    shape: ModelShape
    settings: ClusterSettings
    transform: Callable[[TransformSpec], Transform] | None


def _codebooks(part: Part, spec: CalibrationSpec) -> Calibrated:
    settings = replace(part.settings, fisher=spec.fisher, hybrid=spec.hybrid)
    return calibrate_stream(part.captured, spec.stream(part.kind), settings)


def _transforms(part: Part, spec: TransformSpec) -> Calibrated:
    settings = TransformSettings.of(spec, part.kind, part.shape, part.settings.damping)
    fitted = part.transform(spec) if part.transform else fit_transform(part.captured, settings)
    widths = Profiles(fitted.losses.sum(0).cpu().numpy()).best(stream_rate(spec, part.kind, part.shape))
    profile = Profile((widths,) * settings.groups, settings.gain)
    return calibrate_transform(part.captured, fitted, profile, part.kind, settings)


def _uncalibrated(part: Part, spec: Uncalibrated) -> Calibrated:
    codec = part.method.stream_plan(part.kind, part.layer, part.shape, {}).codec
    assert isinstance(codec, Codec)  # `methods.mixed.PARTS` have no state of each prompt
    return {}, {"chosen": held_out_errors(part.captured, codec, groups=1)}


_BY_SPEC: dict[type[StreamSpec], Callable[[Part, Any], Calibrated]] = {
    CalibrationSpec: _codebooks,
    TransformSpec: _transforms,
    Uncalibrated: _uncalibrated,
}
