"""The interface of studies, from options, a model and text to a table, numbers and a figure; and their registry."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

from torch import Tensor

from kvq_cli.data.texts import SELF, load_text, sampled_windows, token_windows
from kvq_cli.errors import UsageError, did_you_mean
from kvq_cli.models import LoadedModel
from kvq_cli.options import parse_options

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Called with the phase, the steps finished and the steps in all.
Progress = Callable[[str, int, int], None]

_CLASSES: dict[str, type[AnyStudy]] = {}


@dataclass(frozen=True)
class StudyInput:
    """A model and the text that a study passes through it: `samples` windows of `seqlen` tokens of `dataset`."""

    loaded: LoadedModel
    dataset: str
    samples: int
    seqlen: int
    seed: int

    @cached_property
    def windows(self) -> Tensor:
        """Token ids `[samples, seqlen]` of the dataset's evaluation split."""
        return self.tokens(self.dataset, "evaluation")

    def tokens(self, dataset: str, split: str) -> Tensor:
        """Token ids `[samples, seqlen]` of a split of a dataset, drawn with `seed`."""
        if self.seqlen > self.loaded.context:
            raise UsageError(f"--seqlen {self.seqlen} is more than {self.loaded.name}'s context, {self.loaded.context}")
        if dataset == SELF:
            return sampled_windows(self.loaded.model, self.loaded.tokenizer, self.seqlen, self.samples, self.seed)
        text = load_text(dataset, split)
        return token_windows(self.loaded.tokenizer, text, self.seqlen, self.samples, self.seed)


@dataclass(frozen=True)
class Findings:
    """The result of a study.

    columns, rows: the printed table. numbers: everything that the figure shows, as plain JSON values.
    draw: fills an empty figure. size: its width and height in inches. notes: printed below the table.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    numbers: dict[str, Any]
    draw: Callable[[Figure], None]
    size: tuple[float, float] = (9.0, 4.5)
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Study(ABC):
    """Base of `ModelStudy` and `FormulaStudy`. The fields of a subclass are its options; the first line of its
    docstring is its help.

    name: as in `kvq analyze NAME`. source: the papers' figures or tables.
    """

    name: ClassVar[str]
    source: ClassVar[str]


@dataclass(frozen=True)
class ModelStudy(Study):
    """A study that passes text through a model. samples: windows of text, by default."""

    samples: ClassVar[int] = 8

    @abstractmethod
    def run(self, data: StudyInput, progress: Progress) -> Findings:
        """Run the study in bounded memory: one layer or one window at a time."""


@dataclass(frozen=True)
class FormulaStudy(Study):
    """A study that evaluates formulas, without a model."""

    @abstractmethod
    def run(self, progress: Progress) -> Findings:
        """Run the study."""


AnyStudy: TypeAlias = ModelStudy | FormulaStudy
StudyClass = TypeVar("StudyClass", type[ModelStudy], type[FormulaStudy])


def register(cls: StudyClass) -> StudyClass:
    """Class decorator: registers the study under `cls.name`."""
    _CLASSES[cls.name] = cls
    return cls


def studies() -> dict[str, type[AnyStudy]]:
    """All studies by name, sorted."""
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{__package__}.{module.name}")
    return dict(sorted(_CLASSES.items()))


def study_class(name: str) -> type[AnyStudy]:
    """The study's class; UsageError with the valid names for an unknown one."""
    classes = studies()
    if name not in classes:
        raise UsageError(f"unknown study {name!r}; there are: {', '.join(classes)}{did_you_mean(name, classes)}")
    return classes[name]


def build(name: str, options: Mapping[str, Any]) -> AnyStudy:
    """The study `name` with `options`, whose strings are converted. UsageError for unknown or invalid options."""
    cls = study_class(name)
    return cls(**parse_options(cls, f"study {name}", options))
