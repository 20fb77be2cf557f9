"""What a calibration run does: on which data, how much of it, with how much room."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, replace

from kvq_cli.calibration.kmeans import Engine
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import CalibrationSpec, Method
from kvq_cli.methods.registry import to_config
from kvq_cli.models import LoadedModel

GIB = 1 << 30
_SEQLEN = 2048
_TOKENS = 64 * _SEQLEN
_HELD_OUT = 8  # one in so many of the samples with gradients is held out


@dataclass(frozen=True)
class Settings:
    """The options of a calibration; None stands for a default that depends on the model.

    dataset:    name or file, see `data.texts`.
    seqlen:     tokens of a window of text; None: 2048, or the model's usual length if that is shorter.
    samples:    windows; None: so many that they have 64 x 2048 tokens together.
    gradients:  how many of the samples have gradients taken; codebooks are made from these, statistics from all.
                None: all of them. A few tokens can hold most of a stream's squared gradients: with a quarter of the
                samples, codebooks fitted those, and lost more on other text than codebooks without weights.
    points:     blocks that a codebook is clustered from, drawn by their importance. iterations: Lloyd's, at most.
    damping:    share of a codebook's mean Fisher weight that is added to the weight of every block; 0 is the papers'
                weighting. A few tokens can hold nearly all weight of a stream, and squared gradients say what small
                errors cost, not large ones, such as all other tokens would have.
    kmeans:     who clusters, see `kmeans.choose_engine`; a plan names the engine itself.
    budget:     GiB of captured numbers on disk; where all do not fit, runs of tokens are drawn at random.
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

    def resolved(self, loaded: LoadedModel) -> Settings:
        """The same with every default filled in for this model; UsageError for values that cannot work."""
        seqlen = self.seqlen or loaded.default_length(_SEQLEN)
        samples = self.samples or max(2, _TOKENS // seqlen)
        gradients = self.gradients or samples
        if seqlen > loaded.context:
            raise UsageError(f"--seqlen {seqlen} is more than the {loaded.context} tokens of {loaded.name}'s context")
        if not 2 <= gradients <= samples:
            raise UsageError(
                f"--gradients {gradients} must be at least 2 (some samples are held out) and at most {samples}, "
                f"the number of --samples"
            )
        if self.points < 1 or self.iterations < 1 or not 0 < self.budget < float("inf"):
            raise UsageError("--points, --iterations and --budget must be above 0")
        if not 0 <= self.damping < float("inf"):
            raise UsageError(f"--damping {self.damping:g} must be 0 or above")
        return replace(self, seqlen=seqlen, samples=samples, gradients=gradients)

    @property
    def held_out(self) -> int:
        """Samples, the last of those with gradients, that only the errors are measured on."""
        return max(1, self.gradients // _HELD_OUT)

    def to_dict(self) -> dict:
        return asdict(self)


def calibrate_command(method: Method, model: str, settings: Settings | None) -> str:
    """The command that makes an artifact, as a line for its card; settings: None where no text is read."""
    config = to_config(method)
    words = ["kvq", "calibrate", "--method", config.pop("name")]
    defaults = to_config(type(method)())
    if "bits" in config:
        words += ["--bits", str(config.pop("bits"))]
    for key, value in config.items():
        if value != defaults[key]:
            words += ["--set", f"{key}={str(value).lower() if isinstance(value, bool) else value}"]
    words += ["--model", model]
    for name, value in () if settings is None else settings.to_dict().items():
        words += [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


@dataclass(frozen=True)
class Extent:
    """How many tokens of each sample are kept, and what that takes on disk.

    skip:  first tokens of a sample that take no part. unit: adjacent tokens that are kept or left out together.
    units: how many units of a sample are kept, of `possible`.
    """

    skip: int
    unit: int
    units: int
    possible: int
    samples: int
    gradients: int
    bytes_per_token: int  # keys and values of all layers, of one token, without gradients

    @property
    def tokens(self) -> int:
        """Kept tokens of one sample."""
        return self.units * self.unit

    @property
    def nbytes(self) -> int:
        return (self.samples + self.gradients) * self.tokens * self.bytes_per_token


def extent(settings: Settings, spec: CalibrationSpec, unit: int, loaded: LoadedModel) -> Extent:
    """What is kept of each sample within `settings.budget`; UsageError where that is not enough for the codebooks."""
    shape = loaded.shape
    possible = max(0, settings.seqlen - spec.skip) // unit
    per_token = shape.layers * 2 * shape.kv_heads * shape.head_dim * 2  # 16 bits each
    affordable = int(settings.budget * GIB) // ((settings.samples + settings.gradients) * unit * per_token)
    units = min(possible, affordable)
    kept = Extent(spec.skip, unit, units, possible, settings.samples, settings.gradients, per_token)
    training = (settings.gradients - settings.held_out) * kept.tokens
    for stream in (spec.keys, spec.values):
        size = max(shape.size for shape in stream.shapes)
        if units == 0 or training * stream.share < stream.entries * size:
            mend = "--budget" if affordable < possible else "--seqlen or --gradients"
            raise UsageError(
                f"{training} tokens are too few for codebooks of {stream.entries} entries, which need "
                f"{stream.entries * size // stream.share}: raise {mend} (--seqlen {settings.seqlen}, --gradients "
                f"{settings.gradients} with {settings.held_out} of them held out, --budget {settings.budget:g})"
            )
    return kept
