"""klt's encoding and packing of one layer's keys and values at 2 bits, beside uniform quantization of the same keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from kvq_kernels import fields
from kvq_kernels.quantize_pack import Layout, quantize_pack
from kvq_kernels.transform_pack import PackTables, transform_pack
from kvq_kernels.transform_pack.aot_cases import SHAPES as PROFILES
from kvq_kernels.transform_pack.reference import transform_pack_reference
from torch import Tensor

from kvq_cli.benchmarking.kernels.experiment import Case, Sizes, generator, random_tensor
from kvq_cli.benchmarking.shapes import SHAPES
from kvq_cli.codecs.transform import TransformCodec

LENGTHS = (16, 1024, 16384, 65536)
MODEL, BITS, GROUP = "llama-3.1-8b", 2, 32


class TransformPack:
    """A case encodes one side of a layer. 16 tokens are what a decode step packs."""

    operation = "transform_pack"
    tuned_at = LENGTHS.index(16384)

    def shapes(self, sizes: Sizes, device: torch.device) -> Iterator[tuple[dict[str, Any], list[Case]]]:
        heads = sizes.pick(SHAPES[MODEL].kv_heads, 2)
        for length in sizes.pick(LENGTHS, (32,), LENGTHS[:2]):
            cases = [
                Case("uniform keys", partial(_uniform, heads, length, device), _nbytes("keys-2bit", heads, length))
            ]
            for side in ("keys", "values"):
                name = f"{side}-{BITS}bit"
                make = partial(_pack, name, heads, length, device)
                error = partial(_differing_share, name, heads, length, device)
                cases.append(Case(f"klt {side}", make, _nbytes(name, heads, length), error=error))
            yield {"model": MODEL, "context": length}, cases


def _nbytes(name: str, heads: int, length: int) -> int:
    """Bytes of 16-bit numbers, codes and gains."""
    profile, lanes = PROFILES[name], fields.KEY_LANES
    return heads * length * (2 * profile.dim + lanes * fields.rate(profile.widths) + 1)


def _operands(name: str, heads: int, length: int, device: torch.device, seed: int) -> tuple[Tensor, PackTables]:
    """Return random tokens, float16 `[1, heads, length, head_dim]`, and tables of a random orthogonal transform."""
    random, profile = generator(device, seed), PROFILES[name]
    dim, kept = profile.dim, fields.FIELD * len(profile.widths)
    levels = 2.0 ** torch.tensor([float(width) for width in profile.widths for _ in range(8)], device=device)
    rotation = torch.linalg.qr(random_tensor((heads, dim, dim), torch.float32, random)).Q
    analysis = rotation[:, :kept] * levels[:, None] / 4
    one = torch.ones_like(rotation[:, 0])
    tensors = {
        "widths": torch.tensor([profile.widths] * heads, dtype=torch.uint8),
        "mean": 0 * one,
        "std": one,
        "analysis": analysis,
        "synthesis": analysis.mT,
        "center": ((levels - 1) / 2).repeat(heads, 1),
        "deviation": (levels / 4).repeat(heads, 1),
    }
    x = random_tensor((1, heads, length, dim), torch.float16, random)
    return x, TransformCodec(heads, tensors, profile.values).pack_tables()


def _pack(name: str, heads: int, length: int, device: torch.device, seed: int) -> Callable[[], Any]:
    x, tables = _operands(name, heads, length, device, seed)
    return lambda: transform_pack(x, tables, backend="triton")


def _uniform(heads: int, length: int, device: torch.device, seed: int) -> Callable[[], Any]:
    dim = PROFILES["keys-2bit"].dim
    keys = random_tensor((1, heads, max(length, GROUP), dim), torch.float16, generator(device, seed))
    layout = Layout(BITS, "channel", GROUP, dim)
    return lambda: quantize_pack(keys, layout, backend="triton")


def _differing_share(name: str, heads: int, length: int, device: torch.device) -> tuple[float, float]:
    """Return the share of words and gains that differ from the reference, and the allowed share, 0."""
    x, tables = _operands(name, heads, length, device, 0)
    (codes, gains), (exact, indices) = transform_pack(x, tables, backend="triton"), transform_pack_reference(x, tables)
    assert gains is not None and indices is not None
    pairs = list(zip((*codes, gains), (*exact, indices), strict=True))
    return sum(int((a != b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs), 0.0
