"""Check what errors and pages say about installing kvq, whose name on PyPI is another project's."""

from __future__ import annotations

import re

import pytest

from kvq_cli.extras import install_command

from .pages import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_errors_name_the_source_folder_and_the_other_project():
    words = install_command("vllm", "eval")
    assert words.startswith("pip install '.[vllm]' or pip install '.[eval]' in kvq's source folder")
    assert "kvq on PyPI is another project" in words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_installs_kvq_from_an_index(page):
    assert not re.search(r"""pip install (-\S+ )*['"]?kvq\b""", page.read_text())
