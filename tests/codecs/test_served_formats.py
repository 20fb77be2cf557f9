"""llama.cpp's blocks against the code of its package `gguf`; vLLM's formats against the equations of its kernels."""

import gguf
import numpy as np
import pytest
import torch
from sylvester import sylvester

from kvq_cli.codecs.base import Packed, Part
from kvq_cli.codecs.bits import pack, unpack
from kvq_cli.codecs.rotated import HadamardRotation, random_signs
from kvq_cli.codecs.served_formats import Q4_0, Q8_0, Fp8PerTokenHead, Int4PerTokenHead
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
