"""Effects of options from result files: paired intervals, equal bits, verdicts, and what is made of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from kvq_cli.errors import UsageError
from kvq_cli.files import write_json
from kvq_cli.methods.registry import build_parsed, method_names, to_config
from kvq_cli.papers.run import RECORD, current_record
from kvq_cli.papers.scores import SCORES
from kvq_cli.papers.targets import REFERENCE, SMOLLM2, target, targets
from lab.claims.claims import claims
from lab.claims.settings import BETTER, CHANCE, SAVES, WORSE, Measured, at_equal_bits, effect, load_sweep
from lab.pages.reproduction import pages

SHAPE = {"layers": 2, "query_heads": 4, "kv_heads": 2, "head_dim": 64, "hidden_size": 256}
SWEEPS = [entry for entry in targets().values() if entry.sweep]


def measured(change, bits, *kl, long_bits=None):
    return Measured(change, bits, bits if long_bits is None else long_bits, kl, {}, 0.0)


TWO, THREE = measured("2 bits", 2.0, 0.4, 0.2, 0.3), measured("3 bits", 3.0, 0.1, 0.05, 0.075)

FOUR = measured("4 bits", 4.0, 0.025, 0.0125, 0.01875)  # a quarter again


def test_intervals_are_those_of_a_paired_t_test():
    found = effect(measured("sinks=8", 2.0, 0.35, 0.17, 0.22), [TWO, THREE])
    expected = stats.ttest_rel([0.35, 0.17, 0.22], [0.4, 0.2, 0.3]).confidence_interval(0.95)
    assert (found.difference.low, found.difference.high) == pytest.approx((expected.low, expected.high))
    logs = stats.ttest_rel(*(np.log(each) for each in ([0.35, 0.17, 0.22], [0.4, 0.2, 0.3])))
    low, high = np.exp(logs.confidence_interval(0.95)) - 1
    mean = stats.gmean([0.35 / 0.4, 0.17 / 0.2, 0.22 / 0.3]) - 1
    assert found.short.more == 0 and found.judged.relative == pytest.approx((mean, low, high))


@pytest.mark.parametrize(("bits", "factor"), [(1.5, 2), (2.004, 1), (2.5, 1 / 2), (3.0, 1 / 4), (3.5, 1 / 8)])
def test_defaults_at_other_bits_are_on_the_line_through_log_kl(bits, factor):
    """Two bits have four times the KL of three: each half of a bit halves it."""
    found = at_equal_bits([0.48, 0.24, 0.36], bits, [(each.bits, each.kl) for each in (TWO, THREE)])
    assert found.relative[0] == pytest.approx(1.2 / factor - 1) and found.more == pytest.approx(bits - 2)
    fallen = at_equal_bits([0.48, 0.24, 0.36], bits, [(each.bits, each.kl) for each in (TWO, FOUR, THREE)])
    assert fallen.relative[0] == pytest.approx(found.relative[0])


@pytest.mark.parametrize(
    ("bits", "long_bits", "kl", "verdict"),
    [
        (2.0, 2.0, (0.38, 0.188, 0.285), BETTER),
        (2.0, 2.0, (0.42, 0.212, 0.315), WORSE),
        (2.0, 2.0, (0.38, 0.22, 0.30), CHANCE),
        (2.0, 2.0, (0.39, 0.15, 0.28), CHANCE),
        (2.5, 2.5, (0.38, 0.188, 0.285), WORSE),  # lower than with 2 bits, but half a bit more ought to halve it
        (2.5, 2.5, (0.19, 0.095, 0.143), BETTER),
        (2.5, 2.0, (0.38, 0.188, 0.285), "worse in short contexts, better in long contexts"),
        (2.3, 2.0, (0.26, 0.14, 0.19), "better in long contexts"),
        (1.9, 1.9, (0.38, 0.188, 0.285), BETTER),
        (1.9, 1.9, (0.42, 0.212, 0.315), SAVES),  # a tenth of a bit less ought to raise it by 15 %
        (1.9, 2.0, (0.42, 0.212, 0.315), "saves bits in short contexts, worse in long contexts"),
        (1.99, 1.99, (0.42, 0.212, 0.315), WORSE),
        (3.5, 3.5, (0.06, 0.031, 0.045), WORSE),  # lower than with 3 bits
    ],
)
def test_verdicts_count_bits(bits, long_bits, kl, verdict):
    assert effect(measured("x=1", bits, *kl, long_bits=long_bits), [TWO, THREE]).verdict == verdict


def write_sweep(name, root, bits, kl):
    """A sweep's result as if it had been run, of the rows that `kl` names: KL of its windows by row."""
    entry = target(name)
    methods, windows = {}, {}
    for row, text in entry.rows(REFERENCE).items():
        if row in kl:
            methods[row] = {
                "results": {"perplexity": {"perplexity,none": 9.0, "kl,none": sum(kl[row]) / len(kl[row])}},
                "cache": {"perplexity-64": {"measured_bits": bits[row], "tokens": 63}},
                "config": {
                    "method": to_config(build_parsed(text)),
                    "model_args": {"fingerprint": SHAPE, "dtype": "float16"},
                    "settings": {"seqlens": [64]},
                },
            }
            windows[row] = {"perplexity-64 KL": kl[row], "perplexity-64 loss": kl[row]}
    folder = entry.folder(REFERENCE, root)
    write_json(entry.result(REFERENCE, root), {"methods": methods})
    write_json(folder / SCORES, windows)
    write_json(folder / RECORD, current_record(entry, REFERENCE))


