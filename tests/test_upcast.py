"""Products of 16-bit matrices in float32: the values, the gradients, and where they apply."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kvq_cli import upcast

DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture
def slow_cpu(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", "avx512_f": True})


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(40, 24)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        if fail:
            raise KeyError("fail")
        y = self.linear(x)
        self.mode = torch.overrides._get_current_function_mode()
        return (y @ y.transpose(-1, -2)).softmax(-1) @ y


@pytest.mark.usefixtures("slow_cpu")
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_of_rows_give_the_same_product_and_gradient(dtype, monkeypatch):
    torch.manual_seed(0)
    model, x = Model().to(dtype), torch.randn(2, 9, 40, dtype=dtype)
    results = []
    for tile in (1 << 24, 3 * 40):  # all rows at once; 3 rows
        monkeypatch.setattr(upcast, "_MAX_TILE", tile)
        rows = x.clone().requires_grad_()
        with upcast.upcast_products(model):
            out = F.linear(rows, model.linear.weight, model.linear.bias)
        out.backward(torch.ones_like(out))
        results.append((out.detach(), rows.grad))
    torch.testing.assert_close(results[0], results[1], rtol=2e-3 if dtype == torch.float16 else 1e-2, atol=0)


@pytest.mark.usefixtures("slow_cpu")
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_float32_rounded_once(dtype):
    torch.manual_seed(0)
    model = Model().to(dtype)
    x, q = torch.randn(2, 9, 40, dtype=dtype), torch.randn(1, 2, 9, 8, dtype=dtype)
    with upcast.upcast_products(model):
        y = F.linear(x, model.linear.weight, bias=model.linear.bias)
        actual = [y, y @ y.mT, torch.matmul(y, y.mT), F.scaled_dot_product_attention(q, q, q, is_causal=True)]
        added = torch.addmm(model.linear.bias, x[0], model.linear.weight.T)  # GPT-2's layers
        assert F.scaled_dot_product_attention(query=q, key=q, value=q).dtype == F.linear(input=x, weight=x[0]).dtype
    assert torch.equal(added, (x[0].float() @ model.linear.weight.float().T + model.linear.bias.float()).to(dtype))
    wide = model.linear(torch.zeros(1, 40, dtype=dtype))  # outside of the context: PyTorch's own
    assert wide.dtype == dtype
    y = F.linear(x.float(), model.linear.weight.float(), model.linear.bias.float()).to(dtype)
    product, q = (y.float() @ y.float().mT).to(dtype), q.float()
    attended = F.scaled_dot_product_attention(q, q, q, is_causal=True).to(dtype)
    for one, other in zip(actual, [y, product, product, attended], strict=True):
        assert one.dtype == dtype and torch.equal(one, other)


@pytest.mark.usefixtures("slow_cpu")
@pytest.mark.parametrize("rows", [4, 8, 33])
@pytest.mark.parametrize("tile", [1 << 24, 80])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_weights_give_float32s_products(monkeypatch, rows, tile, bias):
    monkeypatch.setattr(upcast, "_MAX_TILE", tile)
    torch.manual_seed(0)
    monkeypatch.setattr(upcast, "_MIN_ROWS_PACKED", 16)
    linear, x = nn.Linear(40, 50, bias=bias).half().requires_grad_(False), torch.randn(rows, 2, 40).half()
    with torch.no_grad(), upcast.upcast_products(linear):
        y = linear(x.transpose(0, 1))
    exact = F.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None).transpose(0, 1)
    assert y.dtype == torch.half and torch.allclose(y.double(), exact, rtol=2**-11 + 2**-20, atol=2**-18)


@pytest.mark.usefixtures("slow_cpu")
def test_gradients_equal_those_of_float32():
    torch.manual_seed(0)
    model, gradients = Model(), []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(30, 40, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        with upcast.upcast_products(model.to(dtype)):
            model(x).square().sum().backward()
        gradients.append(x.grad.float())
    error = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
    assert 0 < error < 0.02


@pytest.mark.usefixtures("slow_cpu")
def test_gradients_of_float16_are_multiplied_in_bfloat16_where_the_cpu_has_its_instructions_alone(monkeypatch):
    torch.manual_seed(0)
    linear, gradients = nn.Linear(40, 50).half().requires_grad_(False), []
    for extra in ("avx512_f", "avx512_bf16"):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda x=extra: {"architecture": "x86_64", x: True})
        x = torch.randn(30, 40, generator=torch.Generator().manual_seed(1)).half().requires_grad_()
        with upcast.upcast_products(linear):
            linear(x).float().square().sum().backward()
        gradients.append(x.grad.float())
    assert 2e-4 < (gradients[0] - gradients[1]).norm() / gradients[0].norm() < 5e-3


def test_one_dtype_of_gradients_for_others(monkeypatch):
    for has, dtype, expected in (
        ({"avx512_bf16": True}, torch.bfloat16, torch.bfloat16),
        ({"avx512_bf16": True, "avx512_fp16": True}, torch.float16, torch.float16),
        ({"avx512_bf16": True}, torch.float32, torch.float32),
        ({}, torch.bfloat16, torch.float32),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has=has: {"architecture": "x86_64", **has})
        assert upcast.gradient_dtype(torch.zeros(1, dtype=dtype)) == expected


@pytest.mark.usefixtures("slow_cpu")
def test_only_long_forward_passes_and_slow_cpus(monkeypatch):
    def mode_in(model: Model, rows: int) -> object:
        model(x[:rows])
        return model.mode

    x = torch.ones(50, 40, dtype=torch.bfloat16)
    model = Model().bfloat16()
    upcast.upcast_forward_passes(model)
    # Numbers of the first argument, which for a model are token ids.
    monkeypatch.setattr(upcast, "MIN_ROWS", 8 * 40)
    assert isinstance(mode_in(model, 8), upcast._Upcast) and mode_in(model, 7) is None
    with pytest.raises(KeyError):
        model(x, fail=True)
    assert torch.overrides._get_current_function_mode() is None
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", "avx512_bf16": True})
    fast = Model().bfloat16()
    upcast.upcast_forward_passes(fast)
    assert not fast._forward_hooks and mode_in(fast, 50) is None


@pytest.mark.parametrize(
    ("rows", "capabilities", "converted"), [(7, {}, 0), (8, {}, 1), (600, {}, 1), (8, {"avx512_fp16": True}, 0)]
)
def test_products_outside_of_forward_passes_convert_from_enough_rows_on(monkeypatch, rows, capabilities, converted):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", **capabilities})
    calls, product = [], upcast._linear
    monkeypatch.setattr(upcast, "_linear", lambda *args, **kwargs: calls.append(1) or product(*args, **kwargs))
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape).half() for shape in ((rows, 40), (24, 40), (24,)))
    out = upcast.linear(x, weight, bias)
    transposed = upcast.linear(x, weight.T.contiguous().T, bias)  # as a latent's matrix is passed
    assert len(calls) == 2 * converted and out.dtype == torch.float16
    torch.testing.assert_close(transposed, out, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(out, F.linear(x.float(), weight.float(), bias.float()).half(), rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("slow_cpu")
def test_trained_weights_get_gradients():
    model = Model().to(torch.bfloat16).requires_grad_(True)
    with upcast.upcast_products(model):
        F.linear(torch.ones(9, 40, dtype=torch.bfloat16), model.linear.weight, model.linear.bias).sum().backward()
    assert model.linear.weight.grad is not None and model.linear.bias.grad is not None


@pytest.mark.usefixtures("slow_cpu")
@pytest.mark.parametrize("rows", [9, 600])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_changed_in_place_change_the_next_product(rows, dtype):
    """Changes by `weight.data` count in no version of the weight; a sum of its bits is blind to the one of signs."""
    torch.manual_seed(0)
    model, x = Model().to(dtype), torch.randn(rows, 40).to(dtype)
    upcast.upcast_forward_passes(model)
    weight = model.linear.weight
    for change in (lambda: weight.data.mul_(-1), lambda: weight.data.mul_(2), lambda: weight.data[5, 3].add_(1)):
        for _ in range(2):
            model.linear(x)
            model(x)
        change()
        with upcast.upcast_products(model):
            product = F.linear(x, weight, model.linear.bias)
        expected = F.linear(x.float(), weight.float(), model.linear.bias.float()).to(dtype)
        torch.testing.assert_close(product, expected)
