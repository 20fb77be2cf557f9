"""Plans of a calibration: method, model and settings, checked before the model runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, TypeAlias

from torch import Tensor

import kvq_cli
from kvq_cli.artifact import fingerprint
from kvq_cli.artifact.fingerprint import weights_digest
from kvq_cli.calibration.finished import named_inputs
from kvq_cli.calibration.kmeans import VERSION as CLUSTERING
from kvq_cli.calibration.kmeans import choose_engine
from kvq_cli.calibration.mixed import UNIT
from kvq_cli.calibration.settings import (
    CalibrationOptions,
    CalibrationSettings,
    CaptureSize,
    capture_size,
    check_enough,
)
from kvq_cli.codecs.nearest import MAX_ENTRIES
from kvq_cli.data.texts import SELF, file_digest, load_text, token_windows
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import (
    CalibrationSpec,
    FactorSpec,
    LowRankSpec,
    Method,
    MixedSpec,
    ModelShape,
    TransformSpec,
)
from kvq_cli.methods.mixed import Mixed
from kvq_cli.methods.registry import to_config
from kvq_cli.methods.tensors import code_budget, least_codes
from kvq_cli.model_source import library_versions
from kvq_cli.models import LoadedModel


@dataclass(frozen=True)
class CalibrationPlan:
    """The model and the method; see `CapturePlan` and `FactorPlan`."""

    loaded: LoadedModel
    method: Method

    def settings_dict(self) -> dict[str, Any]:
        """The settings as plain JSON values; empty where no text is read."""
        return {}

    def request(self) -> dict[str, Any]:
        """Everything the tensors depend on: equal requests, equal artifacts. Saved in `config.json`."""
        loaded = self.loaded
        trusted = {"trust_remote_code": True} if loaded.trust_remote_code else {}
        return {
            "kvq": kvq_cli.__version__,
            "method": to_config(self.method),
            "model": {
                "name": loaded.name,
                "revision": loaded.revision,
                "dtype": str(loaded.shape.dtype).removeprefix("torch."),
                "fingerprint": fingerprint(loaded.model).to_dict(),
                **trusted,
            },
            "calibration": self.settings_dict(),
        }

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """What the tensors depend on beside `request` and the libraries. Saved in `config.json`. Reads all weights,
        once."""
        dataset = self.settings_dict().get("dataset")
        return {
            "weights": weights_digest(self.loaded.model),
            "text": None if dataset is None else file_digest(dataset),
            "results": kvq_cli.RESULTS,
            "device": self.loaded.model.device.type,
        }

    def versions(self) -> dict[str, str]:
        """Versions of the libraries that compute the tensors. Saved in `config.json`."""
        return library_versions()

    @property
    def named_inputs(self) -> dict[str, Any]:
        """`inputs` and `versions`, by the names that messages use."""
        return named_inputs(self.inputs, self.versions())

    @cached_property
    def windows(self) -> Tensor | None:
        """The samples of the text, int64 `[samples, seqlen]`; None where none is read, or the model samples it."""
        settings = self.settings_dict()
        if settings.get("dataset", SELF) == SELF:
            return None
        text = load_text(settings["dataset"], "calibration")
        sizes = (settings[key] for key in ("seqlen", "samples", "seed"))
        return token_windows(self.loaded.tokenizer, text, *sizes)

    @property
    def text_tokens(self) -> dict[str, Any]:
        """What unfinished steps depend on beside `request` and `named_inputs`, by the name that messages use; empty
        where no text is read."""
        if not self.settings_dict():
            return {}
        if self.windows is None:  # `data.texts.sampled_windows` reads no more of the tokenizer
            digest: Any = [self.loaded.tokenizer.bos_token_id, len(self.loaded.tokenizer)]
        else:
            digest = sha256(self.windows.numpy().tobytes()).hexdigest()
        return {"tokenization of --dataset": digest}


@dataclass(frozen=True)
class CapturePlan(CalibrationPlan):
    """Capture activations on text; see `CodebookPlan` and `TransformPlan`."""

    settings: CalibrationSettings
    capture: CaptureSize
    spec: CalibrationSpec | TransformSpec | MixedSpec

    @cached_property
    def inputs(self) -> dict[str, Any]:
        return {**super().inputs, "clustering": CLUSTERING}

    def settings_dict(self) -> dict[str, Any]:
        return self.settings.to_dict()

    def versions(self) -> dict[str, str]:
        versions = library_versions()
        if any(choose_engine(self.settings.kmeans, size) == "faiss" for size in codebook_sizes(self.spec)):
            import faiss

            versions["faiss"] = faiss.__version__
        return versions

    def capture_request(self) -> dict[str, Any]:
        """Everything the captured activations depend on: plans with equal requests can share them."""
        size, settings = self.capture, self.settings_dict()
        tokens: dict[str, Any] = {"skip": size.skip, "tokens": size.tokens}
        if size.units < size.possible:  # drawn at random in units
            tokens["unit"] = size.unit
        text = {key: settings[key] for key in ("dataset", "samples", "seqlen", "gradients", "seed")} | self.text_tokens
        # Clustering, and so faiss, captures nothing.
        captured = {key: value for key, value in self.inputs.items() if key != "clustering"}
        inputs = named_inputs(captured, library_versions())
        return {key: self.request()[key] for key in ("kvq", "model")} | inputs | text | tokens


@dataclass(frozen=True)
class CodebookPlan(CapturePlan):
    """Cluster captured activations into codebooks."""

    spec: CalibrationSpec


@dataclass(frozen=True)
class TransformPlan(CapturePlan):
    """Fit transforms to captured activations, give out codes over their components, and cluster these."""

    spec: TransformSpec


@dataclass(frozen=True)
class MixedPlan(CapturePlan):
    """Calibrate each stream by the method that serves it."""

    spec: MixedSpec


@dataclass(frozen=True)
class FactorPlan(CalibrationPlan):
    """Factorize projection weights; no text is read."""

    spec: FactorSpec


@dataclass(frozen=True)
class WhitenedPlan(FactorPlan):
    """Factorize projection weights for the keys and values that they give on text."""

    spec: LowRankSpec
    settings: CalibrationSettings

    def settings_dict(self) -> dict[str, Any]:
        return {key: getattr(self.settings, key) for key in ("dataset", "samples", "seqlen", "seed")}


#: A plan that `plan_calibration` makes.
AnyPlan: TypeAlias = CodebookPlan | TransformPlan | MixedPlan | FactorPlan


def plan_calibration(loaded: LoadedModel, method: Method, options: CalibrationOptions) -> AnyPlan:
    """Check the request and fill in defaults.

    Raises UsageError for bits, head_dim, disk space and sizes that cannot work; KvqError where a package is missing.
    """
    spec = method.calibration(loaded.shape)
    if isinstance(spec, LowRankSpec) and spec.whiten:
        text = options.resolve(loaded, MAX_ENTRIES)
        width = loaded.shape.head_dim * spec.heads
        if (tokens := text.samples * text.seqlen) < width:
            raise UsageError(f"{tokens} tokens are too few for {width} channels: raise --seqlen or --samples")
        return WhitenedPlan(loaded, method, spec, text)
    if isinstance(spec, FactorSpec):
        return FactorPlan(loaded, method, spec)
    if isinstance(spec, TransformSpec):
        _check_codes(spec, loaded.shape)
        settings = options.resolve(loaded, MAX_ENTRIES)
        size = capture_size(settings, spec.skip, 2, loaded)
        _check_transforms(settings, size, spec, loaded.shape)
        return TransformPlan(loaded, method, settings, size, spec)
    if isinstance(spec, MixedSpec):
        settings = options.resolve(loaded, *codebook_sizes(spec))
        size = capture_size(settings, spec.skip, UNIT, loaded)
        for one in {each for layer in spec.layers for each in layer}:
            if isinstance(one, TransformSpec):
                _check_transforms(settings, size, one, loaded.shape)
            elif one is not None:
                _check_codebooks(settings, size, one)
        _check_blocks(method, size, spec, loaded.shape)
        return MixedPlan(loaded, method, settings, size, spec)
    settings = options.resolve(loaded, *codebook_sizes(spec))
    unit = math.lcm(2, *(shape.tokens for stream in spec.streams for shape in stream.shapes))
    size = capture_size(settings, spec.skip, unit, loaded)
    _check_codebooks(settings, size, spec)
    return CodebookPlan(loaded, method, settings, size, spec)


def codebook_sizes(spec: CalibrationSpec | TransformSpec | MixedSpec) -> set[int]:
    """The numbers of entries that codebooks of the streams have; `MAX_ENTRIES` where no stream has codebooks."""
    layers = spec.layers if isinstance(spec, MixedSpec) else ((spec, spec),)
    sizes = {
        one.stream(kind).entries if isinstance(one, CalibrationSpec) else MAX_ENTRIES
        for layer in layers
        for kind, one in zip("kv", layer, strict=True)
        if one is not None
    }
    return sizes or {MAX_ENTRIES}


def _check_codes(spec: TransformSpec, shape: ModelShape) -> None:
    """Each group of channels has one code at least."""
    budget, least = code_budget(spec, shape), least_codes(spec, shape)
    if budget < least:
        bits = 8 * least / (shape.layers * 2 * shape.kv_heads * shape.head_dim)
        raise UsageError(
            f"klt: bits={spec.bits:g} are {budget} codes of 8 bits for a token of all layers, and the transforms need "
            f"{least}, one at least for each: set bits={math.ceil(bits * 1e4) / 1e4:g} or more, or fewer transforms "
            "with join_keys=on and join_values=on"
        )


def _check_blocks(method: Method, size: CaptureSize, spec: MixedSpec, shape: ModelShape) -> None:
    """Errors of parts that do not calibrate are measured on whole blocks of a sample's captured tokens."""
    assert isinstance(method, Mixed)
    for layer, streams in enumerate(spec.layers):
        for kind, name, one in zip("kv", ("keys", "values"), streams, strict=True):
            if one is not None:
                continue
            block = method.component(layer, kind).stream_plan(kind, layer, shape, {}).codec.block_tokens
            if size.tokens < block:
                raise UsageError(
                    f"{name} of layer {layer} are packed in blocks of {block} tokens, and {size.tokens} tokens are "
                    "captured of each sample: raise --seqlen or --disk, or lower --samples"
                )


def _check_transforms(settings: CalibrationSettings, size: CaptureSize, spec: TransformSpec, shape: ModelShape) -> None:
    """A covariance needs as many tokens as channels, a codebook as many as entries."""
    widest = max(spec.groups(kind, shape)[1] for kind in "kv")
    check_enough(settings, size, max(MAX_ENTRIES, widest), f"{widest} channels and {MAX_ENTRIES} entries")


def _check_codebooks(settings: CalibrationSettings, size: CaptureSize, spec: CalibrationSpec) -> None:
    for stream in spec.streams:
        least = -(-stream.entries * max(shape.size for shape in stream.shapes) // stream.share)
        check_enough(settings, size, least, f"codebooks of {stream.entries} entries")
