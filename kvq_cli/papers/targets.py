"""Targets of `kvq reproduce`, one per table or figure of the papers: its command, its methods, its result file."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq_cli.errors import UsageError
from kvq_cli.files import MAX_SETTINGS, read_text
from kvq_cli.models import REFERENCE, SMOLLM2
from kvq_cli.paths import short_name

if TYPE_CHECKING:
    from kvq_cli.methods.base import Method

#: The models that claims are checked on, at their own sizes.
MEASURED = (SMOLLM2, REFERENCE)
ROOT = Path("results/reproduction")
STORE = Path("results/samples")


@dataclass(frozen=True)
class Target:
    """A table or figure of a paper; the comment at the top of targets.yaml explains the fields."""

    id: str
    paper: str
    what: str
    models: tuple[str, ...] = ()
    table: str | None = None
    minutes: int = 0
    fast: bool = False
    extra: bool = False
    gpu: tuple[str, ...] = ()
    drawing: str | None = None
    eval: str | None = None
    methods: Mapping[str, str] = field(default_factory=dict)
    grid: Mapping[str, Any] | None = None
    sweep: Mapping[str, Any] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    plot: bool = False
    note: str = ""
    analyze: str | None = None
    run: str | None = None
    into: str | None = None
    config: str | None = None
    options: str = ""
    pairs: tuple[tuple[str, str, str], ...] = ()

    @property
    def runs(self) -> bool:
        """Whether a command exists that runs without a GPU."""
        return not (self.gpu or self.drawing)

    def rows(self, model: str) -> dict[str, str]:
        """Published row -> method, like `kivi-2bit:residual=32`, at the sizes for this model."""
        if self.sweep is not None:
            return _sweep_rows(**self.sweep)
        if self.grid is None:
            return {row: text.format(**_words(model)) for row, text in self.methods.items()}
        axes = {key: values for key, values in self.grid.items() if isinstance(values, list)}
        points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
        return {
            self.grid["name"].format(**point): ":".join([self.grid["method"], *(f"{k}={v}" for k, v in point.items())])
            for point in points
        }

    def calibrated(self, model: str) -> list[Method]:
        """The methods of this target that need calibration."""
        from kvq_cli.methods.registry import build_parsed

        names = list(self.rows(model).values())
        if self.config:
            names = _yaml(read_text(Path(self.config), MAX_SETTINGS))["compare"]
        return [method for method in map(build_parsed, names) if method.calibrates]

    def folder(self, model: str, root: Path = ROOT) -> Path:
        """The folder of results. Targets that use the same study, or the same counted sizes, share it."""
        shared = f"study-{self.analyze}" if self.analyze else Path(self.into).stem if self.into else self.id
        return root / short_name(model) / shared

    def result(self, model: str, root: Path = ROOT) -> Path:
        """The result file, which exists once the target has run."""
        name = f"{self.analyze}.json" if self.analyze else self.into or "comparison.json"
        return self.folder(model, root) / name

    def columns_of(self, model: str) -> dict[str, list[str]]:
        """Published column -> titles of measured columns, at the sizes for this model."""
        return dict(self.columns.get(size(model), {}) if {"here", "paper"} & set(self.columns) else self.columns)

    def command(self, model: str, root: Path = ROOT, store: Path = STORE) -> list[str]:
        """The arguments of `kvq` that make the result."""
        folder = self.folder(model, root)
        if self.run:
            return shlex.split(self.run)
        to = ["--out", str(folder)] + (["--model", model] if model != REFERENCE else [])
        if self.analyze:
            return ["analyze", self.analyze, *_sizes("analyze", model), *shlex.split(self.options), *to]
        to += ["--store", str(store)] + (["--plot", str(folder / "plot.png")] if self.plot else [])
        if not self.eval:
            raise ValueError(f"{self.id} has no command: none of run, analyze, eval")
        compared = ["--config", self.config] if self.config else ["--compare", ",".join(self.rows(model).values())]
        return ["eval", *_sizes(self.eval, model), *compared, *shlex.split(self.options), *to]


def _sweep_rows(method: str, bits: list[float], changes: list[str]) -> dict[str, str]:
    """`2 bits` -> the defaults at each number of bits, the first of which is changed; then `option=value` -> method."""
    defaults = {f"{each:g} bit" + "s" * (each != 1): f"{method}-{each:g}bit" for each in bits}
    default = next(iter(defaults.values()))
    return defaults | {change: f"{default}:{change}" for change in changes}


def size(model: str) -> str:
    """The key below `columns` and `words` in targets.yaml: `here` for the measured models, `paper` for all others."""
    return "here" if model in MEASURED else "paper"


def calibration_options(model: str) -> list[str]:
    """Options of `kvq calibrate` for the artifacts of a model."""
    return _sizes("calibrate", model)


def paper_data(target: Target) -> str:
    """The data sets that a target needs at the paper's sizes, as text."""
    if not (target.eval or target.analyze):
        return ""
    words = shlex.split(_document()["sizes"][target.eval or "analyze"]["paper"])
    if "--dataset" in words:
        return words[words.index("--dataset") + 1]
    return words[words.index("--task") + 1].replace("lm_eval:", "").replace(",", ", ")


@cache
def targets() -> dict[str, Target]:
    """All targets by name, in the order of the file."""
    return {name: Target(id=name, **_frozen(fields)) for name, fields in _document()["targets"].items()}


def target(name: str) -> Target:
    """The target with this name; UsageError if there is none."""
    if name not in targets():
        raise UsageError(f"no target {name!r}: `kvq reproduce` lists them")
    return targets()[name]


@cache
def _document() -> dict[str, Any]:
    return _yaml(files(__package__).joinpath("targets.yaml").read_text(encoding="utf-8"))


def _yaml(text: str) -> dict[str, Any]:
    import yaml

    return yaml.safe_load(text)


def _sizes(name: str, model: str) -> list[str]:
    by_model = _document()["sizes"][name]
    return shlex.split(by_model.get(model, by_model["paper"]))


def _words(model: str) -> dict[str, Any]:
    """The values of the `{names}` in the methods of targets: the model's own, else those of its size."""
    return {name: by_model.get(model, by_model[size(model)]) for name, by_model in _document()["words"].items()}


def _frozen(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
