"""Generated pages and diagrams of docs/ are up to date with `make docs`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import typing
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer

ROOT = Path(__file__).parents[2]
RECOMMENDED = ROOT / "kvq_cli" / "methods" / "recommended.json"
PAGES = {
    "cli": "CLI.md",
    "api": "API.md",
    "architecture": "architecture.svg",
    "decode_step": "decode-step.svg",
    "settings": "SETTINGS.md",
}


def generate(script: str, folder: Path, **environment: str) -> str:
    """Return what a script of lab/pages writes, run as its own process."""
    words = [sys.executable, "-m", f"lab.pages.{script}", str(folder)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths, **environment}, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return (folder / PAGES[script]).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "script", [pytest.param(script, marks=[pytest.mark.slow] * (script == "decode_step")) for script in PAGES]
)
def test_committed_file_is_up_to_date(script, tmp_path):
    committed = (ROOT / "docs" / PAGES[script]).read_text(encoding="utf-8")
    assert generate(script, tmp_path) == committed, f"docs/{PAGES[script]} is out of date: run `make docs`"
    if script == "settings":
        recommended = (tmp_path / RECOMMENDED.name).read_text()
        assert recommended == RECOMMENDED.read_text(), f"{RECOMMENDED.name} is out of date: run `make docs`"


def test_every_script_is_part_of_make_docs():
    # Libraries, and those that other targets run, on results and on a recorded session.
    others = {"comparison", "drawing", "drift", "needles", "paper_claims", "picture", "ranking", "reproduction"}
    others |= {"session", "site"}
    by_rows = {"models"}  # checked by tests/attention/test_model_families.py
    scripts = {path.stem for path in (ROOT / "lab" / "pages").glob("*.py")} - others
    assert scripts == {*PAGES, *by_rows}
    line = next(line for line in (ROOT / "Makefile").read_text().splitlines() if "lab.pages.$$page" in line)
    assert set(line.split("{")[1].split("}")[0].split(",")) == scripts


def test_commands_do_not_depend_on_the_terminal(tmp_path):
    odd = {"COLUMNS": "30", "LINES": "10", "TERM": "dumb", "LC_ALL": "C", "LANG": "C", "PYTHONHASHSEED": "7"}
    assert generate("cli", tmp_path, **odd) == (ROOT / "docs" / "CLI.md").read_text(encoding="utf-8")


def test_every_command_and_flag_is_on_the_page():
    """Compared with the functions' own parameters, not with what the generator reads."""
    from kvq_cli.cli.app import app

    text = (ROOT / "docs" / "CLI.md").read_text(encoding="utf-8")
    sections = {part.split("\n")[0]: part for part in text.split("\n## ")[1:]}
    groups = [("kvq", app), *((f"kvq {group.name}", group.typer_instance) for group in app.registered_groups)]
    for prefix, group in groups:
        for command in group.registered_commands:
            name = f"{prefix} {command.name or command.callback.__name__}"
            section = sections[name]
            hints = typing.get_type_hints(command.callback, include_extras=True)
            infos = [meta for hint in hints.values() for meta in getattr(hint, "__metadata__", ())]
            for info in infos:
                if isinstance(info, typer.models.OptionInfo):
                    for flag in re.findall(r"--[\w-]+", f"{info.default} {' '.join(info.param_decls or ())}"):
                        assert re.search(rf"{flag}\b", section), f"{name}: no {flag}"


def test_decode_step_diagram_shows_calls_from_model_to_kernel():
    nodes = ElementTree.parse(ROOT / "docs" / "decode-step.svg").iter("{http://www.w3.org/2000/svg}text")
    calls = [(node.text or "").split("  ×")[0] for node in nodes]
    order = [next(i for i, call in enumerate(calls) if call.endswith(name)) for name in ("Attention.forward", "encode")]
    assert order == sorted(order) and calls.index("decode_attention") > order[-1]
