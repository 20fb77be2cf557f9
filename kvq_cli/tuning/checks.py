"""Check a request before the model runs: candidates, captured tokens, windows and budget."""

from __future__ import annotations

from typing import cast

from kvq_cli.benchmarking.accounting import artifact_specs
from kvq_cli.calibration.kinds.mixed import MixedPlan
from kvq_cli.calibration.settings import CalibrationOptions
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.methods.mixed import Mixed, part_spec
from kvq_cli.methods.transform_specs import TransformSpec
from kvq_cli.tuning.menus import check_budget, klt_name
from kvq_cli.tuning.settings import TuneOptions, windows_names


def check_request(plan: MixedPlan, options: TuneOptions) -> None:
    """Raise UsageError for a request that cannot work, naming the option to change; KvqError where a package is
    missing."""
    if options.seqlen > plan.loaded.context:
        raise UsageError(
            f"--text-seqlen {options.seqlen} is more than the model's context: give at most {plan.loaded.context}"
        )
    shape = plan.loaded.shape
    numbers = shape.kv_heads * shape.head_dim
    klt = klt_name(options.candidates[0], numbers, numbers)  # 8 bits
    for text, name in zip(options.candidates, (klt, *options.candidates[1:]), strict=True):
        try:
            _check_candidate(plan, name, options.seqlen)
        except KvqError as error:
            raise type(error)(f"--candidates {text}: {error}") from error
    spec = cast("TransformSpec", part_spec(_served_by(plan, klt).component(0, "k"), shape))
    layers = len(shape.cached_layers)
    cheapest = layers * sum(spec.least_bytes(kind, shape) for kind in "kv")
    check_budget(int(options.budget * numbers * 2 * layers / 8), cheapest)


def _served_by(plan: MixedPlan, name: str) -> Mixed:
    """The method whose keys and values are all served by this one."""
    windows = {key: getattr(plan.method, key) for key in windows_names()}
    return Mixed(bits=16, keys=name, values=name, **windows)


def _check_candidate(plan: MixedPlan, name: str, seqlen: int) -> None:
    """That the method fits the model, can be calibrated with the plan's settings, and packs tokens both of the captured
    samples and of windows of `seqlen`."""
    loaded, settings, method = plan.loaded, plan.settings, _served_by(plan, name)
    MixedPlan.make(loaded, method, CalibrationOptions(**settings.to_dict()))
    first = loaded.shape.cached_layers[0]
    layer = method.plan(first, loaded.shape, artifact_specs(method, loaded.shape, first))
    cached = seqlen - 1  # the last token of a window is only predicted
    for kind, stream_plan in (("keys", layer.keys), ("values", layer.values)):
        block = stream_plan.codec.block_tokens
        if plan.capture.tokens < block:
            raise UsageError(
                f"{kind} are packed in blocks of {block} tokens, and {plan.capture.tokens} tokens are captured of each "
                "sample: raise --seqlen or --disk, or lower --samples"
            )
        if not stream_plan.window.packed(cached):
            raise UsageError(
                f"compresses no {kind} of {cached} tokens, all are within its full-precision windows: raise "
                "--text-seqlen, or set smaller windows with --set"
            )
