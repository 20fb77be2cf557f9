"""llama.cpp's blocks against the code of its package `gguf`; vLLM's formats against the equations of its kernels;
quanto's against the package and its equations."""

import gguf
import numpy as np
import pytest
import torch
from sylvester import sylvester

from kvq_cli.codecs.base import Packed, Part
from kvq_cli.codecs.bits import pack, unpack
from kvq_cli.codecs.rotated import HadamardRotation, random_signs
from kvq_cli.codecs.served_formats import Q4_0, Q8_0, Fp8PerTokenHead, Int4PerTokenHead, QuantoCodec
from kvq_cli.errors import KvqError, UsageError

DIM = 96
TYPES = {Q4_0: gguf.GGMLQuantizationType.Q4_0, Q8_0: gguf.GGMLQuantizationType.Q8_0}


def numbers(dim: int = DIM) -> torch.Tensor:
    """`[1, 2, 200, dim]`: tokens of all sizes, of zeros, of one sign, and with two largest magnitudes of both signs."""
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 200, dim, generator=noise) * torch.exp(2 * torch.randn(1, 2, 200, 1, generator=noise))
    x[:, :, 0], x[:, :, 1], x[:, :, 2] = 0, x[:, :, 1].abs() + 1, -x[:, :, 2].abs() - 1
    x[:, :, 3, 5], x[:, :, 3, 9], x[:, :, 4, 5], x[:, :, 4, 9] = 50.0, -50.0, -50.0, 50.0
    x[:, :, 5] = torch.arange(dim) / 2  # codes halfway between two
    return x


@pytest.mark.parametrize("codec", TYPES)
def test_decoded_blocks_are_those_of_gguf(codec):
    x, kind = numbers(), TYPES[codec]
    own = codec(DIM).decode(codec(DIM).encode(x), torch.float32).numpy()
    wanted = gguf.quants.dequantize(gguf.quants.quantize(x.numpy().reshape(-1, DIM), kind), kind).reshape(own.shape)
    np.testing.assert_array_equal(own, wanted)


@pytest.mark.parametrize("codec", TYPES)
def test_blocks_take_the_bytes_of_gguf(codec):
    x = numbers()
    _, size = gguf.GGML_QUANT_SIZES[TYPES[codec]]
    assert codec(DIM).encode(x).nbytes == x.numel() // 32 * size


def half_away(x: np.ndarray) -> np.ndarray:
    return np.where(x >= 0, np.floor(x + 0.5), np.ceil(x - 0.5))


def test_int4_is_that_of_the_kernel_of_vllm():
    x = numbers()
    packed = Int4PerTokenHead(DIM).encode(x)
    wide = x.double().numpy()
    least, most = x.numpy().min(-1, keepdims=True), x.numpy().max(-1, keepdims=True)
    scale = np.maximum((most - least) / np.float32(15), np.float32(1e-6))
    zero = np.clip(half_away(-least.astype(np.float64) / scale), 0, 15)
    codes = np.clip(half_away(wide / scale + zero), 0, 15)
    stored = (scale.view(np.int32) & ~15 | zero.astype(np.int32)).view(np.float32)
    np.testing.assert_array_equal(packed.parts["scale"].tensor.numpy(), stored)
    own = unpack(packed.parts["codes"].tensor, 4, DIM).numpy()
    assert (own == codes).mean() > 0.999 and np.abs(own - codes).max() <= 1  # halves, up to rounding
    decoded = (own - zero) * (stored.view(np.int32) & ~15).view(np.float32)
    np.testing.assert_allclose(Int4PerTokenHead(DIM).decode(packed, torch.float64).numpy(), decoded, rtol=1e-6)
    assert packed.nbytes == x.numel() // 2 + 4 * x.numel() // DIM


def e4m3() -> np.ndarray:
    """All finite numbers of float8 e4m3, from its definition, ascending."""
    steps = np.arange(8) / 8
    normal = [2.0 ** (exponent - 7) * (1 + step) for exponent in range(1, 16) for step in steps][:-1]  # the last is NaN
    positive = np.array([*(2.0**-6 * steps), *normal])
    return np.unique(np.concatenate([-positive, positive]))


def test_fp8_is_the_nearest_number_of_the_scaled_one():
    x = numbers()
    packed = Fp8PerTokenHead(DIM).encode(x)
    scale = np.maximum(np.abs(x.numpy()).max(-1, keepdims=True).astype(np.float64) / 448, 1e-6)
    np.testing.assert_allclose(packed.parts["scale"].tensor.numpy(), scale, rtol=1e-6)
    own = Fp8PerTokenHead(DIM).decode(packed, torch.float64).numpy() / scale
    levels, scaled = e4m3(), x.double().numpy() / scale
    least = np.abs(levels[None] - scaled.reshape(-1, 1)).min(1).reshape(own.shape)
    assert len(levels) == 253
    np.testing.assert_allclose(np.abs(own - scaled), least, rtol=0, atol=1e-4)
    assert packed.nbytes == x.numel() + 4 * x.numel() // DIM


