"""Commands, code and links of the documentation work, and the tutorial's method passes its tests."""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from pages import ROOT, blocks

from kvq_cli import attach
from kvq_cli.cli.app import app
from kvq_cli.cli.examples import EXAMPLES
from kvq_cli.errors import UsageError
from kvq_cli.methods import registry
from kvq_cli.methods.base import LayerPlan
from kvq_cli.models import load_model

PAGES = [path.relative_to(ROOT / "docs").as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN = ["index.md", "COMPARE.md", "COMPRESS.md", "PYTHON.md", "KERNELS.md", "ADD_A_METHOD.md"]
#: Every page is linked from one of these.
SUMMARIES = ["index.md", "REPRODUCTION.md", "COMPARISON.md"]
TUTORIAL = "ADD_A_METHOD.md"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["COMPARE.md", "COMPRESS.md", "PYTHON.md", "KERNELS.md"])
def test_commands_and_code_run(page, run_page):
    run_page(blocks(page))


def parse(words: list[str]) -> None:
    """Read the words after `kvq` as the command would, without running it."""
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="kvq")
    while hasattr(command, "commands"):
        name, *words = words
        command = command.get_command(context, name)
        assert command is not None, name
        if not words:
            break
    command.make_context("kvq", list(words), parent=context)


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_examples_in_help_can_be_parsed(line):
    program, *words = shlex.split(line)
    assert program == "kvq"
    parse(words)
    for file in (word for word in words if word.startswith(("examples/", "artifacts/"))):
        assert (ROOT / file).exists(), file


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_are_not_run_can_be_parsed(page):
    for block in (block for block in blocks(page) if block.language == "bash" and not block.is_run):
        for words in block.commands:
            words = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S*", word)]
            if words[0] == "kvq":
                parse(words[1:])
            for path in (word for word in words if word.startswith("tests/")):
                assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("page", PAGES)
def test_links_are_valid(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)", text, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if target.startswith("#"):
            assert target[1:] in headings, f"docs/{page}: {target}"
        elif "://" not in target:
            assert (ROOT / "docs" / page).parent.joinpath(target.split("#")[0]).exists(), f"docs/{page}: {target}"


@pytest.mark.parametrize("page", WRITTEN)
def test_paths_that_a_page_names_exist(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    paths = re.findall(r"`((?:kvq_cli|kernels|lab|tests|tools|benchmarks|artifacts)/[\w/.-]+)`", text)
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_every_page_is_in_the_index():
    index = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in SUMMARIES)
    missing = [page for page in PAGES if page != "index.md" and f"({page})" not in index]
    assert not missing
    assert "(docs/index.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def tutorial(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder with the tutorial's files and the metadata that installing them makes, on Python's path."""
    from setuptools import build_meta

    before = set(registry.method_names())  # loads kvq's own methods, which must stay registered
    folder = tmp_path / "package"
    folder.mkdir()
    for block in blocks(TUTORIAL):
        if block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["setup.py"])
    build_meta.prepare_metadata_for_build_wheel(str(folder))
    monkeypatch.syspath_prepend(str(folder))
    registry._load_plugins.cache_clear()
    yield folder
    for name in set(registry._CLASSES) - before:
        del registry._CLASSES[name]
    for name in ("kvq_absmax", "test_absmax", "test_reuse"):
        sys.modules.pop(name, None)
    registry._load_plugins.cache_clear()


def test_tutorial_commands_run(tutorial, run_page):
    run_page(blocks(TUTORIAL))


def test_tutorial_tests_pass(tutorial):
    assert "absmax" in registry.method_names()
    tests = 0
    for file in sorted(tutorial.glob("test_*.py")):
        for name, test in vars(importlib.import_module(file.stem)).items():
            if name.startswith("test_"):
                test()
                tests += 1
    assert tests == 5


def test_kernels_support_the_codec_reused_in_the_tutorial(tutorial):
    import kvq_absmax

    from kvq_cli.codecs.signed import SignedCodec

    class Reused(kvq_absmax.AbsMax):
        def plan(self, layer, shape, tensors):
            plan = super().plan(layer, shape, tensors)
            codec = SignedCodec(4, "token", shape.head_dim, shape.head_dim, shape.dtype, sign="inside")
            return LayerPlan(replace(plan.keys, codec=codec), replace(plan.values, codec=codec))

    model = load_model("reference", "cpu", "float32").model
    with attach(model, Reused(), backend="triton"):
        pass
    with pytest.raises(UsageError, match="AbsMaxCodec"), attach(model, kvq_absmax.AbsMax(), backend="triton"):
        pass


def test_unusable_plugin_is_named(tutorial, fails):
    module = tutorial / "kvq_absmax.py"
    source = module.read_text()
    module.write_text(source.replace('name = "absmax"', 'name = "other"'))
    fails("methods", "absmax", code=1, says="kvq-absmax: kvq_absmax:AbsMax is not registered")
    shutil.rmtree(tutorial / "__pycache__", ignore_errors=True)
    registry._CLASSES.pop("other")
    sys.modules.pop("kvq_absmax")
    module.write_text("import no_such_module\n")
    importlib.invalidate_caches()
    fails("methods", code=1, says="kvq-absmax: its method absmax cannot be imported: ModuleNotFoundError")


def test_example_program_prints_answers_and_reports(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compress_a_model.py"])
    runpy.run_path(str(ROOT / "examples" / "compress_a_model.py"), run_name="__main__")
    answers = re.findall(
        r"^(\w+): (.*)\n(.* tokens, .* compressed; .* bytes .*)$", capsys.readouterr().out, re.MULTILINE
    )
    assert [method for method, _, _ in answers] == ["fp16", "kivi", "temporalkv"]
    assert {answer for _, answer, _ in answers} == {answers[0][1]}  # all three find the needle
    sizes = [float(re.search(r"([\d.]+) bits per number", report)[1]) for _, _, report in answers]
    assert sizes == sorted(sizes, reverse=True)
