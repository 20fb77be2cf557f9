"""lm-eval's tasks by name, with their data from `--data-dir` or from the Hub.

A task's local copy is a folder DIR/TASK, DIR/REPOSITORY/CONFIGURATION or DIR/REPOSITORY with one file per split, as
`kvq_cli.data.local` reads them: `gsm8k/test.jsonl`, `openai/gsm8k/main/test-00000-of-00001.parquet`.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq_cli.data.hub import silenced_loggers
from kvq_cli.data.local import read_rows, split_files
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.evaluation.lm_eval.names import GROUPS, PREFIX

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager

LOGGERS = ("lm_eval", "datasets", "huggingface_hub", "evaluate")


def require_lm_eval(wanted: str) -> None:
    """KvqError, with the command that mends it, where lm-eval is not installed."""
    if find_spec("lm_eval") is None:
        raise KvqError(f"{wanted} needs the package lm-eval, which is not installed: pip install 'kvq-cli[eval]'")


@dataclass(frozen=True)
class Group:
    """What a task belongs to. name: as it was asked for; weighted: whether its mean counts samples, not tasks."""

    name: str
    weighted: bool = False


def load_tasks(
    names: Iterable[str], data_dir: Path | None = None, num_fewshot: int | None = None, seed: int = 0
) -> dict[ConfigurableTask, Group]:
    """The tasks of these names (of lm-eval's tasks, groups and tags, and YAML files), data loaded.

    num_fewshot: examples in front of each question, of tasks that are not made for none. Raises UsageError for an
    unknown name, KvqError where a data set or a package is missing.
    """
    with silence(), seeded(seed):
        manager, found = _find(list(names))
        own = _task_class(data_dir)
        tasks = {}
        for name, group in found.items():
            task = _load(manager, name, own)
            if num_fewshot is not None and task.config.num_fewshot != 0:
                task.set_config("num_fewshot", num_fewshot)
            elif task.config.num_fewshot is None:
                task.set_config("num_fewshot", 0)
            tasks[task] = group
    return tasks


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """No progress bars and messages of lm-eval and of what it loads data with."""
    with (
        silenced_loggers(*LOGGERS),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        yield


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The same chance each time, for tasks that shuffle their choices with the global generators."""
    import numpy

    before, numpys = random.getstate(), numpy.random.get_state()
    random.seed(seed)
    numpy.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
        numpy.random.set_state(numpys)


def _load(manager: TaskManager, name: str, own: type[ConfigurableTask]) -> ConfigurableTask:
    """One task, as the only member of a group: lm-eval lets a group's members override a task's configuration."""
    programmed = manager.task_index[name].kind.name == "PY_TASK"  # has a class of its own, which stays
    member: dict[str, Any] = {"task": name} if programmed else {"task": name, "class": own}
    try:
        return manager.load([{"group": "kvq", "task": [member]}])["tasks"][name]
    except KvqError:
        raise
    except (ImportError, ModuleNotFoundError) as error:
        raise KvqError(f"{PREFIX}{name}: {first_line(error)}: pip install 'kvq-cli[eval]'") from error
    except Exception as error:  # a task runs code of its own when it is loaded
        raise KvqError(f"{PREFIX}{name} cannot be loaded: {first_line(error)}") from error


def _find(names: Sequence[str]) -> tuple[TaskManager, dict[str, Group]]:
    """A manager that knows all of `names`, and the tasks that they stand for, each with the name that it was under."""
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._index import TaskIndex

    files = {name: Path(name).resolve() for name in names if name.endswith((".yaml", ".yml"))}
    for name, path in files.items():
        if not path.is_file():
            raise UsageError(f"--task {PREFIX}{name}: no such file")
    home = Path(lm_eval.tasks.__file__).parent
    known = [home / folder for folder in sorted({folder for group in GROUPS for folder in group.folders})]
    titles = [TaskIndex.entry_from_path(files[name]).name if name in files else name for name in names]
    extra = sorted({path.parent for path in files.values()})
    # Reading all of lm-eval's tasks takes a quarter of a minute: first those that the papers use.
    manager = TaskManager(include_path=[*known, *extra], include_defaults=False)
    if any(title not in manager.task_index for title in titles):
        manager = TaskManager(include_path=extra)
    found: dict[str, Group] = {}
    for name, title in zip(names, titles, strict=True):
        for leaf in task_names(manager, title):
            found.setdefault(leaf, Group(name, _weighted(manager, title)))
    return manager, found


def _weighted(manager: TaskManager, name: str) -> bool:
    """Whether lm-eval's mean of a group counts samples."""
    means = (manager.task_index[name].cfg or {}).get("aggregate_metric_list") or []
    return any(one.get("weight_by_size", True) for one in ([means] if isinstance(means, dict) else means))


def task_names(manager: TaskManager, name: str) -> Iterator[str]:
    """The tasks that a task, group or tag of lm-eval stands for."""
    entry = manager.task_index.get(name)
    if entry is None:
        alike = get_close_matches(name, manager.all_tasks, n=5)
        hint = f"; alike: {', '.join(alike)}" if alike else ""
        raise UsageError(f"unknown task {PREFIX + name!r}: lm-eval has no task, group or tag of this name{hint}")
    if entry.kind.name == "TAG":
        yield from sorted(entry.tags)
    elif entry.kind.name == "GROUP":
        for member in entry.cfg["task"]:
            if not isinstance(member, str):
                raise UsageError(f"{PREFIX}{name}: this group changes its tasks' options: name the tasks one by one")
            yield from task_names(manager, member)
    else:
        yield name


def first_line(error: Exception) -> str:
    """What an error says first, for a message of one line."""
    return next((line.strip(" *") for line in str(error).splitlines() if line.strip(" *")), type(error).__name__)


def _task_class(data_dir: Path | None) -> type[ConfigurableTask]:
    """lm-eval's class of tasks that are configured by YAML, with another way to come by their data."""
    import datasets
    from lm_eval.api.task import ConfigurableTask

    class Task(ConfigurableTask):
        """copy: files by split where the data is a local copy; fewshot_instead_of: the split that the task draws its
        examples from, where the copy lacks it."""

        def __init__(self, config: dict[str, Any]) -> None:
            self.copy: dict[str, list[Path]] = {}
            self.fewshot_instead_of: str | None = None
            super().__init__(config={key: value for key, value in config.items() if key != "class"})

        def download(self, dataset_kwargs: dict[str, Any] | None = None, **_: Any) -> None:
            if data_dir is not None and self.config.custom_dataset is None:
                self.copy = self._local_copy(data_dir)
            if self.copy:
                self.dataset = datasets.DatasetDict(
                    {
                        split: datasets.Dataset.from_list([row for path in files for row in read_rows(path)])
                        for split, files in self.copy.items()
                    }
                )
                self._take_examples_from_what_is_there()
                return
            try:
                super().download(dataset_kwargs)
            except Exception as error:  # offline, gated, moved: each library has its own classes
                place = f"DIR/{self.config.task}/{self._evaluated}.jsonl"
                raise KvqError(
                    f"{PREFIX}{self.config.task}: its data set {self._title} cannot be loaded ({first_line(error)}); "
                    f"without a network pass --data-dir DIR with a copy as {place}"
                ) from error

        @property
        def _title(self) -> str:
            return " ".join(filter(None, [self.DATASET_PATH, self.DATASET_NAME]))

        @property
        def _evaluated(self) -> str | None:
            return self.config.test_split or self.config.validation_split

        def _local_copy(self, folder: Path) -> dict[str, list[Path]]:
            """Files by split; KvqError where the folder lacks the split that is evaluated."""
            names = [self.config.task, f"{self.DATASET_PATH}/{self.DATASET_NAME}", self.DATASET_PATH]
            splits = {self._evaluated, self.config.training_split, self.config.validation_split, self.fewshot_cfg.split}
            found = {split: split_files(folder, names, split) for split in sorted(splits - {None})}
            if not found.get(self._evaluated):
                raise KvqError(
                    f"{PREFIX}{self.config.task}: --data-dir {folder} has no copy of its data set {self._title}: it "
                    f"needs {self.config.task}/{self._evaluated}.jsonl (or .parquet) there"
                )
            return {split: files for split, files in found.items() if files}

        def _take_examples_from_what_is_there(self) -> None:
            """Examples come from the evaluated split where the copy lacks theirs; lm-eval leaves the question out."""
            if self.config.training_split not in self.copy:
                self.config.training_split = None
            if self.config.validation_split not in self.copy:
                self.config.validation_split = None
            if self.fewshot_cfg.split is not None and self.fewshot_cfg.split not in self.copy:
                self.fewshot_instead_of, self.fewshot_cfg.split = self.fewshot_cfg.split, self._evaluated

    return Task