def parts_of(codec: QuantoCodec, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 of the shape of x, scales and zero-points, as stored."""
    parts = codec.encode(x).parts
    return unpack(parts["codes"].tensor, codec.bits, x.shape[3]), parts["scale"].tensor, parts["zero"].tensor


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("bits", [2, 4])
def test_quanto_stores_what_the_package_stores(bits, dim, dtype):
    quanto = pytest.importorskip("optimum.quanto")
    x, kind = numbers(dim).to(getattr(torch, dtype)), {2: quanto.qint2, 4: quanto.qint4}[bits]
    codec, (scale, shift) = QuantoCodec(bits, 64, dim, dtype), quanto.MaxOptimizer()(x, kind, 0, 64)
    whole = torch.ops.quanto.quantize_affine(x, bits=bits, axis=0, group_size=64, scale=scale, shift=shift)
    own, own_scale, own_zero = parts_of(codec, x)
    assert torch.equal(own, whole.view(x.shape))
    assert torch.equal(own_scale.flatten(), scale.flatten()) and torch.equal(own_zero.flatten(), -shift.flatten())
    steps = scale * whole  # rounded once more than kvq's
    error = (codec.decode(codec.encode(x), x.dtype) - (steps - shift).view(x.shape)).abs()
    bound = torch.finfo(x.dtype).eps * (steps.abs() + (steps - shift).abs()).view(x.shape)
    assert (error <= bound).all()


@pytest.mark.parametrize("bits", [2, 4])
def test_quanto_rounds_each_step_to_the_dtype(bits):
    x, most = numbers(128).half(), 2**bits - 1
    groups = x.numpy().reshape(-1, 64)  # NumPy rounds to float16 as PyTorch does
    low = groups.min(1, keepdims=True)
    scale = (groups.max(1, keepdims=True) - low) / np.float16(most)
    codes = np.rint((groups - low) / np.where(scale == 0, np.float16(1), scale)).clip(0, most)
    codec = QuantoCodec(bits, 64, 128)
    own, own_scale, own_zero = (part.numpy().reshape(len(groups), -1) for part in parts_of(codec, x))
    np.testing.assert_array_equal(own, codes)
    np.testing.assert_array_equal(own_scale, scale)
    np.testing.assert_array_equal(own_zero, low)
    decoded = codes.astype(np.float64) * scale + low
    packed = codec.encode(x)
    np.testing.assert_allclose(codec.decode(packed, torch.float64).numpy().reshape(decoded.shape), decoded, 1e-6, 1e-5)
    assert packed.nbytes == x.numel() * bits // 8 + 4 * len(groups)
    wide = np.rint((groups.astype(np.float64) - low) / np.where(scale == 0, np.inf, scale.astype(np.float64)))
    assert (own != wide.clip(0, most)).any()  # what UniformCodec stores in float32


def test_groups_of_quanto_end_with_a_token_and_are_finite():
    assert [QuantoCodec(2, 64, dim).group for dim in (256, 96, 80, 32)] == [64, 48, 40, 32]
    x = torch.linspace(-65504, 65504, 64).half().expand(1, 1, 3, 64)
    assert QuantoCodec(2, 64, 64).decode(QuantoCodec(2, 64, 64).encode(x), torch.float16).isfinite().all()


@pytest.mark.parametrize(("flip", "block"), [(False, 32), (True, 32), (False, 16)])
def test_rotation_of_blocks_is_block_diagonal(flip, block):
    rotation, x = HadamardRotation(DIM, flip, block), numbers()
    matrix = sylvester(block) / block**0.5
    if flip:
        matrix = matrix * random_signs(block, torch.device("cpu"))
    whole = torch.block_diag(*[matrix] * (DIM // block))
    torch.testing.assert_close(rotation.ahead(x).double(), x.double() @ whole.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rotation.back(rotation.ahead(x)), x, rtol=1e-4, atol=1e-4)


def test_head_dims_that_llama_cpp_refuses_have_smaller_blocks():
    x = numbers(80)
    assert Q4_0(80).encode(x).nbytes == x.numel() // 16 * (2 + 8)


def test_refusals():
    with pytest.raises(UsageError, match="rotation of 32 channels does not divide head_dim=80"):
        HadamardRotation(80, block=32)
    for codec in (Q8_0(DIM), Int4PerTokenHead(DIM), Fp8PerTokenHead(DIM)):
        packed = codec.encode(numbers())
        with pytest.raises(KvqError, match="scale"):
            codec.check(Packed(200, {**packed.parts, "scale": Part(-packed.parts["scale"].tensor - 1, 1)}))
    nan = pack(torch.full((1, 2, 200, DIM), 0x7F), 8)
    with pytest.raises(KvqError, match="codes"):
        codec.check(Packed(200, {**packed.parts, "codes": Part(nan, 1)}))
