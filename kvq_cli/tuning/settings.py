"""Options of `kvq tune`, and the record of a search that its artifact keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvq_cli.errors import UsageError
from kvq_cli.methods.mixed import PARTS
from kvq_cli.methods.registry import build, has_option, method_class, parse
from kvq_cli.options import option_fields

#: Candidates of each stream. `temporalkv` chooses between its chunks and channelkv's by itself. KIVI's keys are those
#: before RoPE, of which errors are measured.
CANDIDATES = (
    "klt",
    *(f"temporalkv-{bits}bit" for bits in (1, 2, 4)),
    *(f"kvquant-{bits}bit" for bits in (2, 3, 4)),
    *(f"kivi-{bits}bit:pre_rope=on" for bits in (2, 3, 4)),
    "fp16",
)


@dataclass(frozen=True)
class TuneOptions:
    """objective: "kl": least KL within `budget` bits; "memory": fewest bits whose KL is at most `kl`.

    budget:     packed bits per number (codes, scales and outliers of packed tokens, as `kvq bits` counts them); where
                the objective is "memory", the bits to begin with.
    kl:         KL divergence in nats per token, for "memory".
    candidates: methods that may serve a stream, named as for `--compare`; the first is klt, of any rate.
    text:       texts on whose evaluation split KL is measured.
    windows, seqlen: windows of each text, and their tokens; the second half of a window is scored.
    rounds:     choices from measured sensitivities, at most.
    swaps:      exchanges of bits between two streams that are tried after that, at most.
    minutes:    of the search, after which it measures no further streams, candidates and swaps, but once more a choice
                of what it knows by then; None: no limit.
    """

    objective: str = "kl"
    budget: float = 2.0
    kl: float | None = None
    candidates: tuple[str, ...] = CANDIDATES
    text: tuple[str, ...] = ("prose", "pydoc")
    windows: int = 2
    seqlen: int = 1024
    rounds: int = 3
    swaps: int = 8
    minutes: float | None = None

    def __post_init__(self) -> None:
        if self.objective == "memory" and self.kl is None:
            raise UsageError("--objective memory needs --kl, the KL divergence that the choice may have")
        if self.kl is not None and not 0 < self.kl < float("inf"):
            raise UsageError(f"--kl {self.kl:g} must be above 0")
        if not 0 < self.budget <= 16:
            raise UsageError(f"--budget {self.budget:g} must be above 0 and at most 16 bits")
        for text in self.candidates:
            name, options = parse(text)
            if name not in PARTS:
                raise UsageError(f"--candidates {text}: not one of {', '.join(PARTS)}")
            build(name, **options)
            if text != self.candidates[0] and has_option(name, "bits") and "bits" not in options:
                raise UsageError(f"--candidates {text}: only the first has any bits: give its own, such as {name}-4bit")
        if not self.candidates or parse(self.candidates[0])[0] != "klt" or "bits" in parse(self.candidates[0])[1]:
            raise UsageError("--candidates: the first must be klt without bits, such as klt")

    def to_dict(self) -> dict[str, Any]:
        """What results depend on, as plain JSON values."""
        unused = {"rounds", "swaps", "minutes"}
        named = {key: value for key, value in asdict(self).items() if key not in unused}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in named.items()}


def windows_names() -> list[str]:
    """Options that all streams share: of the windows, and of layers with a sliding window."""
    return [field.name for field in option_fields(method_class("mixed")) if field.metadata.get("runtime")]


def windows_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `--set`, which can be those of `windows_names` only; UsageError names them."""
    valid = windows_names()
    for key in options:
        if key not in valid:
            raise UsageError(f"--set {key}=...: kvq tune chooses methods; what can be set is {', '.join(valid)}")
    return dict(options)


def measured_under(config: Mapping[str, Any], tuning: Mapping[str, Any]) -> dict[str, Any]:
    """What calibrated streams and measured KLs depend on, by the option that sets it.

    config: the `kvq`, `model`, `method` and `calibration` of an artifact; tuning: of its search, see
    `TuneOptions.to_dict`. Measurements of other candidates and for other goals can be used again.
    """
    method, calibration = config["method"], config["calibration"]
    return {
        "version of kvq": config["kvq"],
        "--model": config["model"],
        "--set": {key: method.get(key) for key in windows_names()},
        **{"--disk" if key == "budget" else f"--{key}": value for key, value in calibration.items()},
        "--text": tuning["text"],
        "--text-samples": tuning["windows"],
        "--text-seqlen": tuning["seqlen"],
    }


def goal(tuning: Mapping[str, Any]) -> dict[str, Any]:
    """What else the choice depends on, by the option that sets it."""
    return {f"--{key}": tuning[key] for key in ("objective", "budget", "kl", "candidates")}
