"""Verdicts on claims from result files of the current options, and the page of claims."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from kvq_cli.files import write_json
from kvq_cli.methods.registry import build_parsed, to_config
from kvq_cli.models import REFERENCE, SMOLLM2
from kvq_cli.papers.run import DONE, PARTLY, RECORD, TO_DO, current_record, state
from kvq_cli.papers.scores import SCORES
from kvq_cli.papers.studies.study import studies
from kvq_cli.papers.targets import MEASURED, target, targets
from lab.claims.claims import (
    BY_CHANCE,
    FAILS,
    HARDWARE,
    HOLDS,
    NOT_MEASURED,
    NOT_READ,
    Claim,
    Verdict,
    claims,
    explain,
    judge,
)
from lab.claims.pairs import KL, LOSS, SCORE, Pair
from lab.pages.reproduction import pages


@pytest.fixture
def result(tmp_path):
    """Writes a target's result as if it had been run."""

    def write(name, document, **record):
        entry = target(name)
        write_json(entry.result(REFERENCE, tmp_path), document)
        write_json(entry.folder(REFERENCE, tmp_path) / RECORD, {**current_record(entry, REFERENCE), **record})
        return tmp_path

    return write


def comparison(name, perplexities):
    """The comparison that `kvq eval` writes for a target, with these perplexities in the order of its rows."""
    methods = {}
    for number, (text, value) in enumerate(zip(target(name).rows(REFERENCE).values(), perplexities, strict=True)):
        methods[f"m{number}"] = {
            "results": {"perplexity": {"perplexity,none": value, "kl,none": value / 100}},
            "higher_is_better": {"perplexity": {"perplexity": False, "kl": False}},
            "cache": {},
            "config": {"method": to_config(build_parsed(text))},
        }
    return {"methods": methods}


def claim(check, **fields):
    return Claim(paper="SQuat", source="abstract", claim="that", targets=[], check=check, **fields)


LOWER = claim('kvq("table-temporalkv-4", "w/ sink compression") > kvq("table-temporalkv-4", "w/o sink compression")')


@pytest.mark.parametrize(("perplexities", "verdict"), [([9.0, 5.0], HOLDS), ([5.0, 5.0], FAILS)])
def test_a_claim_on_an_evaluation(result, perplexities, verdict):
    root = result("table-temporalkv-4", comparison("table-temporalkv-4", perplexities))
    found = judge(LOWER, REFERENCE, root)
    assert found.state == verdict
    assert found.numbers == {
        "w/ sink compression perplexity": perplexities[0],
        "w/o sink compression perplexity": perplexities[1],
    }


@pytest.mark.parametrize("failed", [0, 1])
def test_a_claim_on_a_method_that_failed_is_not_measured(result, failed):
    """The other method of the claim differs from it in windows alone, and does not stand for it."""
    document = comparison("table-temporalkv-4", [9.0, 5.0])
    rows = list(target("table-temporalkv-4").rows(REFERENCE))
    del document["methods"][f"m{failed}"]
    root = result("table-temporalkv-4", {**document, "failed": {f"m{failed}": "NaN"}})
    assert judge(LOWER, REFERENCE, root).state == NOT_MEASURED
    left = claim(f'kvq("table-temporalkv-4", {rows[1 - failed]!r}) < 10')
    assert judge(left, REFERENCE, root).state == HOLDS
    assert "".join(pages([REFERENCE], root).values())


def test_a_claim_on_a_task_of_other_sizes_is_not_measured(result):
    """The papers' sizes have tasks of lm-eval in the place of RULER's, or no perplexity."""
    root = result("table-temporalkv-4", comparison("table-temporalkv-4", [9.0, 5.0]))
    check = 'kvq("table-temporalkv-4", "w/ sink compression", "ruler mean") > 50'
    assert judge(claim(check), REFERENCE, root).state == NOT_MEASURED


def test_missing_unfinished_and_outdated_results_do_not_count(result, tmp_path):
    assert judge(LOWER, REFERENCE, tmp_path).state == NOT_MEASURED
    document, entry = comparison("table-temporalkv-4", [9.0, 5.0]), target("table-temporalkv-4")
    assert state(entry, REFERENCE, tmp_path) == TO_DO
    for record in ({"finished": False}, {"command": ["kvq", "eval", "--samples", "1"]}, {"model": "reference 0"}):
        root = result("table-temporalkv-4", document, **record)
        assert judge(LOWER, REFERENCE, root).state == NOT_MEASURED
        assert state(entry, REFERENCE, root) == PARTLY
    assert state(entry, REFERENCE, result("table-temporalkv-4", document)) == DONE


def test_a_claim_on_gpu_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entry = claim('max(gpu("inner grouping\'s time saved, of outer\'s", "llama")) >= 0.22', gpu=True)
    assert judge(entry, REFERENCE, tmp_path).state == HARDWARE
    rows = [
        {"operation": "product", "case": case, "model": "llama", "context": 8192, "us": {"p50": us}}
        for case, us in (("inner grouping", 75.0), ("outer grouping", 100.0))
    ]
    write_json(tmp_path / "benchmarks" / "some-gpu" / "kernels.json", {"machine": {"gpu": "some"}, "rows": rows})
    found = judge(entry, REFERENCE, tmp_path)
    assert found.state == HOLDS
    assert found.numbers == {"inner grouping's time saved, of outer's, llama, 8192, some-gpu": 0.25}


