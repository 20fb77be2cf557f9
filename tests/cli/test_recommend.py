"""`kvq recommend` on the built-in model: what fits, measured, and lines that run as they are printed."""

import json
import re

import pytest
from tiers import slow
from transformers import GptOssConfig

from kvq_cli.benchmarking.capacity import capacity
from kvq_cli.cli import recommend as command
from kvq_cli.cli.sizes import model_size
from kvq_cli.methods.registry import build
from kvq_cli.models import load_model, model_config
from kvq_cli.tuning import recommend
from kvq_cli.tuning.recommend import EQUAL_KL, Measured, Need, best, candidates, is_served, reason

SIZE = model_size(None, "reference")
GB = 10**9
#: Bytes beside 2 GB of reserve into which 4 texts of 1,024 tokens fit at 4 bits, but not at 16 or 8.
TIGHT = round((SIZE.weights_bytes + 8_000_000) / GB + 2, 4)


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """A little text, in a folder without artifacts."""
    for module, name, value in (
        (command, "SAMPLES", 3),
        (command, "SEQLEN", 256),
        (recommend, "WINDOWS", 1),
        (recommend, "SEQLEN", 256),
        (recommend, "TIMED_TOKENS", 1),
        (recommend, "ROUNDS", 1),
    ):
        monkeypatch.setattr(module, name, value)
    monkeypatch.chdir(tmp_path)


def asked(memory: float, *words: object) -> tuple:
    return ("recommend", "--memory", f"{memory:.4f}GB", "--context", 1024, "--users", 4, *words)


@slow
def test_the_least_divergence_of_what_fits_is_recommended_and_resumed(kvq, quick, tmp_path):
    result = kvq(*asked(TIGHT, "--json"))
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    by_label = {row["label"]: row for row in found["methods"]}
    assert set(by_label) == {"klt-4bit", "innerq-4bit", "kivi-4bit"}
    least = min(row["kl"] for row in found["methods"])
    chosen = by_label[found["recommended"]]
    assert 0 < chosen["kl"] <= max(2 * least, EQUAL_KL) and chosen["capacity"]["fits"]
    assert found["reason"].startswith(f"Take {found['recommended']}: of what fits, it ")
    assert "calibrating klt-4bit on 3 windows" in result.stderr
    method = build("kivi", bits=4)
    own = capacity(method, SIZE.shape, SIZE.weights_bytes, SIZE.context, 1024, 4, round(TIGHT * GB) - 2 * GB)
    assert by_label["kivi-4bit"]["capacity"] == own.to_dict()
    artifact = tmp_path / "results/recommend/reference/klt-4bit-prose/tensors.safetensors"
    made = artifact.stat().st_mtime_ns
    again = kvq(*asked(TIGHT, "--json"))
    assert artifact.stat().st_mtime_ns == made and "perplexity-256: 3/3" in again.stderr.split("timing")[0]
    assert "calibrating" not in again.stderr
    scores = [[row[name] for name in ("label", "kl", "top1")] for row in found["methods"]]
    assert [[row[name] for name in ("label", "kl", "top1")] for row in json.loads(again.stdout)["methods"]] == scores


def test_printed_lines_run(kvq, quick):
    """The uncompressed cache fits: it is recommended, and the lines are for more."""
    result = kvq(*asked(3, "--no-calibrate"))
    assert result.exit_code == 0 and "left out: klt" in result.stderr and " fp16 " in result.stdout
    text, _, lines = result.stdout.partition("\nfrom kvq_cli import")
    says = "Compress nothing, since 4 texts of 1,024 tokens take 16.0 MiB in 16 bits; for more, take kivi-8bit, which "
    assert says in " ".join(text.split())
    python, _, server = f"from kvq_cli import{lines}".partition("\n\n")
    loaded = load_model("reference")
    names = {"model": loaded.model, "inputs": loaded.tokenizer("The old harbour", return_tensors="pt")}
    exec(python, names)
    assert names["output"].shape[1] > 3
    assert server.split() == ["kvq", "serve", "--model", "reference", "--method", "kivi", "--bits", "8"]


def test_what_does_not_fit_is_refused_with_what_would(fails):
    fails(*asked(2.001), code=2, says="so that no cache fits: raise --memory, lower")
    tiny = f"{SIZE.weights_bytes / GB + 2.0005:.6f}GB"
    fails("recommend", "--memory", tiny, "--context", 1024, "--users", 4, code=2, says="of it, --context ")
    fails("recommend", "--memory", "3GB", "--context", 10**6, code=2, says="the model takes texts of 4,096 tokens")


def test_of_each_ladder_the_most_bits_that_fit():
    def names(room: int) -> list[str]:
        need = Need(SIZE.shape, SIZE.weights_bytes, SIZE.context, SIZE.weights_bytes + room, 1024, 4)
        return [f"{one.method.name}-{one.method.nominal_bits:g}" for one in candidates(need)]

    assert names(10**9) == ["fp16-16", "klt-4", "innerq-4", "kivi-8"]
    assert names(8_000_000) == ["klt-4", "innerq-4", "kivi-4"]
    assert names(4_500_000) == ["klt-2.25"]


@pytest.mark.parametrize(
    ("rows", "label", "why"),
    [
        (
            [("a", 0.05, 0.01, 9), ("b", 0.06, 0.01, 5), ("c", 0.08, 0.01, 1)],
            "b",
            "0.0600 and 0.0500 .*, within their er",
        ),
        ([("a", 0.05, 0.001, 9), ("b", 0.06, 0.001, 5)], "a", "of what fits, it diverges least, 0.0500 nats per token"),
        (
            [("a", 0.001, 0.0, 9), ("b", 0.01, 0.0, 5), ("c", 0.02, 0.0, 1)],
            "b",
            "5.0 ms, a in 9.0 ms, .* both below 0.01",
        ),
        ([("a", 0.001, None, 5), ("b", 0.009, None, 9)], "a", "diverges least"),
    ],
)
def test_of_methods_that_diverge_alike_the_fastest_is_recommended(rows, label, why):
    own = capacity(build("fp16"), SIZE.shape, 1, 4096, 16, 1, GB)
    rows = [Measured(name, own, kl, error, 1.0, 0.0, ms, 1.0, True) for name, kl, error, ms in rows]
    need = Need(SIZE.shape, 1, 4096, GB, 16, 1)
    sentence = reason(best(rows), rows, need, None)
    assert sentence.startswith(f"Take {label}: ") and re.search(why, sentence) and sentence.count(". ") == 0


def test_served_as_the_server_sets_it():
    config = model_config("reference", False)
    assert is_served(build("innerq", bits=4), SIZE.shape, config)
    assert not is_served(build("gear"), SIZE.shape, config)
    assert not is_served(build("innerq", bits=4), SIZE.shape, GptOssConfig())
