"""Fixture that runs the commands and code of a documentation page."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from pages import ROOT, Block  # noqa: E402


@pytest.fixture
def run_page(kvq, tmp_path) -> Callable[[list[Block]], None]:
    """`run_page(blocks)` runs bash and Python blocks in their order, in a folder with the checkout's artifacts and
    examples; Python blocks share their names."""
    for name in ("artifacts", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    names: dict = {}

    def run(blocks: list[Block]) -> None:
        for block in (block for block in blocks if block.is_run):
            if block.language == "python":
                exec(compile(block.text, "page", "exec"), names)
                continue
            for program, *words in block.commands:
                assert program == "kvq", f"{program}: the test runs kvq alone"
                result = kvq(*words)
                assert result.exit_code == 0, (words, result.stderr)
                # A command that only writes a file says so on stderr.
                files = [words[i + 1] for i, word in enumerate(words) if word == "--save-cache"]
                files += [f"{words[1]}/report.html"] if words[0] == "report" else []
                assert result.stdout or (files and all(Path(file).is_file() for file in files)), words

    return run
