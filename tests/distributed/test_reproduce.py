"""`kvq reproduce` on workers: one cluster for all commands, which records do not name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvq_cli.papers.commands import Commands

#: The first two are on the same samples.
NAMES = ("perplexity-innerq-modes", "perplexity-innerq", "table-squat-3")
WORDS = ("reproduce", *NAMES, "--options", "--samples 2 --seqlen 192 --set sinks=4")


def contents(folder: Path) -> dict[str, list[bytes]]:
    """Lines of the samples, and of each target's comparison and record; other documents have the time of their run.

    Samples are sorted: targets at the same time share them, and append each when it is finished.
    """
    paths = [*folder.rglob("*.jsonl"), *folder.glob("out/**/comparison.json"), *folder.glob("out/**/target.json")]
    lines = {path: path.read_bytes().splitlines() for path in sorted(paths)}
    return {
        str(path.relative_to(folder)): sorted(own) if path.suffix == ".jsonl" else own for path, own in lines.items()
    }


@pytest.mark.slow
def test_results_and_records_are_those_of_one_process(kvq, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    executed, execute = [], Commands.run
    monkeypatch.setattr(
        Commands, "run", lambda self, words, *more, **o: executed.append(words) or execute(self, words, *more, **o)
    )
    for name, flags in (("one", []), ("two", ["--workers", 2])):
        result = kvq(*WORDS, "--out", f"{name}/out", "--store", f"{name}/store", *flags)
        assert result.exit_code == 0, result.stderr
    # The command of the shared samples, and each target's own.
    assert ["--ray" in words for words in executed] == [False] * 4 + [True] * 4
    # Two commands at a time: both begin before one has ended, and each line names its target.
    together = ("shared samples", "table-squat-3")
    begun = [result.stderr.index(f"{name}: $ kvq eval") for name in together]
    assert max(begun) < min(result.stderr.index(f"{name}: decode attention") for name in together)
    one, two = (
        {path: [line.replace(b"two/", b"one/") for line in own] for path, own in contents(tmp_path / name).items()}
        for name in ("one", "two")
    )
    assert list(one) == list(two) and any(path.endswith(".jsonl") for path in one)
    assert one == two
    record = next(lines for path, lines in two.items() if path.endswith("target.json"))
    assert json.loads(b"\n".join(record))["finished"]
