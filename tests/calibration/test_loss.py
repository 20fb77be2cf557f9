"""The gradient at the decoder's output against that of all logits at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers
from model_matrix import FAMILIES, tiny_model
from tiers import slow

from kvq_cli.attention.capture_points import decoder_of
from kvq_cli.calibration import loss

#: Scaled logits, soft-capped logits, an output layer without bias, one with a decoder inside of the decoder.
FIRST = ("cohere", "gemma2", "granite", "gpt2", "opt")


def known(families):
    return [name for name in families if name in transformers.CONFIG_MAPPING]


@pytest.mark.parametrize("family", [*known(FIRST), *slow(*(f for f in known(FAMILIES) if f not in FIRST))])
def test_gradient_equals_that_of_all_logits_at_once(family, monkeypatch):
    monkeypatch.setattr(loss, "TOKENS", 5)
    torch.manual_seed(0)
    model = tiny_model(family).eval().requires_grad_(False)
    ids = torch.randint(4, 30, (1, 13))
    decoder = decoder_of(model)
    names = {id(module): name for name, module in model.named_modules()}
    output = decoder(input_ids=ids, use_cache=False)
    found = loss.hidden_gradient(model, output, ids)
    assert names == {id(module): name for name, module in model.named_modules()}  # the model is as before

    hidden = []

    def track(_module, _args, kept):
        kept.last_hidden_state.requires_grad_().retain_grad()
        hidden.append(kept.last_hidden_state)

    hook = decoder.register_forward_hook(track)
    logits = model(input_ids=ids, use_cache=False).logits[0]
    hook.remove()
    F.cross_entropy(logits[:-1].float(), ids[0, 1:], reduction="sum").backward()
    assert found.abs().max() > 1e-4
    torch.testing.assert_close(found, hidden[0].grad, rtol=1e-4, atol=1e-6)
