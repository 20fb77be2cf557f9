"""Parameters of RULER's 13 tasks (Hsieh et al. 2024, https://arxiv.org/abs/2404.06654; `synthetic.yaml`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kvq_cli.errors import UsageError

RULER = "ruler"
"""Name of the group of all 13 tasks."""
MAX_NEW_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
"""Maximum answer length in tokens by family; part of the context length."""
METRICS = {"niah": "string_match_all", "vt": "string_match_all", "cwe": "string_match_all", "fwe": "string_match_all"}


@dataclass(frozen=True)
class RulerTask:
    """One task: its family and the family's parameters (`args`, named as in RULER's configuration where possible)."""

    name: str
    family: str
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def max_new_tokens(self) -> int:
        return MAX_NEW_TOKENS[self.family]

    @property
    def metric(self) -> str:
        return METRICS.get(self.family, "string_match_part")


def _niah(
    name: str,
    haystack: str,
    *,
    key: str = "words",
    value: str = "numbers",
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
) -> RulerTask:
    # As in RULER, there are at least as many keys as queries.
    keys = max(keys, queries)
    args = {"haystack": haystack, "key": key, "value": value, "keys": keys, "values": values, "queries": queries}
    return RulerTask(name, "niah", MappingProxyType(args))


_ALL = (
    _niah("niah_single_1", "noise"),
    _niah("niah_single_2", "essay"),
    _niah("niah_single_3", "essay", value="uuids"),
    _niah("niah_multikey_1", "essay", keys=4),
    _niah("niah_multikey_2", "needle"),
    _niah("niah_multikey_3", "needle", key="uuids", value="uuids"),
    _niah("niah_multivalue", "essay", values=4),
    _niah("niah_multiquery", "essay", queries=4),
    RulerTask("vt", "vt", MappingProxyType({"haystack": "noise", "hops": 4})),
    RulerTask("cwe", "cwe", MappingProxyType({"common": 10, "often": 30, "seldom": 3})),
    RulerTask("fwe", "fwe", MappingProxyType({"alpha": 2.0, "letters": 6})),
    RulerTask("qa_1", "qa", MappingProxyType({"dataset": "squad"})),
    RulerTask("qa_2", "qa", MappingProxyType({"dataset": "hotpotqa"})),
)
TASKS: Mapping[str, RulerTask] = MappingProxyType({task.name: task for task in _ALL})


def ruler_task(name: str) -> RulerTask:
    """Look up a task; UsageError with the valid names if there is none."""
    if name not in TASKS:
        raise UsageError(f"unknown RULER task {name!r}; valid: {', '.join(TASKS)}")
    return TASKS[name]
