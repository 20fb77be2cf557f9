"""`kvq analyze`: behaviour common to all studies."""

import json

import pytest
import torch
from typer.testing import CliRunner

from kvq_cli.cli.app import app
from kvq_cli.papers.studies.rank import Spectrum, effective_rank, in_random_order
from kvq_cli.papers.studies.study import studies


def run(*words):
    return CliRunner().invoke(app, ["analyze", *map(str, words)])


def test_a_study_writes_its_numbers_and_figure(tmp_path):
    result = run("rank", "--out", tmp_path, "--json")
    document = json.loads(result.stdout)
    assert document == json.loads((tmp_path / "rank.json").read_text())
    assert len(document["numbers"]["W_k"]) == len(document["rows"]) == 8
    assert (tmp_path / "rank.png").stat().st_size > 5000


def test_without_a_name_all_studies_are_listed():
    listed = json.loads(run("--json").stdout)
    assert [one["name"] for one in listed] == list(studies())
    assert all(one["source"] and one["summary"].endswith(".") for one in listed)


@pytest.mark.parametrize("words", [["no-such-study"], ["rank", "--set", "x=1"]])
def test_bad_input_is_refused(tmp_path, words):
    assert run(*words, "--out", tmp_path).exit_code == 2
    assert not list(tmp_path.iterdir())


def test_effective_rank_of_known_spectra():
    assert effective_rank(torch.eye(7)) == pytest.approx(7)
    assert effective_rank(torch.ones(5, 9)) == pytest.approx(1, abs=1e-4)
    assert effective_rank(torch.diag(torch.tensor([2.0, 1.0, 1.0]))) == pytest.approx(2**1.5)


def test_effective_rank_of_rows_that_arrive_in_parts():
    rows = torch.randn(50, 12, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 5, 12)
    spectrum = Spectrum()
    for part in rows.split(20):
        spectrum.add(part)
    assert spectrum.effective_rank() == pytest.approx(effective_rank(rows), rel=1e-5)


def test_random_order_leaves_the_entries_and_no_structure():
    weight = torch.outer(torch.arange(1.0, 41), torch.arange(1.0, 31))
    mixed = in_random_order(weight)
    assert mixed.flatten().sort().values.equal(weight.flatten().sort().values)
    assert effective_rank(weight) == pytest.approx(1, abs=1e-3) and effective_rank(mixed) > 15