@pytest.mark.parametrize(("check", "state"), [("1 < 2", BY_CHANCE), ("1 > 2", FAILS)])
def test_a_doubt_is_of_one_model_and_of_checks_that_are_true(check, state):
    entry = claim(check, chance={REFERENCE: "an interval includes zero"})
    assert judge(entry, REFERENCE).state == state
    assert judge(entry, SMOLLM2).state == (HOLDS if state == BY_CHANCE else FAILS)


SINKS = ("w/ sink compression", "w/o sink compression")


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([[2.0, 2.25, 1.5], [3.0, 3.5, 2.5]], HOLDS),
        ([[2.0, 2.25, 1.5], [3.0, 2.0, 2.5]], BY_CHANCE),  # mean -0.583, 95 %: -2.38 to 1.21
        ([[3.0, 3.5, 2.5], [2.0, 2.25, 1.5]], BY_CHANCE),  # the row that is to be better is worse
        (None, HOLDS),  # results of an earlier version have no scores
    ],
)
def test_a_paired_interval_that_does_not_favor_the_row_makes_a_true_check_doubtful(result, losses, expected):
    entry = replace(LOWER, targets=["table-temporalkv-4"], paired=[Pair("table-temporalkv-4", *SINKS, LOSS)])
    root = result("table-temporalkv-4", comparison("table-temporalkv-4", [9.0, 5.0]))
    if losses:
        names = "perplexity_a-96 loss", "perplexity_b-96 loss", "perplexity_a-96 KL"
        scores = [dict(zip(names, (one[:2], one[2:], one[:1]), strict=True)) for one in losses]
        folder = target("table-temporalkv-4").folder(REFERENCE, root)
        write_json(folder / SCORES, dict(zip(("m0", "m1"), scores, strict=True)))
    verdict = judge(entry, REFERENCE, root)
    assert verdict.state == expected
    assert judge(replace(entry, paired=[], beside=entry.paired), REFERENCE, root).state == HOLDS
    if losses:
        [(name, difference)] = verdict.differences.items()
        assert name == "w/ sink compression - w/o sink compression, loss" and difference.samples == 3
        assert difference.mean == pytest.approx(sum(a - b for a, b in zip(*losses, strict=True)) / 3)


def test_scores_favor_the_higher_row_and_pair_answers_of_the_same_tasks(result):
    root = result("table-temporalkv-4", comparison("table-temporalkv-4", [9.0, 5.0]))
    file = target("table-temporalkv-4").folder(REFERENCE, root) / SCORES
    pair = Pair("table-temporalkv-4", *SINKS, SCORE)
    first, second = {"vt-512": [100, 50, 75], "cwe-512": [60]}, {"vt-512": [10, 0, 20], "cwe-512": [10]}
    write_json(file, {"m0": {**first, "perplexity-96 loss": [1.0]}, "m1": second})
    difference = pair.difference(REFERENCE, root)
    assert difference.samples == 4 and difference.mean == 61.25 and pair.favors(difference)
    assert not replace(pair, metric=KL).favors(difference)
    write_json(file, {"m0": first, "m1": {"vt-512": [10, 0], "cwe-512": [20, 10]}})
    assert pair.difference(REFERENCE, root) is None


def test_a_pair_may_lie_in_two_targets(result):
    losses = {"table-temporalkv-4": [2.0, 3.0], "table-temporalkv-2": [2.5, 3.75]}
    for name, values in losses.items():
        root = result(name, comparison(name, range(1, len(target(name).rows(REFERENCE)) + 1)))
        write_json(target(name).folder(REFERENCE, root) / SCORES, {"m0": {"perplexity-96 loss": values}})
    other = next(iter(target("table-temporalkv-2").rows(REFERENCE)))
    pair = Pair("table-temporalkv-4", SINKS[0], other, LOSS, "table-temporalkv-2")
    difference = pair.difference(REFERENCE, root)
    assert difference.mean == -0.625 and difference.samples == 2
    named = f"table-temporalkv-4: {SINKS[0]} - table-temporalkv-2: {other}, loss"
    assert pair.title(named=True) == named
    assert list(judge(replace(LOWER, targets=list(losses), beside=[pair]), REFERENCE, root).differences) == [named]
    assert replace(pair, against="table-temporalkv-8").difference(REFERENCE, root) is None  # not measured


