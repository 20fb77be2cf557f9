"""Blocked attention and its gradients against PyTorch's, also with the products of slow CPUs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvq_cli.calibration import blocked_attention


def inputs(tokens, dtype, heads=6, kv_heads=2, head_dim=16):
    noise = torch.Generator().manual_seed(tokens)
    shapes = [(2, heads, tokens, head_dim), (2, kv_heads, tokens, head_dim), (2, kv_heads, tokens, head_dim)]
    return [(2 * torch.randn(shape, generator=noise)).to(dtype).requires_grad_() for shape in shapes]


def results(function, tensors, weights):
    """The output `[batch, heads, tokens, head_dim]` and the gradients of its weighted sum."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = function(*leaves)
    (out * weights).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def blocked(scale=None):
    return lambda q, k, v: blocked_attention.attention(torch.nn.Module(), q, k, v, scaling=scale)[0].transpose(1, 2)


def plain(scale=None):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


@pytest.mark.parametrize("tokens", [1, 7, 127, 128, 129, 300])
@pytest.mark.parametrize("scale", [None, 0.4])
def test_output_and_gradients_equal_pytorchs(tokens, scale):
    tensors = inputs(tokens, torch.float64)
    weights = torch.randn(tensors[0].shape, dtype=torch.float64)
    for found, expected in zip(
        results(blocked(scale), tensors, weights), results(plain(scale), tensors, weights), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_float16_is_computed_in_float32_where_the_cpu_has_no_instructions(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", "avx512_f": True})
    tensors = inputs(200, torch.float16)
    weights = torch.randn(tensors[0].shape).half().float()  # the gradient that arrives is in 16 bits
    wide = results(plain(), [tensor.float() for tensor in tensors], weights)
    for found, expected in zip(results(blocked(), tensors, weights), wide, strict=True):
        assert found.dtype == torch.float16
        torch.testing.assert_close(found.float(), expected, rtol=2e-3, atol=2e-3)


def test_gradients_of_float16_are_multiplied_in_bfloat16_where_the_cpu_has_its_instructions_alone(monkeypatch):
    tensors, found = inputs(300, torch.float16), {}
    weights = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(0)).half()
    for extra in ("avx512_f", "avx512_bf16"):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda x=extra: {"architecture": "x86_64", x: True})
        found[extra] = results(blocked(), tensors, weights)
    exact, rounded = found.values()
    assert torch.equal(exact[0], rounded[0])
    for one, other in zip(exact[1:], rounded[1:], strict=True):
        assert other.dtype == torch.float16
        assert 2e-4 < (one.float() - other.float()).norm() / one.float().norm() < 5e-3


def test_sinks_take_weight():
    """A score of each query head that no token has."""
    tensors, sinks = inputs(140, torch.float64), torch.linspace(-1, 3, 6, dtype=torch.float64)
    weights = torch.randn(tensors[0].shape, dtype=torch.float64)

    def blocked_with_sinks(q, k, v):
        return blocked_attention.attention(torch.nn.Module(), q, k, v, s_aux=sinks)[0].transpose(1, 2)

    def plain_with_sinks(q, k, v):
        k, v = (x.repeat_interleave(3, dim=1) for x in (k, v))
        scores = (q @ k.mT / 4).masked_fill(torch.ones(140, 140).triu(1).bool(), -torch.inf)
        return torch.cat([scores, sinks.view(1, 6, 1, 1).expand(2, 6, 140, 1)], dim=3).softmax(3)[..., :-1] @ v

    both = (results(function, tensors, weights) for function in (blocked_with_sinks, plain_with_sinks))
    for found, expected in zip(*both, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_a_repeated_layer_takes_the_outputs_of_its_first_pass():
    """In their order; the values do not give them again, and all gradients are the same bits."""
    tensors, other = inputs(150, torch.float32), inputs(40, torch.float32)
    weights, few = (torch.randn(each[0].shape) for each in (tensors, other))
    first, second = blocked_attention.output_contexts()
    with first:
        once, after = results(blocked(), tensors, weights), results(blocked(), other, few)
    with second:
        again = results(blocked(), [*tensors[:2], torch.full_like(tensors[2], torch.nan)], weights)
        assert all(torch.equal(a, b) for a, b in zip(results(blocked(), other, few), after, strict=True))
        assert results(blocked(), [*other[:2], torch.full_like(other[2], torch.nan)], few)[0].isnan().all()
    assert torch.equal(again[0], once[0]) and torch.equal(again[3], once[3])
