"""Calibrate one stream (keys or values of a layer) by the method that serves it in a `mixed` artifact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from kvq_cli.calibration.allocation import allocate
from kvq_cli.calibration.captured import CapturedStream, ClusterSettings
from kvq_cli.calibration.codebooks import calibrate_stream
from kvq_cli.calibration.transforms import Transform, calibrate_transform, fit_transform, held_out_errors
from kvq_cli.codecs.base import Codec
from kvq_cli.methods.base import CalibrationSpec, Method, ModelShape, TransformSpec
from kvq_cli.methods.tensors import stream_codes

#: Tokens that are captured together where the disk budget keeps a part of them: a multiple of all codebooks' chunks, so
#: that all methods share the captured tokens. KIVI's groups of keys and blocks of outliers (32 tokens) span several
#: units, which raises the squared errors of KIVI's keys by 1 % (built-in model): another draw of the tokens changes
#: their loss more. Units of 32 would be drawn from a quarter as many places; if units depended on the candidates of
#: `kvq tune`, its artifacts would have other tensors than `kvq calibrate --method mixed` computes.
UNIT = 8
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
    transform: Callable[[int, str], Transform] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of the stream's method, named without `layers.<i>.<kind>.`, and errors as plain JSON values.

    kind: "k" or "v". settings: `fisher` and `hybrid` are those of the method instead. transform: returns the stream's
    transforms, from the number of groups and the metric; None: fit them. Transform codes are given out inside the
    stream.
    """
    spec = method.calibration(shape) if method.calibrates else None
    if isinstance(spec, TransformSpec):
        fitted = (transform or partial(fit_transform, captured))(spec.groups(kind, shape)[0], spec.metric)
        lengths = allocate([row.cpu().numpy() for row in fitted.variances], stream_codes(spec, kind, shape))
        return calibrate_transform(captured, fitted, lengths, replace(settings, fisher=spec.fisher))
    if isinstance(spec, CalibrationSpec):
        settings = replace(settings, fisher=spec.fisher, hybrid=spec.hybrid)
        return calibrate_stream(captured, spec.stream(kind), settings)
    codec = method.stream_plan(kind, layer, shape, {}).codec
    assert isinstance(codec, Codec)  # `methods.mixed.PARTS` have no state of each prompt
    return {}, {"chosen": held_out_errors(captured, codec, groups=1)}
