"""What a study is: options in, a table, the numbers behind it and a picture out."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from torch import LongTensor

from kvq_cli.data.texts import SELF, load_text, self_windows, token_windows
from kvq_cli.errors import UsageError
from kvq_cli.models import LoadedModel
from kvq_cli.options import typed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Progress: what is done now, how much of it, of how much.
Show = Callable[[str, int, int], None]

_NO_STUDIES = {"study"}
_CLASSES: dict[str, type[Study]] = {}


@dataclass(frozen=True)
class Subject:
    """A model and the text that it is studied on. `windows` are `samples` windows of `seqlen` tokens of `dataset`."""

    loaded: LoadedModel
    dataset: str
    samples: int
    seqlen: int
    seed: int

    @cached_property
    def windows(self) -> LongTensor:
        """`[samples, seqlen]` token ids of the dataset's evaluation split."""
        return self.tokens(self.dataset, "evaluation")

    def tokens(self, dataset: str, split: str) -> LongTensor:
        """`[samples, seqlen]` token ids, drawn with the subject's seed."""
        if self.seqlen > self.loaded.context:
            raise UsageError(f"--seqlen {self.seqlen} is more than {self.loaded.name}'s context, {self.loaded.context}")
        if dataset == SELF:
            return self_windows(self.loaded.model, self.loaded.tokenizer, self.seqlen, self.samples, self.seed)
        text = load_text(dataset, split)
        return token_windows(self.loaded.tokenizer, text, self.seqlen, self.samples, self.seed)


@dataclass(frozen=True)
class Findings:
    """What a study found.

    columns, rows: the table that is printed. numbers: all that the picture is drawn from, plain JSON values.
    draw:  fills an empty figure. size: inches, width and height. notes: what to know when reading it.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    numbers: dict[str, Any]
    draw: Callable[[Figure], None]
    size: tuple[float, float] = (9.0, 4.5)
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Study(ABC):
    """One study. Its fields are its options; its docstring's first line is its help.

    name:    as in `kvq analyze NAME`. source: papers and their figures or tables.
    subject: whether it looks at a model and text; else `run` gets None. samples: windows of text, unless told.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    subject: ClassVar[bool] = True
    samples: ClassVar[int] = 8

    @abstractmethod
    def run(self, subject: Subject | None, show: Show) -> Findings:
        """Do the study in bounded memory: one layer or one window at a time."""


def register(cls: type[Study]) -> type[Study]:
    """Class decorator: makes the study known under `cls.name`."""
    _CLASSES[cls.name] = cls
    return cls


def studies() -> dict[str, type[Study]]:
    """All studies by name, sorted."""
    package = importlib.import_module("kvq_cli.papers.studies")
    for module in pkgutil.iter_modules(package.__path__):
        if module.name not in _NO_STUDIES:
            importlib.import_module(f"kvq_cli.papers.studies.{module.name}")
    return dict(sorted(_CLASSES.items()))


def study_class(name: str) -> type[Study]:
    """The class of a name; UsageError lists the names there are."""
    found = studies()
    if name not in found:
        raise UsageError(f"unknown study {name!r}; there are: {', '.join(found)}")
    return found[name]


def build(name: str, options: Mapping[str, Any]) -> Study:
    """The study `name` with `options`; strings are read as the option's type. UsageError names what was valid."""
    cls = study_class(name)
    return cls(**typed(cls, f"study {name}", options))
