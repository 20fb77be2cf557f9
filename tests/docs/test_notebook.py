"""examples/figure.ipynb runs as it is, and its stored output names what it computes."""

from __future__ import annotations

import json
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "figure.ipynb"


@pytest.mark.slow
def test_the_notebook_leads_from_calibration_to_a_figure(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    names, printed = {}, StringIO()
    with redirect_stdout(printed):
        for cell in cells:
            exec("".join(cell["source"]), names)
    stored = "".join("".join(output["text"]) for cell in cells for output in cell["outputs"] if "text" in output)
    assert _without_numbers(printed.getvalue()) == _without_numbers(stored)
    assert (tmp_path / "results" / "figure" / "figure.pdf").read_bytes().startswith(b"%PDF")


def _without_numbers(text: str) -> str:
    """Return the lines of printed tables without what another processor rounds otherwise."""
    return re.sub(r"[-+±]*\d+\.\d+", "#", text)
