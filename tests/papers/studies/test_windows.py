"""Sweeps over the full-precision windows, and SQuat's grid."""

import json

import pytest
import torch

from kvq_cli.errors import UsageError
from kvq_cli.methods.innerq import InnerQ
from kvq_cli.methods.kivi import Kivi
from kvq_cli.papers.studies.ablation import Ablation
from kvq_cli.papers.studies.predictions import predictions
from kvq_cli.papers.studies.study import build
from kvq_cli.papers.studies.windows import METHODS, Windows

TEXT = torch.randint(0, 256, (1, 140), generator=torch.Generator().manual_seed(2))


def test_sweeps_of_the_defaults():
    sweeps = Windows().sweeps()
    assert sweeps["sinks"] == [(0, 96), (8, 96), (32, 96), (64, 96)]
    assert sweeps["recent"] == [(32, 0), (32, 32), (32, 96), (32, 160)]
    assert {sinks + recent for sinks, recent in sweeps["split"]} == {128}
    assert Windows(sinks=(0, 200)).sweeps()["split"] == [(0, 128)]


def test_each_point_is_the_divergence_of_its_method(study_input):
    data = study_input("tiny", TEXT)
    found = Windows(sinks=(0, 8), recent=(0, 16), at_sinks=8, at_recent=16).run(data, lambda *_: None)
    wanted = {
        "kivi": Kivi(sinks=0, recent=24, group=32),
        "innerq": InnerQ(sinks=0, recent=24),
        "innerq, symmetric": InnerQ(sinks=0, recent=24, mode="symmetric"),
    }
    direct = predictions(data.loaded, TEXT, wanted, lambda *_: None)
    rows = {(row[0], *row[1:3]): row[3:] for row in found.rows}
    assert rows["split", 0, 24] == [direct[name].kl for name in METHODS]
    assert rows["sinks", 8, 16] == rows["recent", 8, 16] == rows["split", 8, 16]
    assert set(rows) == {(name, *point) for name, sweep in
                         Windows(sinks=(0, 8), recent=(0, 16), at_sinks=8, at_recent=16).sweeps().items()
                         for point in sweep}  # fmt: skip
    assert found.numbers["sweeps"]["recent"]["kl"]["kivi"] == [rows["recent", 8, r][0] for r in (0, 16)]


def test_windows_by_the_command(kvq, tmp_path):
    options = [
        f"{key}={value}" for key, value in {"sinks": "0,16", "recent": 8, "at_sinks": 0, "at_recent": 16}.items()
    ]
    words = [word for option in options for word in ("--set", option)]
    result = kvq("analyze", "windows", *words, "--samples", 1, "--seqlen", 136, "--out", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "windows.json").read_text())
    assert document["options"]["sinks"] == [0, 16]
    assert [row[:3] for row in document["rows"]] == [
        ["sinks", 0, 16], ["sinks", 16, 16], ["recent", 0, 8], ["split", 0, 16], ["split", 16, 0]
    ]  # fmt: skip
    assert all(value > 0 for row in document["rows"] for value in row[3:])
    assert (tmp_path / "windows.png").stat().st_size > 5000


@pytest.mark.parametrize(
    "options, says",
    [
        ({"sinks": "1,x"}, "'x' is not a whole number"),
        ({"recent": "-1"}, "recent"),
        ({"sinks": "200,129"}, "sinks=200,129: at least one must be at most at_sinks [+] at_recent=128"),
    ],
)
def test_bad_windows_are_refused(options, says):
    with pytest.raises(UsageError, match=says):
        build("windows", options)


def test_windows_longer_than_half_a_text_are_refused(study_input):
    with pytest.raises(UsageError, match="--seqlen 140 is too short for windows of 192 tokens"):
        Windows().run(study_input("tiny", TEXT), lambda *_: None)


def test_strength_0_equals_kivi(study_input):
    study = Ablation(ranks=(2, 4), strengths=(0.0, 0.01))
    numbers = study.run(study_input("tiny", TEXT), lambda *_: None).numbers
    assert [line[0] for line in numbers["kl"]] == [numbers["kivi"]["kl"]] * 2
    assert len({line[1] for line in numbers["kl"]} | {numbers["kivi"]["kl"]}) == 3


def test_ablation_by_the_command(kvq, tmp_path):
    words = ["--set", "ranks=2,6", "--set", "strengths=0.001", "--samples", 1, "--seqlen", 96]
    result = kvq("analyze", "ablation", *words, "--out", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "ablation.json").read_text())
    assert document["columns"] == ["KL per token", "lambda=0.001"]
    assert [row[0] for row in document["rows"]] == ["r=2", "r=6"]
    assert [row[1:] for row in document["rows"]] == document["numbers"]["kl"]
    assert (tmp_path / "ablation.png").stat().st_size > 5000
    assert kvq("analyze", "ablation", "--set", "ranks=0").exit_code == 2
