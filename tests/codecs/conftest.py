"""Prompts for prompt codecs: random numbers, and a layer of the built-in model on text."""

from __future__ import annotations

import pytest
import torch

from kvq_cli import attach
from kvq_cli.codecs.base import Codec, Prompt, PromptCodec, State
from kvq_cli.codecs.identity import IdentityCodec
from kvq_cli.codecs.layout import Layout
from kvq_cli.methods.base import LayerPlan, Method, StreamPlan
from kvq_cli.methods.window import Window
from kvq_cli.models import load_model
from kvq_cli.reference import prose

TOKENS = 256


class _Recorder(PromptCodec):
    """Records the prompt that it is fit to."""

    nominal_bits = 16.0
    seen: Prompt | None = None

    def layout(self, heads: int, dim: int, dtype: str, tokens: int) -> Layout:
        return IdentityCodec().layout(heads, dim, dtype)

    def fit(self, prompt: Prompt) -> State:
        self.seen = prompt
        return {}

    def with_state(self, state: State, saliency: torch.Tensor | None = None) -> Codec:
        return IdentityCodec()


def _captured() -> Prompt:
    loaded, recorder = load_model("reference", device="cpu", dtype="float32"), _Recorder()

    class Recording(Method):
        name = "recording"
        nominal_bits = 16.0

        def plan(self, layer, shape, tensors) -> LayerPlan:
            keys = recorder if layer == 3 else IdentityCodec()
            return LayerPlan(StreamPlan("post_rope", keys, Window()), StreamPlan("value", IdentityCodec(), Window()))

    ids = loaded.tokenizer(prose("calibration")[:9000], return_tensors="pt").input_ids[:, 64 : 64 + 2 * TOKENS]
    with torch.no_grad(), attach(loaded.model, Recording()) as kv:
        loaded.model(ids.view(2, TOKENS), past_key_values=kv.new_cache())
    return recorder.seen


@pytest.fixture(scope="session")
def prompts() -> dict[str, Prompt]:
    """Two rows, 256 tokens, two query heads for each of two kv heads or as many as the model has; head_dim 64."""
    noise = torch.Generator().manual_seed(0)
    keys, values, queries = (torch.randn(2, heads, TOKENS, 64, generator=noise) for heads in (2, 2, 4))
    mixed = torch.randn(64, 64, generator=noise) / 8
    return {"random": Prompt(keys + 1, values @ mixed * 3, queries), "captured": _captured()}
