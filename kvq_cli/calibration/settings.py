"""Options of a calibration: text, number of samples, clustering, disk budget; and how many tokens are captured."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvq_cli.calibration.kmeans import Engine, choose_engine
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import Method
from kvq_cli.methods.registry import to_config
from kvq_cli.models import DTYPES, LoadedModel
from kvq_cli.options import option_text

GIB = 1 << 30
DEFAULT_SEQLEN = 2048
DEFAULT_TOKENS = 64 * DEFAULT_SEQLEN
#: One of this many samples with gradients is held out.
HELD_OUT_EVERY = 8


@dataclass(frozen=True)
class CalibrationOptions:
    """The options of `kvq calibrate`; None stands for a default that depends on the model.

    dataset:    name or file, see `data.texts`.
    samples:    text windows; None: 64 x 2048 tokens together.
    seqlen:     tokens per window; None: 2048, or the model's default length if that is shorter.
    gradients:  samples whose gradients are captured; None: all. Codebooks are clustered from these samples, statistics
                computed from all. A few tokens can hold most of a layer's squared gradients: with gradients for a
                quarter of the samples, codebooks overfitted to them and did worse on other text than unweighted ones.
    points:     blocks that each codebook is clustered from, drawn by importance; 256 times as many for codebooks of
                65,536 entries.
    iterations: maximum number of Lloyd iterations.
    damping:    share of a codebook's mean Fisher weight that is added to the weight of every block; 0 is the papers'
                weighting. A few tokens can hold nearly all the weight, and squared gradients predict the cost of small
                errors only, not of the large errors that all other tokens would get.
    budget:     GiB of captured activations on disk; above it, each sample keeps a random subset of its tokens.
    kmeans:     k-means engine, see `kmeans.choose_engine`; codebooks of different sizes may have several.
    """

    dataset: str = "prose"
    samples: int | None = None
    seqlen: int | None = None
    gradients: int | None = None
    points: int = 8192
    iterations: int = 50
    damping: float = 0.1
    budget: float = 4.0
    seed: int = 0
    kmeans: Engine = "auto"

    def resolve(self, loaded: LoadedModel, *entries: int) -> CalibrationSettings:
        """Fill in the defaults for this model and for codebooks of so many centroids.

        `kmeans` stays as it is where codebooks have several engines: each is chosen by the codebook's size. Raises
        UsageError for values that cannot work, KvqError where the k-means engine is not installed.
        """
        seqlen = self.seqlen or loaded.default_length(DEFAULT_SEQLEN)
        samples = self.samples or max(2, DEFAULT_TOKENS // seqlen)
        gradients = self.gradients or samples
        if seqlen > loaded.context:
            raise UsageError(f"--seqlen {seqlen} is more than the {loaded.context} tokens of {loaded.name}'s context")
        if not 2 <= gradients <= samples:
            raise UsageError(
                f"--gradients {gradients} must be at least 2 (some samples are held out) and at most {samples}, "
                f"the number of --samples"
            )
        if self.points < 1 or self.iterations < 1 or not 0 < self.budget < float("inf"):
            raise UsageError("--points, --iterations and --disk must be above 0")
        if not 0 <= self.damping < float("inf"):
            raise UsageError(f"--damping {self.damping:g} must be 0 or above")
        engines = {choose_engine(self.kmeans, each) for each in entries}
        kmeans = engines.pop() if len(engines) == 1 else self.kmeans
        resolved = {"samples": samples, "seqlen": seqlen, "gradients": gradients, "kmeans": kmeans}
        return CalibrationSettings(**{**asdict(self), **resolved})


@dataclass(frozen=True)
class CalibrationSettings:
    """`CalibrationOptions` with every default filled in; saved in the artifact's `config.json`."""

    dataset: str
    samples: int
    seqlen: int
    gradients: int
    points: int
    iterations: int
    damping: float
    budget: float
    seed: int
    kmeans: Engine

    @property
    def held_out(self) -> int:
        """Held-out samples, on which errors are measured: the last of those with gradients."""
        return max(1, self.gradients // HELD_OUT_EVERY)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


#: Options whose names differ from those of the settings.
_OPTIONS = {"budget": "disk"}


def calibrate_command(method: Method, loaded: LoadedModel, settings: Mapping[str, Any]) -> str:
    """The `kvq calibrate` command line that reproduces an artifact. settings: empty where no text is read."""
    config = to_config(method)
    words = ["kvq", "calibrate", "--method", config.pop("name")]
    defaults = to_config(type(method)())
    if "bits" in config:
        words += ["--bits", option_text(config.pop("bits"))]
    for key, value in config.items():
        if value != defaults.get(key):
            words += ["--set", f"{key}={option_text(value)}"]
    words += ["--model", loaded.name]
    dtype = loaded.shape.dtype
    words += ["--dtype", dtype] if dtype in DTYPES else []  # always: that of the stored weights is not known here
    words += ["--trust-remote-code"] if loaded.trust_remote_code else []
    for name, value in settings.items():
        words += [f"--{_OPTIONS.get(name, name)}", option_text(value)]
    return shlex.join(words)


@dataclass(frozen=True)
class CaptureSize:
    """How many tokens of each sample are captured, and their bytes on disk.

    skip:     first tokens of each sample that are left out (attention sinks).
    unit:     adjacent tokens that are captured or left out together.
    units:    units captured of each sample, of `possible`.
    samples, gradients: as in `CalibrationSettings`.
    bytes_per_token: keys and values of one token in all layers, without gradients.
    """

    skip: int
    unit: int
    units: int
    possible: int
    samples: int
    gradients: int
    bytes_per_token: int

    @property
    def tokens(self) -> int:
        """Captured tokens per sample."""
        return self.units * self.unit

    @property
    def nbytes(self) -> int:
        """Bytes of all captured activations and gradients."""
        return (self.samples + self.gradients) * self.tokens * self.bytes_per_token


def capture_size(settings: CalibrationSettings, skip: int, unit: int, loaded: LoadedModel) -> CaptureSize:
    """The largest capture within `settings.budget`, of `unit` tokens at a time after the first `skip`."""
    shape = loaded.shape
    possible = max(0, settings.seqlen - skip) // unit
    per_token = len(shape.cached_layers) * 2 * shape.kv_heads * shape.head_dim * 2  # 16 bits per number
    affordable = int(settings.budget * GIB) // ((settings.samples + settings.gradients) * unit * per_token)
    units = min(possible, affordable)
    return CaptureSize(skip, unit, units, possible, settings.samples, settings.gradients, per_token)


def check_enough(settings: CalibrationSettings, size: CaptureSize, least: int, what: str) -> None:
    """Raise UsageError for a capture of fewer than `least` training tokens, as `what` needs them."""
    training = (settings.gradients - settings.held_out) * size.tokens
    if size.units == 0 or training < least:
        windows = "--samples" if settings.gradients == settings.samples else "--gradients"
        option = "--disk" if size.units < size.possible else f"--seqlen or {windows}"
        raise UsageError(
            f"{training} tokens are too few for {what}, which need {least}: raise {option} (--seqlen "
            f"{settings.seqlen}, {windows} {settings.gradients} with {settings.held_out} of them held out, --disk "
            f"{settings.budget:g})"
        )
