"""The published numbers: the form of the CSV files, and, where the papers' texts are available, their correctness."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path

import pytest

from kvq_cli.papers.published import PAPERS, cells, rows, value

TABLES = {
    "TemporalKV": [*map(str, range(1, 15))],
    "SQuat": ["1", "2", "3"],
    "InnerQ": ["1", "2", "3", "4"],
    "XQuant": ["1", "2", "3", "4", "B.1", "B.2"],
}
#: Texts of the papers, beside this checkout where there are any.
FOLDER = Path(os.environ.get("KVQ_PAPERS") or Path(__file__).parents[3] / "shared" / "papers")
TEXTS = {"TemporalKV": "temporalkv_thesis", "SQuat": "squat", "InnerQ": "innerq", "XQuant": "xquant"}


@pytest.mark.parametrize("paper", PAPERS)
def test_every_table_is_complete_and_has_no_duplicates(paper):
    """All tables of the papers, each number once; test_numbers_agree_with_the_papers_texts checks the numbers."""
    found = rows(PAPERS[paper])
    keys = [tuple(row[key] for key in ("table", "model", "row", "column")) for row in found]
    assert len(set(keys)) == len(keys)
    assert {row["paper"] for row in found} == {paper}
    assert {row["table"] for row in found} >= set(TABLES[paper])
    assert all(float(row["value"]) >= 0 for row in found)


def test_an_unknown_number_is_named_in_the_error():
    assert value("XQuant", "4", "Llama-2-7B", "XQuant-CL-2bit", "Wiki2") == 5.57
    with pytest.raises(KeyError, match="XQuant, table 4: no Llama-2-7B, XQuant-CL-1bit, Wiki2"):
        value("XQuant", "4", "Llama-2-7B", "XQuant-CL-1bit", "Wiki2")


def test_sizes_refer_to_published_numbers():
    for row in rows("sizes.csv"):
        assert value(row["paper"], row["table"], row["model"], row["row"], row["column"]) > 0


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no folder of the papers' texts: KVQ_PAPERS, or {FOLDER}")
@pytest.mark.parametrize("paper", PAPERS)
def test_numbers_agree_with_the_papers_texts(paper):
    """Numbers of a row and model stand in order within one line of the text, which has the row's name and is near the
    table's caption."""
    text = (FOLDER / f"{TEXTS[paper]}.txt").read_text(encoding="utf-8").splitlines()
    assert {found for line in text if (found := _caption(line))} == set(TABLES[paper])
    for table in TABLES[paper]:
        at = max(number for number, line in enumerate(text) if _caption(line) == table)
        near = [(line, _numbers(line)) for line in text[max(0, at - 60) : at + 60]]
        for name, numbers in _groups(paper, table):
            assert any(name in line and _within(numbers, found) for line, found in near), (table, name, numbers)


#: Tables whose text has a line for each model (4, 5), or rows that are named by numbers alone (1, 2; SQuat's 3).
UNLIKE = {*(("TemporalKV", table) for table in ("1", "2", "4", "5")), ("SQuat", "3")}


MARKUP = {"Hybrid_Prefill": "Hybrid <sub>Prefill</sub>"}


def _groups(paper: str, table: str) -> list[tuple[str, list[float]]]:
    """Return (row name, numbers) of each line of a table; numbers without a model are separate groups."""
    found: dict[tuple, list[float]] = defaultdict(list)
    for number, cell in enumerate(cells(paper, table)):
        by = (cell.model,) if (paper, table) in {("TemporalKV", "4"), ("TemporalKV", "5")} else (cell.model, cell.row)
        found[("" if (paper, table) in UNLIKE else cell.row, *(by if cell.model else (number,)))].append(cell.value)
    return [(MARKUP.get(key[0], key[0]), numbers) for key, numbers in found.items()]


def _caption(line: str) -> str | None:
    found = re.match(r"Table ((?:[A-Z]\.)?\d+): ", line)
    return found and found[1]


def _numbers(line: str) -> list[float]:
    line = re.sub(r"(?<=\d),(?=\d\d?(?!\d))", ".", line)  # 6,77
    line = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", line)  # 128,256
    return [float(number) for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?", line)]


def _within(wanted: list[float], line: list[float]) -> bool:
    remaining = iter(line)
    return all(number in remaining for number in wanted)
