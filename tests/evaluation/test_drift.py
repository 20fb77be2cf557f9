"""Divergence over a long answer, against answers and cache steps computed token by token."""

from hashlib import sha256

import pytest
import torch

from kvq_cli.attention.attach import attach
from kvq_cli.data.texts import never_drawn, sampled_windows, token_windows
from kvq_cli.errors import UsageError
from kvq_cli.evaluation.compared_methods import compared_methods
from kvq_cli.evaluation.drift import PARTS, DriftEvaluation
from kvq_cli.evaluation.runner import evaluate
from kvq_cli.evaluation.settings import EvaluationSettings, build_evaluations
from kvq_cli.evaluation.tabulate import tabulate
from kvq_cli.methods.registry import build
from kvq_cli.reference import prose

PROMPT, ANSWER = 40, 90
METHODS = (build("fp16"), build("kivi", bits=4, residual=32), build("kivi", bits=2, residual=32))


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return token_windows(tokenizer, prose("evaluation")[:4000], PROMPT)[:2]


@pytest.fixture(scope="module")
def evaluation(prompts):
    return DriftEvaluation(prompts, "test", ANSWER, "compressed", seed=3)


@pytest.fixture(scope="module")
def records(loaded, evaluation):
    """Records of two prompts, by the method's label."""
    found = {}
    for method in METHODS:
        with attach(loaded.model, method, prefill="compressed") as attached:
            some = [one for _, each in evaluation.run(loaded, {"": attached}, {"": [0, 1]}) for one in each]
        found[compared_methods([method])[0].label] = some
    return found


def greedy(loaded, prompt, past_key_values=None):
    """Continue a prompt `[tokens]` greedily, token by token."""
    ids, new = prompt[None], prompt[None]
    for _ in range(ANSWER):
        with torch.no_grad():
            out = loaded.model(new, past_key_values=past_key_values, use_cache=True)
        past_key_values, logits = out.past_key_values, out.logits[0, -1].float()
        logits[never_drawn(loaded.model)] = -torch.inf
        new = logits.argmax().view(1, 1)
        ids = torch.cat([ids, new], 1)
    return ids[0, len(prompt) :]


def test_the_uncompressed_cache_does_not_drift(records, evaluation):
    metrics = evaluation.metrics(records["fp16"])
    assert metrics["kl,none"] == pytest.approx(0, abs=1e-6)
    assert metrics["top1,none"] == 1.0 and metrics["agreement,none"] == ANSWER
    assert [sum(part["tokens"] for part in one["parts"]) for one in records["fp16"]] == [ANSWER] * 2


def test_parts_of_the_answer_add_up_and_grow_with_fewer_bits(records, evaluation):
    found = {label: evaluation.metrics(some) for label, some in records.items()}
    assert found["kivi-2bit"]["kl,none"] > 2 * found["kivi-4bit"]["kl,none"] > 0
    for label, some in records.items():
        assert [len(one["parts"]) for one in some] == [PARTS] * 2
        parts = [one["parts"] for one in some]
        mean = sum(part["kl"] for each in parts for part in each) / (2 * ANSWER)
        assert found[label]["kl,none"] == pytest.approx(mean, abs=1e-12)


@pytest.mark.parametrize("method", METHODS[1:], ids=["4 bits", "2 bits"])
def test_agreement_is_that_of_answers_decoded_token_by_token(loaded, prompts, records, method):
    label = compared_methods([method])[0].label
    for prompt, record in zip(prompts, records[label], strict=True):
        plain = greedy(loaded, prompt)
        with attach(loaded.model, method, prefill="compressed") as attached:
            # As in scoring: the prompt's last token is decoded, too.
            cache = attached.new_cache(PROMPT + ANSWER)
            with torch.no_grad():
                loaded.model(prompt[None, :-1], past_key_values=cache)
            answer, new = [], prompt[None, -1:]
            for _ in range(ANSWER):
                with torch.no_grad():
                    logits = loaded.model(new, past_key_values=cache).logits[0, -1].float()
                logits[never_drawn(loaded.model)] = -torch.inf
                new = logits.argmax().view(1, 1)
                answer.append(int(new))
        differ = [index for index, token in enumerate(answer) if token != plain[index]]
        assert record["agreement"] == (differ[0] if differ else ANSWER)


def test_answers_depend_on_the_seed_and_the_prompt_alone(records, prompts, loaded, evaluation):
    answers = {label: [one["answer_sha256"] for one in some] for label, some in records.items()}
    assert len({tuple(each) for each in answers.values()}) == 1 and len(set(answers["fp16"])) == 2
    sampled, *_ = evaluation._continued(loaded, 1)
    assert sha256(sampled.numpy().tobytes()).hexdigest() == answers["fp16"][1]
    other, *_ = DriftEvaluation(prompts, "test", ANSWER, "compressed", seed=4)._continued(loaded, 1)
    assert not torch.equal(sampled, other) and torch.equal(sampled[:PROMPT], other[:PROMPT])


def test_a_run_has_the_columns_of_drift(loaded, tmp_path):
    settings = EvaluationSettings(("drift",), samples=2, seqlens=[64], seed=1)
    document = evaluate(loaded, compared_methods(METHODS[:2]), settings, tmp_path)
    results = document["methods"]["kivi-4bit"]["results"]["drift"]
    assert {f"kl_{part},none" for part in range(1, PARTS + 1)} < set(results)
    titles = tabulate(document["methods"]).titles
    drift = ["drift KL", "drift KL first eighth", "drift KL last eighth", "drift top-1", "greedy tokens alike"]
    assert titles[1:6] == drift


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seqlens": [16], "prompt_tokens": 10}, "an answer of 8 tokens"),
        ({"datasets": ("self",)}, "prompts of a text"),
        ({"seqlens": [10**9]}, "context length"),
    ],
)
def test_settings_that_cannot_work_are_refused(loaded, settings, message):
    with pytest.raises(UsageError, match=message):
        build_evaluations(EvaluationSettings(("drift",), **settings), loaded, lambda *_: lambda count: None)


def test_windows_sampled_from_the_model_are_as_before(loaded):
    """Artifacts calibrated on the model's own text keep their samples."""
    windows = sampled_windows(loaded.model, loaded.tokenizer, 24, 3, 5)
    assert windows.shape == (3, 24) and not torch.isin(windows[:, 1:], torch.tensor(never_drawn(loaded.model))).any()
    assert torch.equal(windows, sampled_windows(loaded.model, loaded.tokenizer, 24, 3, 5))