def test_a_sweep_is_read_from_its_files(tmp_path):
    assert load_sweep(target("settings-kivi"), REFERENCE, tmp_path) is None
    kl = {"2 bits": [0.4, 0.2], "3 bits": [0.1, 0.05], "sinks=8": [0.36, 0.18], "group=16": [0.38, 0.21]}
    write_sweep("settings-kivi", tmp_path, dict.fromkeys(kl, 2.0) | {"3 bits": 3.0}, kl)
    found = load_sweep(target("settings-kivi"), REFERENCE, tmp_path)
    assert found is not None and found.method == "kivi" and found.default.change == "2 bits"
    assert [each.measured.change for each in found.effects] == ["group=16", "sinks=8"]
    assert found.effect("sinks=8").measured.kl == [0.36, 0.18] and found.effect("sinks=4") is None
    assert "sinks=4" in found.missing and found.tokens == 64
    # 32,768 tokens: sinks take 16 bits, the rest of keys and values 2 bits and 16 + 16 per group of 32.
    assert found.default.long_bits == pytest.approx(3, abs=0.1)
    assert found.effect("group=16").measured.long_bits == pytest.approx(4, abs=0.1)


@pytest.mark.parametrize(
    ("changed", "counts"),
    [
        ({"kvq": "0"}, True),
        ({"command": ["kvq", "eval"]}, False),
        ({"model": "x"}, False),
        ({"finished": False}, False),
    ],
)
def test_a_sweep_counts_if_its_command_and_model_are_current(tmp_path, changed, counts):
    """As all other results do, also of an earlier version of kvq."""
    entry, kl = target("settings-kivi"), {"2 bits": [0.4, 0.2], "3 bits": [0.1, 0.05]}
    write_sweep(entry.id, tmp_path, {"2 bits": 2.0, "3 bits": 3.0}, kl)
    write_json(entry.folder(REFERENCE, tmp_path) / RECORD, {**current_record(entry, REFERENCE), **changed})
    assert (load_sweep(entry, REFERENCE, tmp_path) is not None) is counts


def test_measured_settings_are_printed_beside_the_reason_of_a_claim_that_fails(tmp_path):
    """In the claim's own target symmetric groups are better than hybrid ones; the sweep says whether by chance."""
    entry = target("perplexity-innerq-modes")
    methods = {
        row: {
            "results": {"perplexity": {"perplexity,none": 9.0, "kl,none": 0.2 if "Hybrid" in row else 0.1}},
            "higher_is_better": {"perplexity": {"perplexity": False, "kl": False}},
            "cache": {},
            "config": {"method": to_config(build_parsed(text))},
        }
        for row, text in entry.rows(REFERENCE).items()
    }
    write_json(entry.result(REFERENCE, tmp_path), {"methods": methods})
    write_json(entry.folder(REFERENCE, tmp_path) / RECORD, current_record(entry, REFERENCE))
    assert "*Measured* ([SETTINGS.md]" not in "".join(pages([REFERENCE], tmp_path).values())
    kl = {"2 bits": [0.4, 0.2, 0.3], "3 bits": [0.1, 0.05, 0.1], "mode=symmetric": [0.36, 0.18, 0.27]}
    write_sweep("settings-innerq", tmp_path, dict.fromkeys(kl, 2.0) | {"3 bits": 3.0}, kl)
    sections = pages([REFERENCE], tmp_path)["reproduction/innerq.md"].split("<summary>")
    (section,) = (section for section in sections if "Choosing the mode per group" in section.splitlines()[0])
    assert "mode=asymmetric" not in section
    expected = "KL 0.27 with 2 bits, 0.3 with 2 by default (better: -10 %, 95 %: -10 to -10)"
    assert f"innerq `mode=symmetric`: {expected}" in section


def test_claims_name_measured_settings():
    for claim in claims():
        for name, changes in claim.tried.items():
            assert set(changes) <= set(target(name).rows(SMOLLM2)), (claim.source, name)


@pytest.mark.parametrize("entry", SWEEPS, ids=lambda entry: entry.id)
def test_settings_change_the_defaults(entry):
    """Each row differs from the default at the same bits, in the options that it names alone."""
    rows = {row: to_config(build_parsed(text)) for row, text in entry.rows(SMOLLM2).items()}
    default, *_ = rows.values()
    for row, config in rows.items():
        changed = {key for key in config if config[key] != default[key]}
        named = {"bits"} if "=" not in row else {pair.split("=")[0] for pair in row.split(":")}
        assert changed == (named if config != default else set()), row
    assert entry.id.removesuffix("-calibration") == f"settings-{default['name']}"


def test_every_method_with_options_is_swept():
    # `mixed` has the options of the methods that it names.
    assert {entry.sweep["method"] for entry in SWEEPS} == set(method_names()) - {"fp16", "mixed"}


def test_a_wrong_setting_is_refused():
    entry = replace(target("settings-kivi"), sweep={"method": "kivi", "bits": [2], "changes": ["nonsense=1"]})
    with pytest.raises(UsageError, match="no option 'nonsense'"):
        entry.calibrated(SMOLLM2)
