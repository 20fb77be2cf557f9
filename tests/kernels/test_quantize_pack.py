"""Quantization and packing by the kernel: the same bits as the codecs' and the reference's."""

from __future__ import annotations

import pytest
import torch
from checks.quantize_pack import INTEGERS, assert_same_bits, check, codec, layout, numbers
from kvq_kernels.quantize_pack import Layout, quantize_pack
from pairwise import parametrize_pairwise
from tiers import slow_cases

from kvq_cli.codecs import kernels
from kvq_cli.codecs.signed import SignedCodec
from kvq_cli.codecs.subspace import SubspaceCodec

pytestmark = pytest.mark.gpu

MODES = [("asymmetric", ""), ("symmetric", "extra"), ("symmetric", "inside"), ("hybrid", "extra")]


@parametrize_pairwise({"bits": [2, 3, 4], "axis": ["token", "channel"], "mode, sign": MODES})
def test_modes(bits, axis, mode, sign):
    check(bits, axis, 32, 64, torch.float16, mode, sign, 32)


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("bits", [1, 8])
def test_bits(bits, axis):
    check(bits, axis, 32, 64, torch.float16, "asymmetric", "", 32)
    check(bits, axis, 32, 64, torch.float16, "symmetric", "extra", 32)


@parametrize_pairwise(
    {
        "dim, group": [(16, 16), (80, 16), (96, 32), (128, 64), (256, 128)],
        "axis": ["token", "channel"],
        "dtype": [torch.float16, torch.bfloat16, torch.float32],
    }
)
def test_head_dims_and_groups(dim, group, axis, dtype):
    mode, sign = ("asymmetric", "") if group > 64 else ("hybrid", "extra")
    check(2, axis, group, dim, dtype, mode, sign, group if axis == "channel" else 9)


@pytest.mark.parametrize("tokens, rows", [(1, 64), (7, 64), (63, 64), (65, 64), (1000, 512)])
def test_odd_lengths(tokens, rows):
    tile = {"rows": rows, "columns": 32, "warps": 4}
    check(2, "token", 16, 32, torch.float16, "hybrid", "extra", tokens, tile)


@pytest.mark.parametrize("axis", ["token", "channel"])
def test_ties_between_modes(axis):
    """Equal errors up to the order of sums: few different numbers make many such groups."""

    def few(tokens, dim, dtype):
        return (numbers(tokens, dim, torch.float32) * 2).round().clamp(-4, 4).mul(0.3).to(dtype)

    check(2, axis, 16, 64, torch.bfloat16, "hybrid", "extra", 64, make=few)


def test_strided_views():
    whole = numbers(40, heads=3).transpose(1, 2).contiguous().transpose(1, 2)
    x = whole[:, 1:, 3:35]
    its_layout = layout(2, "channel", 32, 64, torch.float16, "asymmetric", "")
    packed_view, packed_copy = (quantize_pack(view, its_layout, backend="triton") for view in (x, x.contiguous()))
    assert torch.equal(packed_view.codes, packed_copy.codes) and torch.equal(packed_view.scale, packed_copy.scale)


def test_outputs_are_fully_written(monkeypatch):
    """All bits of the outputs are set before."""
    from kvq_kernels.quantize_pack import launch

    def poisoned(x, its_layout, make=launch.outputs):
        packed = make(x, its_layout)
        for side in (packed.codes, packed.scale, packed.zero, packed.sign):
            if side is not None:
                side.view(INTEGERS[side.element_size()]).fill_(-1)
        return packed

    monkeypatch.setattr(launch, "outputs", poisoned)
    check(2, "token", 32, 96, torch.float16, "hybrid", "extra", 7)
    check(3, "channel", 32, 96, torch.float16, "hybrid", "extra", 64)


@pytest.mark.parametrize("mode, sign", [*MODES, ("prompt", "extra")])
@pytest.mark.parametrize("axis", ["token", "channel"])
def test_codecs_pack_the_same_on_a_gpu(monkeypatch, mode, sign, axis):
    x = numbers(32)
    quantizer = codec(2, axis, 32, 64, torch.float16, mode, sign)
    if mode == "prompt":
        quantizer = SignedCodec(2, axis, 32, 64, torch.float16, sign, "symmetric")
    on_cpu = quantizer.encode(x)
    monkeypatch.setattr(kernels, "on_gpu", lambda _: True)
    monkeypatch.setattr(type(quantizer), "quantize", None)  # by the kernel or not at all
    on_gpu = quantizer.encode(x)
    assert_same_bits(*({n: p.tensor for n, p in packed.parts.items()} for packed in (on_gpu, on_cpu)))
    assert [p.unit for p in on_gpu.parts.values()] == [p.unit for p in on_cpu.parts.values()]
    assert torch.equal(quantizer.decode(on_gpu, torch.float32), quantizer.decode(on_cpu, torch.float32))


def test_codecs_with_another_quantizer_keep_it_on_a_gpu(monkeypatch):
    quantizer = SubspaceCodec(2, 32, 64, rank=2, strength=1.0, block=32)
    state = {"subspace": torch.randn(2, 1, 2, 64), "gain": torch.randn(2, 1, 1, 2, 2) * 0.01}
    x = numbers(32)
    expected = quantizer.with_state(state).encode(x)
    monkeypatch.setattr(kernels, "on_gpu", lambda _: True)
    on_gpu = quantizer.with_state(state).encode(x)
    assert all(torch.equal(part.tensor, on_gpu.parts[name].tensor) for name, part in expected.parts.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("mode", "sign"), [("asymmetric", ""), *slow_cases(("symmetric", "extra"), ("hybrid", "extra"))]
)
def test_scales_out_of_range_are_the_largest(mode, sign, dtype):
    """1 bit: a scale is as large as the range of its group."""

    def make(*shape) -> torch.Tensor:
        x = numbers(*shape)
        x[:, :, ::7] = torch.finfo(dtype).max * 0.9
        x[:, :, 1::7] = -torch.finfo(dtype).max * 0.9
        return x

    check(1, "channel", 32, 64, dtype, mode, sign, 64, make=make)


def test_layouts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="power of two"):
        quantize_pack(numbers(1, 72), Layout(2, "token", 24, 72), backend="triton")
    with pytest.raises(ValueError, match="whole groups"):
        quantize_pack(numbers(33), Layout(2, "channel", 32, 64))
