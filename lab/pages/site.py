"""Build the documentation as a site of static files: README, docs/ and the pages that they link to.

python -m lab.pages.site FOLDER    needs the extra [dev]; nothing is loaded from the network
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
from os.path import relpath
from pathlib import Path
from tempfile import TemporaryDirectory

from kvq_cli.errors import KvqError

ROOT = Path(__file__).parents[2]
CONFIG = Path(__file__).parents[1] / "site" / "mkdocs.yml"
#: Pages that change their place: the README is the site's first page.
PLACES = {"README.md": "index.md", "docs/index.md": "documentation.md"}
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\(|src=\"|href=\")([^)\"\s#]+)")


def build(target: Path) -> None:
    """Write the site into `target`, whose content is replaced; KvqError for a page without a place in the menu, or a
    link that leads nowhere."""
    from mkdocs.commands.build import build as run
    from mkdocs.config import load_config
    from mkdocs.exceptions import MkDocsException

    with TemporaryDirectory() as temporary:
        shutil.copy(CONFIG, temporary)
        stage(Path(temporary) / "docs")
        config = load_config(str(Path(temporary) / CONFIG.name), site_dir=str(target.resolve()), strict=True)
        try:
            run(config)
        except MkDocsException as error:
            raise KvqError(f"the site was not built: {error}") from error


def stage(folder: Path) -> None:
    """Copy README, docs/ and whatever they link to into `folder`, with links to where it is there."""
    waiting = ["README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*") if path.is_file())]
    done: set[str] = set()
    while waiting:
        source = waiting.pop()
        if source in done:
            continue
        done.add(source)
        place = folder / _place(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        if not source.endswith(".md"):
            shutil.copy(ROOT / source, place)
            continue
        text, linked = _moved((ROOT / source).read_text(encoding="utf-8"), source)
        place.write_text(text, encoding="utf-8")
        waiting += linked


def _place(source: str) -> str:
    """Return where a file of the repository is in the site."""
    return PLACES.get(source, source.removeprefix("docs/"))


def _moved(text: str, source: str) -> tuple[str, list[str]]:
    """Return a page with the links of its new place, and the files that it links to. What is folded is Markdown,
    too."""
    linked: list[str] = []

    def link(found: re.Match[str]) -> str:
        before, target = found.groups()
        path = (ROOT / source).parent.joinpath(target).resolve()
        if "://" in target or target.startswith("mailto:") or not path.is_relative_to(ROOT):
            return found[0]
        if not path.is_file():
            raise KvqError(f"{source}: the site has no place for {target}")
        linked.append(str(path.relative_to(ROOT)))
        return before + relpath(_place(linked[-1]), Path(_place(source)).parent)

    parts = _FENCE.split(text)
    parts[::2] = [_LINK.sub(link, part).replace("<details>", '<details markdown="1">') for part in parts[::2]]
    return "".join(parts), linked


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    build(Path(sys.argv[1]))