def test_reasons_quote_results(result):
    text = "{kvq('table-temporalkv-4', 'w/ sink compression'):.1f} against {kvq('table-temporalkv-4', 'm1'):,.2f}"
    entry = claim("", why=text, chance={REFERENCE: f"{text} by chance"})
    root = result("table-temporalkv-4", comparison("table-temporalkv-4", [9.0, 1234.5]))
    assert explain(Verdict(entry, FAILS), REFERENCE, root) == "9.0 against 1,234.50"
    assert explain(Verdict(entry, BY_CHANCE), REFERENCE, root) == "9.0 against 1,234.50 by chance"
    assert explain(Verdict(entry, FAILS), REFERENCE, root / "empty") == NOT_READ
    with pytest.raises(KeyError, match="no row 'w/'"):
        explain(Verdict(claim("", why="{kvq('table-temporalkv-4', 'w/')}"), FAILS), REFERENCE, root)


@pytest.mark.parametrize(("fields", "reason"), [({}, ""), ({"gpu": True}, "waits"), ({"sizes": "any"}, "waits")])
def test_a_plain_reason_is_of_the_built_in_model_unless_no_model_is_measured(fields, reason, tmp_path):
    entry = claim("1 > 2", why="waits", **fields)
    assert explain(judge(entry, REFERENCE, tmp_path), REFERENCE, tmp_path) == "waits"
    assert explain(judge(entry, SMOLLM2, tmp_path), SMOLLM2, tmp_path) == reason


def test_pairs_are_rows_of_the_claims_targets():
    for entry in claims():
        for pair in (*entry.paired, *entry.beside):
            other = pair.against or pair.target
            assert {pair.target, other} <= set(entry.targets) and pair.metric in (LOSS, KL, SCORE)
            assert pair.row in target(pair.target).rows(SMOLLM2) and pair.other in target(other).rows(SMOLLM2), pair


def test_checks_read_every_result(result):
    """The page shows all numbers, also those behind the first comparison that fails."""
    root = result("table-temporalkv-4", comparison("table-temporalkv-4", [9.0, 5.0]))
    rows = ", ".join(map(repr, SINKS))
    check = f'all(kvq("table-temporalkv-4", row) > 100 for row in ({rows})) or rising(3, 2)'
    assert len(judge(claim(check), REFERENCE, root).numbers) == 2


def test_every_doubt_is_of_a_measured_model():
    assert all(set(entry.chance) <= set(MEASURED) for entry in claims())


def test_a_claim_on_a_study(result):
    document = {
        "columns": ["layer", "W_k"],
        "rows": [[0, 1.0], [1, 2.0], [2, 5.0]],
        "numbers": {"full": 8, "deep": {"a": [1, 2]}},
    }
    root = result("figure-temporalkv-15", document)

    def of(check):
        return judge(claim(check), REFERENCE, root).state

    assert of('max(study("rank", "W_k")[:2]) < study("rank", "W_k", layer=2)[0]') == HOLDS
    assert of('number("rank", "deep", "a")[1] == 3') == FAILS
    assert of('number("rank", "deep", "b") == 3') == of('study("rank", "W_q")') == NOT_MEASURED


def test_every_claim_names_targets_and_parses():
    for entry in claims():
        assert ast.parse(entry.check, mode="eval")
        assert all(name in targets() for name in entry.targets), entry.claim
        assert entry.gpu == any(targets()[name].gpu for name in entry.targets), entry.claim


def test_claims_and_targets_name_existing_studies():
    named = {entry.analyze for entry in targets().values() if entry.analyze}
    for entry in claims():
        for call in ast.walk(ast.parse(entry.check, mode="eval")):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("study", "number"):
                named.add(ast.literal_eval(call.args[0]))
    assert named <= set(studies())


def test_the_page_counts_pairs_ranked_alike(result):
    # The paper's order, but XQuant-2bit above KIVI*-2bit: one pair of equal bits in each of the 4 columns.
    name = "table-xquant-b1"
    order = [1.0, 1.2, 1.1, 1.05, 1.5, 1.4, 1.3, 2.0, 2.1, 1.9]
    page = "".join(pages([REFERENCE], result(name, comparison(name, order))).values())
    (line,) = (line for line in page.splitlines() if line.startswith(f"| {name} | built-in model | 1"))
    pairs, alike, equal, ties = (cell.strip() for cell in line.strip("|").split("|")[2:])
    assert pairs == "140" and alike == "136 (97%)" and equal == "28 of 32 (88%)" and ties == "0"


def test_the_page_has_all_claims_with_computed_numbers(result, tmp_path):
    root = result("table-temporalkv-4", comparison("table-temporalkv-4", [11.25, 5.5]))
    page = "".join(pages([REFERENCE], root).values())
    assert all(entry.claim in page for entry in claims())
    assert "| w/ sink compression perplexity | 11.25 |" in page and "| w/o sink compression perplexity | 5.5 |" in page
    assert "2.05 times" in page
    assert "11.25" not in "".join(pages([REFERENCE], tmp_path / "empty").values())


def test_every_abstract_has_claims():
    papers = {entry.paper: 0 for entry in claims()}
    for entry in claims():
        papers[entry.paper] += entry.source.startswith("abstract")
    assert set(papers) == {"TemporalKV", "SQuat", "InnerQ", "XQuant"} and min(papers.values()) >= 4
