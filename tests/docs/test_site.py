"""The documentation as a site, built from the checkout without a network."""

import re
import socket

import pytest

from kvq_cli.errors import KvqError
from lab.pages import site


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the site."""
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the site's build opened a connection"))
        site.build(folder)  # warnings are errors: links that lead nowhere, pages without a place in the menu
    return folder


def test_first_page_is_the_readme(built):
    page = (built / "index.html").read_text(encoding="utf-8")
    assert "A tour" in page or "Tour" in page
    assert 'href="TOUR/"' in page and "docs/TOUR" not in page


def test_tables_and_folded_parts_are_rendered(built):
    page = (built / "reproduction" / "temporalkv" / "index.html").read_text(encoding="utf-8")
    folded = page[page.index("<details") : page.index("</details>")]
    assert "<table>" in folded and "| --- |" not in page


def test_pages_load_nothing_from_the_network(built):
    for file in built.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"(https?:[^\"]*)\"", file.read_text("utf-8")
        )
        assert not loaded, file


def test_every_local_link_of_the_site_leads_to_a_file(built):
    missing = set()
    for file in built.rglob("*.html"):
        if file.name == "404.html":  # its links are absolute
            continue
        for target in re.findall(r"(?:src|href)=\"([^\"#?]+)", file.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:", target) and not (file.parent / target).exists():
                missing.add((file.relative_to(built).as_posix(), target))
    assert not missing


def test_a_link_that_leads_nowhere_is_refused(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("[lost](docs/lost.md)")
    monkeypatch.setattr(site, "ROOT", tmp_path)
    with pytest.raises(KvqError, match=r"README.md: the site has no place for docs/lost.md"):
        site.stage(tmp_path / "site")
