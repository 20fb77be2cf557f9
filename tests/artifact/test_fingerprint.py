"""What tells models apart: the fingerprint of keys and values, the digest of all weights."""

from __future__ import annotations

import pytest
import torch
from random_artifacts import tiny_model

from kvq_cli import attach, build
from kvq_cli.artifact import fingerprint
from kvq_cli.artifact.fingerprint import weights_digest


def projections(model) -> dict[str, torch.nn.Parameter]:
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[0].mlp
    return {"query": attention.q_proj.weight, "mlp": mlp.down_proj.weight, "norm": model.model.norm.weight}


@pytest.mark.parametrize("name", ["query", "mlp", "norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_bit_of_any_weight_changes_the_digest_alone(name, dtype):
    model = tiny_model().to(dtype)
    before = fingerprint(model), weights_digest(model)
    weight = projections(model)[name].data.view(-1).view(torch.int16)
    weight[-3] ^= 1
    assert fingerprint(model) == before[0]
    assert weights_digest(model) != before[1]
    weight[-3] ^= 1
    assert weights_digest(model) == before[1]


def test_exchanged_numbers_change_the_digest():
    model = tiny_model()
    before, weight = weights_digest(model), projections(model)["mlp"].data
    weight[0, 0], weight[0, 1] = weight[0, 1].clone(), weight[0, 0].clone()  # the sum of the row is the same
    assert weights_digest(model) != before


def test_configuration_is_part_of_the_digest():
    model = tiny_model()
    before = weights_digest(model)
    model.config.update({"rms_norm_eps": 1e-3})
    assert weights_digest(model) != before


def test_use_of_the_model_leaves_the_digest(tmp_path):
    model = tiny_model()
    before = weights_digest(model)
    with attach(model, build("kivi", bits=2, group=8)) as kv:
        model.generate(torch.tensor([[1, 2, 3]]), past_key_values=kv.new_cache(), max_new_tokens=2)
        assert weights_digest(model) == before
    model.save_pretrained(tmp_path)
    assert weights_digest(type(model).from_pretrained(tmp_path)) == before
