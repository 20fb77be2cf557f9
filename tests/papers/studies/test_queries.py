"""Deviations from known subspaces, and errors of scores against loops over queries and keys."""

import json
from math import sqrt

import pytest
import torch
import transformers

from kvq_cli.errors import UsageError
from kvq_cli.models import LoadedModel, model_shape
from kvq_cli.papers.studies.activation_hooks import query_hooks
from kvq_cli.papers.studies.queries import METHODS, Queries, Scores, by_kv_head, deviations, directions
from kvq_cli.papers.studies.study import StudyInput


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_deviation_from_axes():
    query = torch.tensor([[[30.0, 40.0, 0.0], [0.0, 0.0, -2.0]]], dtype=torch.float64)
    found = deviations(query, torch.eye(3, dtype=torch.float64)[None])
    torch.testing.assert_close(found, torch.tensor([1, (0.8 + 1) / 2, (0 + 1) / 2, 0], dtype=torch.float64))


def test_queries_in_a_plane_do_not_deviate_from_it():
    queries = noise(2, 50, 2) @ noise(2, 2, 8)  # each kv head has a plane of its own
    found = deviations(queries, directions(queries))
    assert found[1] > 0.05 and found[2:].max() < 1e-6
    assert deviations(queries, directions(queries.flip(0)))[2] > 0.3


def test_directions_are_right_singular_vectors():
    queries = noise(3, 40, 6)
    expected = torch.linalg.svd(queries).Vh.mT
    dots = (directions(queries) * expected).sum(-2).abs()
    torch.testing.assert_close(dots, torch.ones_like(dots))


def test_queries_are_grouped_by_kv_head():
    queries = noise(1, 6, 5, 4)
    grouped = by_kv_head(queries, 2)
    assert grouped.shape == (2, 15, 4)
    assert torch.equal(grouped[1, 5:10], queries[0, 4])


def test_moved_attention_of_known_scores():
    exact, quantized = torch.zeros(1, 2, 3), torch.tensor([[[9.0, 9.0, 9.0], [100.0, 0.0, 0.0]]])
    hidden = torch.tensor([[False, False, True], [False, False, False]])
    scores = Scores(1.0, torch.tensor([0, 1]), hidden)
    assert scores.moved(exact, quantized) == pytest.approx((0 + 2 / 3) / 2)  # the first query sees nothing quantized
    assert scores.error(exact, quantized) == pytest.approx(100)


def mistral() -> LoadedModel:
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=97, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, sliding_window=30, max_position_embeddings=512,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
    return LoadedModel(model, None, "mistral", None, model_shape(model))


def two_bit(keys: torch.Tensor) -> torch.Tensor:
    """KIVI's keys `[tokens, channels]` of one group, 16-bit scale and zero."""
    low, high = keys.amin(0), keys.amax(0)
    zero, scale = low.half().float(), ((high - low) / 3).half().float()
    return ((keys - zero) / scale).round().clamp(0, 3) * scale + zero


@pytest.mark.parametrize("pre_rope", [True, False])
def test_score_errors_against_a_loop(monkeypatch, pre_rope):
    """Of both layers of a model with grouped heads and a sliding window."""
    group, prompt, total = 8, 40, 53
    loaded, ids = mistral(), torch.randint(0, 97, (9, total), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(StudyInput, "tokens", lambda self, dataset, split: ids[: self.samples])
    study = Queries(response=total - prompt, group=group, pre_rope=pre_rope, rank=3)
    numbers = study.run(StudyInput(loaded, "none", 1, total, 5), lambda *_: None).numbers

    torch.manual_seed(5)
    sequence = loaded.model.generate(
        ids[:1, :prompt], attention_mask=torch.ones(1, prompt), do_sample=True, top_k=0,
        min_new_tokens=total - prompt, max_new_tokens=total - prompt,
    )[0]  # fmt: skip
    seen, turned = {}, {}
    for where, before in ((seen, pre_rope), (turned, False)):
        with query_hooks(loaded.model, before) as watch:
            watch(sequence, lambda layer, prompt, where=where: where.setdefault(layer, prompt))
    for layer in range(2):
        errors, moved = [], []
        rotation = _rotation(loaded.model, layer) if pre_rope else None
        for head in range(4):
            keys, query = seen[layer].keys[0, head // 2], seen[layer].queries[0, head]
            rough = torch.cat([two_bit(part) if len(part) == group else part for part in keys.split(group)])
            real_keys, real_query = turned[layer].keys[0, head // 2], turned[layer].queries[0, head]
            real_rough = rough if rotation is None else rotation.at(rough, 0)
            for t in range(prompt, total):
                first, packed = max(0, t - 29), (t + 1) // group * group
                errors += [
                    abs(query[t] @ (keys[j] - rough[j])).item() / sqrt(32) for j in range(first, min(packed, t + 1))
                ]
                exact = [real_query[t] @ real_keys[j] / sqrt(32) for j in range(first, t + 1)]
                mixed = [
                    real_query[t] @ (real_rough if j < packed else real_keys)[j] / sqrt(32) for j in range(first, t + 1)
                ]
                change = torch.tensor(exact).softmax(0) - torch.tensor(mixed).softmax(0)
                moved.append(change.abs().sum().item() / 2)
        assert numbers["score_error"]["kivi"][layer] == pytest.approx(sum(errors) / len(errors), rel=1e-3)
        assert numbers["moved_attention"]["kivi"][layer] == pytest.approx(sum(moved) / len(moved), rel=1e-3)
        assert numbers["score_error"]["squat"][layer] != numbers["score_error"]["kivi"][layer]


def _rotation(model, layer: int):
    from kvq_cli.attention.capture_points import attention_layers

    return attention_layers(model)[layer].rotation


def test_squat_without_strength_equals_kivi(kvq, tmp_path):
    options = ["--samples", 1, "--seqlen", 96, "--set", "response=24", "--set", "strength=0"]
    result = kvq("analyze", "queries", *options, "--out", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "queries.json").read_text())
    assert [row[0] for row in document["rows"]] == [*range(8), "mean"]
    numbers = document["numbers"]
    for error in ("score_error", "moved_attention"):
        assert numbers[error][METHODS[0]] == numbers[error][METHODS[1]]
    for curves in numbers["deviation"].values():
        for curve in curves:
            assert curve[0] == 1 and curve[-1] == pytest.approx(0, abs=1e-6)
            assert curve == sorted(curve, reverse=True) and len(curve) == 65
    assert (tmp_path / "queries.png").stat().st_size > 5000


def test_a_window_without_room_for_a_prompt_is_refused(kvq, tmp_path):
    result = kvq("analyze", "queries", "--seqlen", 128, "--out", tmp_path)
    assert result.exit_code == 2 and "--seqlen 128 leaves 0 tokens" in result.stderr
    for option in ("response", "dimensions"):
        with pytest.raises(UsageError, match=f"{option}=0"):
            Queries(**{option: 0})
