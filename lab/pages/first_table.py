"""Write the README's first tables: perplexity by text, divergence and bits of compared methods, least divergence first;
and paired differences between methods at 2 bits, with each paper's windows and with equal ones.

python -m lab.pages.first_table COMPARISON EQUAL README.md    folders of comparisons; EQUAL: of one with equal windows
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvq_cli.evaluation.formats import markdown
from kvq_cli.evaluation.tabulate import Table, tabulate
from kvq_cli.files import write_text
from kvq_cli.papers.report import CLAIMS
from kvq_cli.report.sources import find_results

BITS, DIVERGENCE = "bits measured", "KL to fp16"


def first_table(scores: Table) -> str:
    """Markdown of the columns that the README shows, sorted by divergence."""
    texts = [title for title in scores.titles if title.startswith("perplexity ")]
    shown = ["method", *texts, DIVERGENCE, "top-1", BITS]
    places = [scores.titles.index(title) for title in shown]
    divergence = {label: entry.value or 0.0 for label, entry in scores.column(DIVERGENCE).items()}
    rows = sorted(scores.cells(), key=lambda row: divergence[row[0]])
    return markdown(shown, [[row[place] for place in places] for row in rows])


def paired_table(folders: dict[str, Path]) -> str:
    """Markdown of the pairs at 2 bits, without options of the better method. folders: of comparisons, by windows."""
    columns, lines = ["windows", "method", "beside", DIVERGENCE, BITS, "difference in loss"], []
    for windows, folder in folders.items():
        header, _, *rows = (folder / CLAIMS).read_text(encoding="utf-8").splitlines()
        for row in rows:
            pair = dict(zip(_cells(header), _cells(row), strict=True))
            if pair["better"].endswith("-2bit"):
                lines.append([windows, pair["better"], pair["than"], *(pair[name] for name in columns[3:])])
    return markdown(columns, lines)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| ").split("|")]


def _write(page: Path, name: str, table: str) -> None:
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{page}: no lines {begin} and {end}")
    write_text(page, f"{before}{begin}\n\n{table}\n\n{end}{after}")


def main(folder: Path, equal: Path, page: Path) -> None:
    [results] = find_results(folder)
    _write(page, "first table", first_table(tabulate(results.methods)))
    _write(page, "pairs", paired_table({"each paper's": folder, "equal": equal}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
