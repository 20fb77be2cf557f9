"""Targets on the same samples: one command evaluates the methods of all, and each then finds its samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvq_cli.cli import reproduce
from kvq_cli.cli.options import method_options
from kvq_cli.cli.output import Output
from kvq_cli.cli.reproduce import _make_all, _Runner
from kvq_cli.errors import KvqError
from kvq_cli.evaluation.base import PERPLEXITY
from kvq_cli.evaluation.compared_methods import compared_methods
from kvq_cli.evaluation.sample_log import digest
from kvq_cli.files import write_json
from kvq_cli.methods.registry import build_parsed
from kvq_cli.models import SMOLLM2
from kvq_cli.papers import run
from kvq_cli.papers.commands import Commands
from kvq_cli.papers.run import DONE, RECORD, current_record
from kvq_cli.papers.shared_samples import samples_command, samples_of
from kvq_cli.papers.targets import REFERENCE, STORE, target, targets

RULER = ("ruler", "squat", "squat-long", "math", "gsm8k", "longbench")
SHARED = ("table-temporalkv-10", "table-innerq-1", "table-squat-2", "beyond-ruler")


def value(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def identities(names: str, options: list[str]) -> set[str]:
    """What samples of methods are told apart by, as `kvq eval --compare NAMES --set OPTION` builds the methods. (Those
    of calibrated methods also name the artifact, which follows from the method.)"""
    methods = [build_parsed(name, **method_options(options)) for name in names.split(",")]
    return {digest(method.identity) for method in compared_methods(methods)}


def test_targets_share_samples_where_methods_share_passes():
    """Of RULER the prompts' passes, behind an exact prefill; of perplexity the uncompressed model's logits."""
    by_samples = {each.id: samples_of(each, SMOLLM2) for each in targets().values() if each.runs}
    windows = {name for name, words in by_samples.items() if words and PERPLEXITY in words}
    prompts = {name for name, words in by_samples.items() if words} - windows
    assert prompts == {name for name in by_samples if target(name).eval in RULER}
    assert len({by_samples[name] for name in prompts}) == 1
    assert {"table-temporalkv-6", "perplexity-squat", "table-xquant-1"} <= windows
    assert by_samples["table-temporalkv-6"] == by_samples["perplexity-squat"] == by_samples["table-xquant-1"]
    assert by_samples["table-temporalkv-8"] == by_samples["table-temporalkv-9"] != by_samples["table-temporalkv-6"]
    assert not any(samples_of(target(name), REFERENCE) for name in prompts)  # compressed prefill
    entry = target("table-innerq-1")
    fewer = replace(entry, options="--samples 2")
    assert samples_of(fewer, SMOLLM2) not in (None, samples_of(entry, SMOLLM2))
    assert samples_of(replace(entry, options="--prefill=compressed"), SMOLLM2) is None
    for each in (entry, target("table-temporalkv-6")):
        assert samples_of(replace(each, options="--fresh"), SMOLLM2) is None


def test_the_command_evaluates_each_method_once_with_the_options_of_its_target():
    entries = [target(name) for name in SHARED]
    entries.append(replace(entries[1], options="--set=residual=64 --set buffer=16"))
    command = samples_command(entries, SMOLLM2, STORE)
    union, wanted = value(command, "--compare"), set()
    for entry in entries:
        words = entry.command(SMOLLM2)
        pairs = [word.removeprefix("--set=") for word in words if word.startswith("--set=")]
        pairs += [following for word, following in zip(words, words[1:], strict=False) if word == "--set"]
        wanted |= identities(value(words, "--compare"), pairs)
        for flag in ("--task", "--seqlen", "--samples", "--prefill", "--batch-size", "--model", "--store"):
            assert value(command, flag) == value(words, flag)
    assert identities(union, []) == wanted and len(union.split(",")) == len(wanted)
    assert "--set" not in command and not Path(value(command, "--out")).is_relative_to(entries[0].folder(SMOLLM2))


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """The words of the commands that were run; those of calibrations by their first words."""
    words: list[list[str]] = []

    def record(self, command, purpose, *, into=False):
        words.append(list(command))
        return ""

    def run_target(entry, model, commands, root, *_):
        commands.run(entry.command(model, root), entry.id)
        write_json(entry.result(model, root), {})
        write_json(entry.folder(model, root) / RECORD, current_record(entry, model))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Commands, "run", record)
    monkeypatch.setattr(run, "run_target", run_target)
    monkeypatch.setattr(reproduce, "_calibrations", lambda wanted, *_: {wanted.id: ["calibrate", wanted.id]})
    return words


def runner(tmp_path: Path, stop: bool = True) -> _Runner:
    commands = Commands(lambda _: None, together=2)
    return _Runner(Output(quiet=True), commands, SMOLLM2, False, tmp_path / "out", tmp_path, "head:1", stop=stop)


def test_the_command_comes_first_and_names_the_methods_of_unfinished_targets(ran, tmp_path):
    names = ("table-innerq-1", "table-innerq-2", "table-squat-1")
    entries = [target(name) for name in names]
    made = _make_all(runner(tmp_path), entries)
    assert [each["state"] for each in made] == [DONE] * 3
    assert [words[1] for words in ran[:3]] == list(names)  # their artifacts
    assert ran[3] == [*samples_command(entries, SMOLLM2, tmp_path), "--ray", "head:1", "--quiet"]
    evaluated = [words for words in ran[4:] if words[0] == "eval"]
    assert evaluated == [entry.command(SMOLLM2, tmp_path / "out") for entry in entries]
    for name in names[1:]:  # the first alone is done
        (target(name).folder(SMOLLM2, tmp_path / "out") / RECORD).unlink()
    ran.clear()
    _make_all(runner(tmp_path), entries)
    assert [*samples_command(entries[1:], SMOLLM2, tmp_path), "--ray", "head:1", "--quiet"] in ran
    ran.clear()
    _make_all(runner(tmp_path), entries)
    assert not ran


@pytest.mark.parametrize("stop", [True, False])
def test_where_the_command_fails_the_targets_evaluate_their_own_methods(ran, tmp_path, monkeypatch, stop):
    def fail(*_):
        raise KvqError("out of memory")

    monkeypatch.setattr("kvq_cli.papers.shared_samples.samples_command", fail)
    entries = [target("table-innerq-1"), target("table-innerq-2")]
    if stop:
        with pytest.raises(KvqError, match="out of memory"):
            _make_all(runner(tmp_path), entries)
        assert not any(words[0] == "eval" for words in ran)
    else:
        assert [each["state"] for each in _make_all(runner(tmp_path, stop), entries)] == [DONE] * 2


@pytest.mark.slow
def test_samples_and_records_are_those_of_the_targets_own_commands(kvq, tmp_path):
    options = "--task vt --seqlen 300 --samples 2 --batch-size 2 --prefill exact --set sinks=4"
    names = ("table-innerq-1", "table-innerq-2")

    def reproduce(out: str, *names: str) -> None:
        result = kvq("reproduce", *names, "--options", options, "--out", f"{out}/out", "--store", f"{out}/store")
        assert result.exit_code == 0, result.stderr

    def contents(out: str) -> dict[str, str]:
        paths = [*(tmp_path / out).rglob("*.jsonl"), *(tmp_path / out).rglob(RECORD)]
        return {str(path.relative_to(tmp_path / out)): path.read_text() for path in paths}

    reproduce("together", *names)
    for name in names:
        reproduce("alone", name)
    assert contents("together") == contents("alone") and len(contents("alone")) == 7 + 2
