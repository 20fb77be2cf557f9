"""Names of the papers' benchmark tasks in lm-eval. Plain data: lm-eval is not imported.

`lm_eval:NAME` accepts a name of this table, any task, group or tag of lm-eval, or the YAML file of a task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PREFIX = "lm_eval:"


@dataclass(frozen=True)
class TaskGroup:
    """tasks: names in lm-eval; folders: their folders in lm-eval; papers: tables that report them; note: for users."""

    name: str
    tasks: tuple[str, ...]
    folders: tuple[str, ...]
    papers: str
    note: str = ""


_SQUAT = ("qasper", "qmsum", "multi_news", "trec", "triviaqa", "samsum", "lcc", "repobench-p")
_XQUANT = (
    *("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum"),
    *("multi_news", "trec", "triviaqa", "samsum", "lcc", "repobench-p"),
)
GROUPS = (
    TaskGroup(
        "longbench",
        tuple(f"longbench_{name}" for name in _XQUANT),
        ("longbench",),
        "SQuat Table 2 (8 of them), XQuant Table 2",
        "the 14 tasks of the papers; lm-eval's own group of this name, with 21, is its tag longbench_tasks; the papers "
        "cut the middle out of long prompts: --truncation middle",
    ),
    TaskGroup(
        "longbench_squat",
        tuple(f"longbench_{name}" for name in _SQUAT),
        ("longbench",),
        "SQuat Table 2",
        "--truncation middle --max-length 8192 (4096 for Llama-2)",
    ),
    TaskGroup(
        "gsm8k",
        ("gsm8k",),
        ("gsm8k",),
        "SQuat Table 1, InnerQ Tables 1-2, XQuant Table 3",
        "5 examples; the answer behind `####` (strict-match) or the last number (flexible-extract)",
    ),
    TaskGroup("mmlu_pro_math", ("mmlu_pro_math",), ("mmlu_pro",), "SQuat Table 1"),
    TaskGroup("mmlu_pro_law", ("mmlu_pro_law",), ("mmlu_pro",), "SQuat Table 1"),
    TaskGroup("ifeval", ("ifeval",), ("ifeval",), "SQuat Table 1"),
    TaskGroup(
        "gpqa",
        ("gpqa_main_cot_n_shot",),
        ("gpqa",),
        "SQuat Table 1",
        "the paper does not say which of lm-eval's 15; its scores are multiples of 1/448, the size of the main subset, "
        "and lie below chance, so that answers are generated",
    ),
    TaskGroup("bbh", ("bbh",), ("bbh",), "SQuat Table 1", "27 tasks, chain of thought, 3 examples"),
    TaskGroup("math500", ("minerva_math500",), ("minerva_math",), "SQuat Figure 6", "--max-new-tokens 8192"),
)


def is_lm_eval(task: str) -> bool:
    """Whether a name given to `--task` is a task of lm-eval."""
    return task.startswith(PREFIX)


def requested_tasks(tasks: Sequence[str]) -> dict[str, list[str]]:
    """Map the name in lm-eval of each requested task or group to the names given after `lm_eval:`."""
    groups = {group.name: group.tasks for group in GROUPS}
    requested: dict[str, list[str]] = {}
    for given in dict.fromkeys(task.removeprefix(PREFIX) for task in tasks if is_lm_eval(task)):
        for name in groups.get(given, (given,)):
            requested.setdefault(name, []).append(given)
    return requested


def task_table() -> str:
    """The table of task groups in docs/EVALUATION.md, as Markdown."""
    rows = [f"| `{PREFIX}{one.name}` | {_tasks(one)} | {one.papers} | {one.note} |" for one in GROUPS]
    return "\n".join(["| name | tasks of lm-eval | tables | to know |", "|---|---|---|---|", *rows])


def _tasks(group: TaskGroup) -> str:
    return ", ".join(f"`{task}`" for task in group.tasks)
