"""KVTC: what it plans, counts and refuses."""

from dataclasses import replace

import pytest
import torch
from method_cases import ready
from random_artifacts import tiny_model

from kvq_cli import attach
from kvq_cli.benchmarking.accounting import account, artifact_specs
from kvq_cli.benchmarking.capacity import serving_layout
from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build
from kvq_cli.vllm.checks import check_plans


@pytest.mark.parametrize("bits", [0.5, 1, 2, 3, 4, 8, 16])
def test_plans_use_the_budget_up(shape_of, bits):
    shape = shape_of(layers=8)
    report = account(build("kvtc", bits=bits), shape, 1000)
    numbers = shape.layers * shape.kv_heads * shape.head_dim
    assert 0 <= bits - report.packed_bits < 64 / numbers  # not enough for a group of 16 components with 2 bits
    assert report.parts["sinks"] == 4 * 16 * shape.layers * shape.kv_heads * shape.head_dim // 4  # 16 bits, twice


def test_what_does_not_fit_is_refused(shape_of):
    shape = shape_of()
    with pytest.raises(UsageError, match="kvtc needs an artifact"):
        build("kvtc").plan(0, shape, {})
    with pytest.raises(UsageError, match="local=16bit takes layers out of the transform"):
        build("kvtc", local="16bit").keeps_local(replace(shape, windows=(None, 8)))
    assert not build("kvtc").keeps_local(replace(shape, windows=(None, 8)))
    with pytest.raises(UsageError, match="recent=0 must be at least 1"):
        build("kvtc", recent=0)
    method = build("kvtc")
    plans = [method.plan(layer, shape, artifact_specs(method, shape, layer)) for layer in range(shape.layers)]
    with pytest.raises(UsageError, match="kvtc cannot be served: its codes are of all layers together"):
        check_plans(method, plans)
    for ranks in (1, 2):
        with pytest.raises(UsageError, match="kvtc cannot be served"):
            serving_layout(method, shape, ranks)
    with pytest.raises(UsageError, match="'?kvtc'? cannot serve a single stream"):
        build("mixed", keys="kvtc-2bit", values="fp16").calibration(shape)


@torch.no_grad()
def test_layers_with_a_sliding_window_keep_all_tokens():
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    model = MistralForCausalLM(MistralConfig(**sizes, **heads, sliding_window=16)).eval().requires_grad_(False)
    ids = torch.randint(3, 40, (1, 60), generator=torch.Generator().manual_seed(1))
    with attach(model, ready("kvtc", {"bits": 4, "recent": 8}, model)) as kv:
        cache = kv.new_cache()
        model(ids[:, :50], past_key_values=cache)
        for i in range(50, 60):
            model(ids[:, i : i + 1], past_key_values=cache)
        assert all(layer.dropped == 0 for layer in cache.compressed)
        assert kv.report(cache).beyond_window > 0


def test_codes_of_a_model_are_read_by_pytorch():
    model = tiny_model()
    with attach(model, ready("kvtc", {"bits": 4}, model)) as kv:
        assert "torch" in kv.backend.summary
