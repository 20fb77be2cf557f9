"""The rules of `kvq eval`'s options say of each whether a task reads it; compared with what the option changes."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import typer
from tiers import slow

from kvq_cli.cli.app import app
from kvq_cli.cli.rules import unused
from kvq_cli.evaluation.settings import EvaluationSettings, build_evaluations

from .conftest import _rows, write_lines

BASE = {"seqlens": (1024,), "samples": 2, "templates": "reference", "batch_size": 2}
#: Option -> setting and a value that differs from the base.
CHANGES = {
    "samples": ("samples", 3),
    "dataset": ("datasets", ("pydoc",)),
    "seqlen": ("seqlens", (1200,)),
    "prompt_tokens": ("prompt_tokens", 40),
    "haystack": ("haystack", "words.txt"),
    "qa_file": ("qa_files", (Path("squad.json"),)),
    "templates": ("templates", "standard"),
    "chat_template": ("chat_template", False),
    "data_dir": ("data_dir", "data"),
    "num_fewshot": ("num_fewshot", 1),
    "max_length": ("max_length", 512),
    "max_new_tokens": ("max_new_tokens", 5),
    "truncation": ("truncation", "middle"),
    "save_prompts": ("save_prompts", True),
    "batch_size": ("batch_size", 1),
    "seed": ("seed", 1),
}


@pytest.fixture(scope="module")
def chatting(loaded):
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}Q: {{ m['content'] }}\n{% endfor %}A:"
    return dataclasses.replace(loaded, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "words.txt").write_text("A heron stood on the far bank of the river. " * 400)
    entry = {"qas": [{"question": "Who stood there?", "answers": [{"text": "a heron"}], "is_impossible": False}]}
    paragraphs = [{"context": f"A heron stood on bank {number}.", **entry} for number in range(40)]
    (folder / "squad.json").write_text(json.dumps({"data": [{"title": "t", "paragraphs": paragraphs}]}))
    write_lines(folder / "data" / "sums" / "train.jsonl", _rows(5, [60] * 8))
    write_lines(folder / "data" / "sums" / "test.jsonl", _rows(6, [60] * 6))
    write_lines(folder / "data" / "letters" / "test.jsonl", _rows(7, [60] * 6))
    return folder


@pytest.mark.parametrize("task", ["vt", "sums", *slow("niah_single_2", "qa_1", "letters", "perplexity")])
def test_the_rules_agree_with_what_options_change(task, chatting, tasks, data_dir, files, monkeypatch):
    monkeypatch.chdir(files)
    name = f"lm_eval:{tasks[task]}" if task in tasks else task

    def observed(**changes):
        settings = EvaluationSettings([name], **{**BASE, "data_dir": str(data_dir), **changes})
        [one] = build_evaluations(settings, chatting, lambda *_: lambda _: None)
        batch = None if task == "perplexity" else one.batch_size
        kept = [vars(one).get(key) for key in ("_save_prompts", "_options")]
        return [one.name, one.config, one.count, batch, *kept], one.unread

    command = typer.main.get_command(app).commands["eval"]
    before, unread = observed()
    assert not unread
    values = {"task": name, "dataset": "prose", "qa_file": ["squad.json"]}
    changes = CHANGES | ({"chat_template": ("chat_template", True)} if task == "letters" else {})  # not its default
    for option, (setting, value) in changes.items():
        flag = f"--{option.replace('_', '-')}"
        found, unread = observed(**{setting: value})
        announced = bool(unused(command, values, [option])) or flag in unread
        assert announced == (found == before), option
        assert set(unread) <= {flag}
