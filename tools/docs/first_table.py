"""Write the README's first table: perplexity by text, divergence and bits of compared methods, least divergence first.

python tools/docs/first_table.py RESULTS README.md    RESULTS: folder of a comparison
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvq_cli.evaluation.tabulate import Table, tabulate
from kvq_cli.files import write_text
from kvq_cli.report.sources import find_results

BEGIN, END = "<!-- first table -->", "<!-- end of the first table -->"
BITS, DIVERGENCE = "bits measured", "KL to fp16"


def first_table(scores: Table) -> str:
    """Markdown of the columns that the README shows, sorted by divergence."""
    texts = [title for title in scores.titles if title.startswith("perplexity ")]
    shown = ["method", *texts, DIVERGENCE, "top-1", BITS]
    places = [scores.titles.index(title) for title in shown]
    divergence = {label: entry.value or 0.0 for label, entry in scores.column(DIVERGENCE).items()}
    rows = sorted(scores.cells(), key=lambda row: divergence[row[0]])
    lines = [shown, ["---"] * len(shown), *([row[place] for place in places] for row in rows)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def main(folder: Path, page: Path) -> None:
    [results] = find_results(folder)
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{page}: no lines {BEGIN} and {END}")
    write_text(page, f"{before}{BEGIN}\n\n{first_table(tabulate(results.methods))}\n\n{END}{after}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
