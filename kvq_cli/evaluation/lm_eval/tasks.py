"""Load tasks of lm-eval by name, with data from `--data-dir` or from the Hub.

A task's local copy is a folder DIR/TASK, DIR/REPOSITORY/CONFIGURATION or DIR/REPOSITORY with one file per split, as
`kvq_cli.data.local` reads them: `gsm8k/test.jsonl`, `openai/gsm8k/main/test-00000-of-00001.parquet`.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq_cli.data.hub import silenced_loggers
from kvq_cli.data.local import read_rows, split_files
from kvq_cli.errors import KvqError, UsageError, did_you_mean, reading, reason
from kvq_cli.evaluation.lm_eval.task_groups import GROUPS, PREFIX
from kvq_cli.extras import install_command

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager

LOGGERS = ("lm_eval", "datasets", "huggingface_hub", "evaluate")


def require_lm_eval(feature: str) -> None:
    """KvqError with the command that installs lm-eval, if it is not installed."""
    if find_spec("lm_eval") is None:
        raise KvqError(f"{feature} needs the package lm-eval, which is not installed: {install_command('eval')}")


@dataclass(frozen=True)
class RequestedGroup:
    """A requested name that a task was loaded for; weighted: its mean weights tasks by their number of samples."""

    name: str
    weighted: bool = False


def load_tasks(
    names: Iterable[str], data_dir: Path | None = None, num_fewshot: int | None = None, seed: int = 0
) -> dict[ConfigurableTask, list[RequestedGroup]]:
    """Load the tasks of these names (tasks, groups and tags of lm-eval, or YAML files) with their data.

    Each task is loaded once, however many names stand for it. num_fewshot: few-shot examples; tasks that are defined as
    zero-shot stay so. Raises UsageError for an unknown name, KvqError if a data set or a package is missing.
    """
    with silence(), seeded(seed):
        manager, groups = _find(list(names))
        task_class = _task_class(data_dir)
        tasks = {}
        for name, requested in groups.items():
            task = _load(manager, name, task_class)
            if num_fewshot is not None and task.config.num_fewshot != 0:
                task.set_config("num_fewshot", num_fewshot)
            elif task.config.num_fewshot is None:
                task.set_config("num_fewshot", 0)
            tasks[task] = requested
    return tasks


def check_names(names: Iterable[str]) -> None:
    """UsageError for a name that `load_tasks` does not know; no data are loaded."""
    with silence():
        _find(list(names))


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Suppress progress bars and messages of lm-eval and the libraries that it loads data with."""
    with (
        silenced_loggers(*LOGGERS),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        yield


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global random generators, with which some tasks shuffle their choices; restore them afterwards."""
    import numpy

    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    random.seed(seed)
    numpy.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


def _load(manager: TaskManager, name: str, task_class: type[ConfigurableTask]) -> ConfigurableTask:
    """Load one task through a group with a single member: members of a group may override a task's configuration."""
    has_class = manager.task_index[name].kind.name == "PY_TASK"  # implemented as a Python class: keep it
    member: dict[str, Any] = {"task": name} if has_class else {"task": name, "class": task_class}
    try:
        return manager.load([{"group": "kvq", "task": [member]}])["tasks"][name]
    except KvqError:
        raise
    except (ImportError, ModuleNotFoundError) as error:
        raise KvqError(f"{PREFIX}{name}: {reason(error)}: {install_command('eval')}") from error
    except Exception as error:  # tasks run arbitrary code when they are loaded
        raise KvqError(f"{PREFIX}{name} cannot be loaded: {reason(error)}") from error


def _find(names: Sequence[str]) -> tuple[TaskManager, dict[str, list[RequestedGroup]]]:
    """A task manager that knows all of `names`, and the tasks that they expand to, each with the names requested."""
    from lm_eval.tasks._index import TaskIndex

    files = {name: Path(name).resolve() for name in names if name.endswith((".yaml", ".yml"))}
    for name, path in files.items():
        if not path.is_file():
            raise UsageError(f"--task {PREFIX}{name}: no such file")
    titles = []
    for name in names:
        with reading(f"--task {PREFIX}{name}", kind=UsageError):
            titles.append(TaskIndex.entry_from_path(files[name]).name if name in files else name)
    extra = sorted({path.parent for path in files.values()})
    # Indexing all of lm-eval's tasks takes 15 s: try the folders of the papers' tasks first.
    index = _indexed if extra else _indexed_once  # files may change
    manager = index(*extra, all_tasks=False)
    if any(title not in manager.task_index for title in titles):
        manager = index(*extra, all_tasks=True)
    groups: dict[str, list[RequestedGroup]] = {}
    for name, title in zip(names, titles, strict=True):
        tasks = dict.fromkeys(task_names(manager, title))
        group = RequestedGroup(name, _weights_by_size(manager, title))
        for task in tasks:
            groups.setdefault(task, []).append(group)
    return manager, groups


def _indexed(*folders: Path, all_tasks: bool) -> TaskManager:
    """A task manager with the tasks in `folders`, and all of lm-eval's or those of the papers."""
    import lm_eval.tasks

    home = Path(lm_eval.tasks.__file__).parent
    known = [home / folder for folder in sorted({folder for group in GROUPS for folder in group.folders})]
    return lm_eval.tasks.TaskManager(include_path=[*([] if all_tasks else known), *folders], include_defaults=all_tasks)


_indexed_once = cache(_indexed)


def _weights_by_size(manager: TaskManager, name: str) -> bool:
    """Whether lm-eval weights the tasks of a group by their number of samples."""
    metrics = (manager.task_index[name].cfg or {}).get("aggregate_metric_list") or []
    return any(metric.get("weight_by_size", True) for metric in ([metrics] if isinstance(metrics, dict) else metrics))


def task_names(manager: TaskManager, name: str) -> Iterator[str]:
    """Expand a task, group or tag of lm-eval to task names; UsageError for an unknown name."""
    entry = manager.task_index.get(name)
    if entry is None:
        hint = did_you_mean(name, manager.all_tasks, PREFIX)
        raise UsageError(f"unknown task {PREFIX + name!r}: lm-eval has no task, group or tag of this name{hint}")
    if entry.kind.name == "TAG":
        yield from sorted(entry.tags)
    elif entry.kind.name == "GROUP":
        for member in entry.cfg["task"]:
            if not isinstance(member, str):
                raise UsageError(
                    f"{PREFIX}{name}: this group overrides options of its tasks: name the tasks one by one"
                )
            yield from task_names(manager, member)
    else:
        yield name


def _task_class(data_dir: Path | None) -> type[ConfigurableTask]:
    """lm-eval's class of YAML-configured tasks, extended to read data from `data_dir`."""
    import datasets
    from lm_eval.api.task import ConfigurableTask

    class Task(ConfigurableTask):
        """copy: files of the local copy by split; fewshot_instead_of: few-shot split that the copy lacks, if any."""

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
                self._replace_missing_splits()
                return
            try:
                super().download(dataset_kwargs)
            except Exception as error:  # offline, gated, moved: each library raises its own type
                path = f"DIR/{self.config.task}/{self._evaluated}.jsonl"
                raise KvqError(
                    f"{PREFIX}{self.config.task}: its data set {self._title} cannot be loaded ({reason(error)}); "
                    f"without a network pass --data-dir DIR with a copy as {path}"
                ) from error

        @property
        def _title(self) -> str:
            return " ".join(filter(None, [self.DATASET_PATH, self.DATASET_NAME]))

        @property
        def _evaluated(self) -> str | None:
            return self.config.test_split or self.config.validation_split

        def _local_copy(self, folder: Path) -> dict[str, list[Path]]:
            """Files by split; KvqError if the folder lacks the evaluated split."""
            names = [self.config.task, f"{self.DATASET_PATH}/{self.DATASET_NAME}", self.DATASET_PATH]
            splits = {self._evaluated, self.config.training_split, self.config.validation_split, self.fewshot_cfg.split}
            copy = {split: split_files(folder, names, split) for split in sorted(splits - {None})}
            if not copy.get(self._evaluated):
                raise KvqError(
                    f"{PREFIX}{self.config.task}: --data-dir {folder} has no copy of its data set {self._title}: it "
                    f"needs {self.config.task}/{self._evaluated}.jsonl (or .parquet) there"
                )
            return {split: files for split, files in copy.items() if files}

        def _replace_missing_splits(self) -> None:
            """Draw few-shot examples from the evaluated split if the copy lacks theirs."""
            cfg, evaluated = self.fewshot_cfg, self._evaluated
            if cfg.split is not None or cfg.samples is not None:
                wanted = [cfg.split] if cfg.split is not None else []
            else:  # lm-eval takes the first of these
                both = (self.config.training_split, self.config.validation_split)
                wanted = [split for split in both if split not in (None, evaluated)]
            if self.config.training_split not in self.copy:
                self.config.training_split = None
            if self.config.validation_split not in self.copy:
                self.config.validation_split = None
            if wanted and not any(split in self.copy for split in wanted):
                # lm-eval excludes the question itself only where both name the same split.
                self.fewshot_instead_of, cfg.split, self.config.test_split = wanted[0], evaluated, evaluated

    return Task
