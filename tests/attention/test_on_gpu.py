"""On a GPU, kernels and CUDA graphs decode the built-in model as PyTorch's attention does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvq_cli.artifact import load_artifact
from kvq_cli.attention.attach import attach
from kvq_cli.methods.registry import build
from kvq_cli.models import load_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU"),
]

ROOT = Path(__file__).parents[2]
PROMPT, STEPS = 150, 9  # KIVI packs keys beyond its residual window of 128 tokens
METHODS = {
    "fp16": {},
    "kivi": {"bits": 2, "sinks": 4, "recent": 32},
    "squat": {"bits": 2},
    "innerq": {"bits": 2},
}
ARTIFACTS = ["temporalkv-2bit", "channelkv-2bit", "kvquant-2bit", "xquant"]


@pytest.fixture(scope="module")
def model():
    return load_model("reference", "cuda", "float32").model


@pytest.fixture(scope="module")
def ids(model):
    noise = torch.Generator().manual_seed(0)
    return torch.randint(3, model.config.vocab_size, (1, PROMPT), generator=noise).cuda()


@torch.no_grad()
def decoded(model, chosen, ids, tokens=None, backend="triton") -> tuple[torch.Tensor, torch.Tensor, str]:
    """Logits of `STEPS` tokens after a prompt (`tokens`, or greedy ones), these tokens, and which backend computed."""
    logits = []
    with attach(model, chosen, backend=backend) as kv:
        cache = kv.new_cache(PROMPT + STEPS)
        following = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        taken = [following]
        for step in range(STEPS):
            step_ids = taken[-1] if tokens is None else tokens[:, step : step + 1]
            logits.append(model(input_ids=step_ids, past_key_values=cache).logits[:, -1:].float())
            taken.append(logits[-1].argmax(-1))
        assert cache.report().compressed > 0 or chosen.name == "fp16"
        return torch.cat(logits, dim=1), torch.cat(taken, dim=1), kv.report().backend


@pytest.mark.parametrize("name", [*METHODS, *ARTIFACTS])
def test_logits_equal_those_of_pytorch_attention(model, ids, name):
    chosen = build(name, **METHODS[name]) if name in METHODS else load_artifact(ROOT / "artifacts/reference" / name)
    expected, tokens, backend = decoded(model, chosen, ids, backend="torch")
    assert backend == "torch"
    logits, _, backend = decoded(model, chosen, ids, tokens)
    assert backend == "triton, steps as CUDA graphs"
    largest = expected.abs().max()
    assert (logits - expected).abs().max() <= 2e-4 * largest
