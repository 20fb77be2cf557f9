"""Tables as CSV, Markdown and LaTeX: text that the format would take for its own syntax is escaped."""

import csv
import io
import json

import pytest

from kvq_cli.evaluation.formats import Formatted, csv_text, escape_markdown, latex, markdown

TEXTS = ["=1+1", "+a", "-1+cmd|' /C calc'!A0", "@SUM(1)", "\ta", "\ra", "kivi-2bit", "2", "-1.5", "+0.25", "a=1"]
TEXTS += ["+0.0417 [+0.02149, +0.06191] *", "-1e-07 [-2.5e-06, +3]"]  # of `paired.interval`


def test_formulas_in_csv_are_text_and_numbers_stay_numbers():
    table = csv_text(["=x", "y"], [[text, -1.5] for text in TEXTS])
    head, *rows = csv.reader(io.StringIO(table, newline=""))
    assert head == ["'=x", "y"] and [row[1] for row in rows] == ["-1.5"] * len(TEXTS)
    assert [row[0] for row in rows] == ["'" + text.replace("\r", " ") for text in TEXTS[:6]] + TEXTS[6:]


def test_markdown_labels_are_escaped():
    lines = markdown(["a|b", "c"], [["*x* _y_ a_b `c` [d](e) <f> \\", "**1** | 2\n3"]], labels=1).splitlines()
    assert lines[0] == r"| a\|b | c |"
    assert lines[2] == r"| \*x\* \_y\_ a_b \`c\` \[d\](e) \<f\> \\ | **1** \| 2 3 |"
    assert markdown(["`a`"], [["[b](c)"]]).splitlines()[2] == "| [b](c) |"  # a caller's own markup
    assert escape_markdown("kivi-2bit,key_axis=channel") == "kivi-2bit,key_axis=channel"


def test_latex_cells_are_escaped():
    rows = latex(["a_b"], [["\\input{x} $y$ ~^<>|#%&"], [Formatted(r"\textbf{1}")]]).splitlines()
    escaped = r"\textbackslash{}input\{x\} \$y\$ \textasciitilde{}\textasciicircum{}\textless{}\textgreater{}\textbar{}"
    assert rows[2:6] == [r"a\_b \\", r"\midrule", rf"{escaped}\#\%\& \\", r"\textbf{1} \\"]


@pytest.mark.parametrize(("format", "label"), [("csv", "'=a_b"), ("markdown", "=a_b"), ("latex", r"=a\_b")])
def test_labels_of_results_are_escaped(kvq, tmp_path, format, label):
    one = {"results": {"vt": {"512,none": 0.5}}, "n-samples": {"vt": {"effective": 2}}, "higher_is_better": {"vt": {}}}
    one |= {"cache": {}, "config": {"method": {"name": "kivi", "bits": 2}, "model_args": {"name": "reference"}}}
    (tmp_path / "comparison.json").write_text(json.dumps({"methods": {"=a_b": one}}))
    result = kvq("results", tmp_path, "--format", format)
    assert any(line.removeprefix("| ").startswith(label) for line in result.stdout.splitlines()), result.output
