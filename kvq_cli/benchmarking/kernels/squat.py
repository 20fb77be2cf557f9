"""SQuat's quantization of one layer's keys at 2 bits, beside plain quantization of the same keys (KIVI's)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from kvq_kernels.quantize_pack import Layout, quantize_pack
from kvq_kernels.squat_quantize import squat_quantize
from kvq_kernels.squat_quantize.reference import squat_quantize_reference
from torch import Tensor

from kvq_cli.benchmarking.kernels.experiment import Case, Sizes, generator, random_tensor
from kvq_cli.benchmarking.shapes import SHAPES

LENGTHS = (1024, 4096, 16384, 65536)
MODEL = "llama-3.1-8b"
#: As the method `squat` sets them: bits, tokens of a group, rank of the subspace, and channels of a block.
BITS, GROUP, RANK, BLOCK = 2, 32, 5, 64


class SquatQuantize:
    """A case quantizes the keys of one layer."""

    operation = "squat_quantize"
    tuned_at = LENGTHS.index(16384)

    def shapes(self, sizes: Sizes, device: torch.device) -> Iterator[tuple[dict[str, Any], list[Case]]]:
        shape = SHAPES[sizes.pick(MODEL, "tiny")]
        block = min(BLOCK, shape.head_dim // 2)
        for length in sizes.pick(LENGTHS, (64,), LENGTHS[:1]):
            size = (1, shape.kv_heads, length, shape.head_dim)
            numbers = shape.kv_heads * length * shape.head_dim
            # Numbers and codes; a scale and a zero-point per group.
            nbytes = numbers * (16 + BITS) // 8 + 4 * numbers // GROUP
            cases = [
                Case("uniform", partial(_uniform, size, device), nbytes),
                Case(
                    "squat",
                    partial(_squat, size, block, device),
                    nbytes,
                    error=partial(_differing_share, size, block, device),
                ),
            ]
            yield {"model": MODEL, "context": length}, cases


def _operands(size: tuple[int, ...], block: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random keys, float16 `[1, kv_heads, tokens, head_dim]`, a subspace and the gain that belongs to it."""
    random = generator(device, seed)
    keys = random_tensor(size, torch.float16, random)
    subspace = random_tensor((1, size[1], RANK, size[3]), torch.float32, random)
    gains = []
    for cut in range(block, size[3], block):
        later = subspace[..., cut:].double()
        gains.append(torch.linalg.inv(torch.eye(RANK, dtype=torch.float64, device=device) + later @ later.mT).float())
    return keys, subspace, torch.stack(gains, dim=2)


def _squat(size: tuple[int, ...], block: int, device: torch.device, seed: int) -> Callable[[], Any]:
    keys, subspace, gain = _operands(size, block, device, seed)
    options: dict[str, Any] = {"bits": BITS, "group": GROUP, "block": block, "dtype": torch.float16}
    return lambda: squat_quantize(keys, subspace, gain, **options, backend="triton")


def _uniform(size: tuple[int, ...], device: torch.device, seed: int) -> Callable[[], Any]:
    keys = random_tensor(size, torch.float16, generator(device, seed))
    layout = Layout(BITS, "channel", GROUP, size[3])
    return lambda: quantize_pack(keys, layout, backend="triton")


def _differing_share(size: tuple[int, ...], block: int, device: torch.device) -> tuple[float, float]:
    """Return the share of packed numbers that differ from the reference, and the allowed share, 0."""
    operands = _operands(size, block, device, 0)
    exact = squat_quantize_reference(*operands, BITS, GROUP, block, torch.float16)
    found = _squat(size, block, device, 0)()
    differing = sum(int((one != other).sum()) for one, other in zip(found, exact, strict=True))
    return differing / sum(tensor.numel() for tensor in exact), 0.0
