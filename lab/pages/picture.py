"""Draw docs/COMPARISON.md's picture: KL divergence of compared methods over their measured bits.

python -m lab.pages.picture RESULTS FILE.svg    RESULTS: folder of a comparison
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvq_cli.evaluation.tabulate import tabulate
from kvq_cli.files import write_text
from kvq_cli.report.charts import draw
from kvq_cli.report.comparison import overall, quality_plot
from kvq_cli.report.sources import find_results


def picture(folder: Path) -> str:
    """The SVG file's text: the first plot of the folder's page, with its style sheet."""
    [results] = find_results(folder)
    scores = tabulate(results.methods)
    plot = quality_plot(scores, results.methods, overall(scores)[0])
    if plot is None:
        raise SystemExit(f"{folder}: no compressed method to draw")
    return draw(plot, width=680, height=340, alone=True)


if __name__ == "__main__":
    write_text(Path(sys.argv[2]), picture(Path(sys.argv[1])) + "\n")
