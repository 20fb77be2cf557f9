"""Captured keys and values against the model's cache and the slope of its loss."""

import pytest
import torch

from kvq_cli.errors import UsageError
from kvq_cli.models import load_model
from kvq_cli.papers.studies.activations import captured, spread, temporary_store


@pytest.fixture(scope="module")
def loaded():
    return load_model(dtype="float32")


def test_rotated_keys_and_values_equal_the_models_cache(loaded):
    windows = torch.randint(5, 4000, (2, 24), generator=torch.Generator().manual_seed(0))
    shown = []
    with torch.no_grad():
        cache = loaded.model(windows, use_cache=True).past_key_values
    with captured(loaded, windows, lambda *words: shown.append(words), layers=[1, 6]) as activations:
        assert activations.layers == [1, 6]
        for layer in activations.layers:
            keys, values = (activations.x(layer, kind).transpose(1, 2) for kind in "kv")
            assert keys.shape == (2, loaded.shape.kv_heads, 24, loaded.shape.head_dim)
            turned = activations.sites[layer].rotation.at(keys, 0)
            torch.testing.assert_close(turned, cache.layers[layer].keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(values, cache.layers[layer].values, atol=1e-4, rtol=1e-4)
    assert shown == [("capture", done, 2) for done in range(3)]


def test_gradients_equal_the_slope_of_the_loss(loaded):
    tokens = torch.randint(5, 4000, (1, 12), generator=torch.Generator().manual_seed(1))
    layer, skip = 4, 3
    with captured(loaded, tokens, lambda *_: None, gradients=True, skip=skip) as activations:
        gradient = activations.g(layer, "v")[0].flatten(1)
        tap = activations.sites[layer].value
    assert gradient.shape[0] == 12 - skip

    def loss(step):
        def moved(_module, _args, output):
            output = output.clone()
            output[:, skip:] += step * gradient / gradient.norm()
            return output

        handle = tap.module.register_forward_hook(moved)
        logits = loaded.model(tokens).logits[0, :-1]
        handle.remove()
        return torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum").item()

    with torch.no_grad():
        slope = (loss(1e-2) - loss(-1e-2)) / 2e-2
    assert slope == pytest.approx(gradient.norm().item(), rel=0.02)


@pytest.mark.parametrize("skip", [-1, 12])
def test_windows_must_have_tokens_after_the_first(loaded, skip):
    with pytest.raises(UsageError, match=f"skip={skip}"), captured(loaded, torch.zeros(1, 12), print, skip=skip):
        pass


def test_a_store_returns_the_appended_tensors():
    numbers = torch.randn(3, 5, 2).to(torch.bfloat16)
    with temporary_store() as store:
        for window in numbers:
            store.append("a", window)
        store.read("a").zero_()  # a private map: the file stays as it was
        assert torch.equal(store.read("a"), numbers)
        with pytest.raises(ValueError, match="a: "):
            store.append("a", numbers[0].float())


def test_layers_are_evenly_spread():
    assert spread(32, 5) == [0, 8, 16, 23, 31]
    assert spread(8, 1) == [4]
    assert spread(3, 5) == [0, 1, 2]
