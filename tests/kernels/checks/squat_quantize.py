"""Random keys, and a check that they are quantized to the same bits as by SQuat's codec."""

from __future__ import annotations

import torch
from kernel_cases import DEVICE
from kvq_kernels.squat_quantize import squat_quantize

from kvq_cli.codecs.base import Prompt
from kvq_cli.codecs.subspace import SubspaceCodec


def random_keys(codec: SubspaceCodec, rows=2, heads=2, tokens=32, dtype=torch.float16, seed=0):
    """(keys, the codec's state fit to them and to random queries)."""
    g = torch.Generator().manual_seed(seed)
    dim = codec.base.head_dim
    keys = torch.randn(rows, heads, tokens, dim, generator=g).to(dtype)
    keys[..., 1] = 0.75  # constant groups
    queries = torch.randn(rows, 2 * heads, tokens, dim, generator=g) * torch.linspace(3, 0.1, dim)
    state = codec.fit(Prompt(keys, keys, queries))
    if codec.shares_state:
        state = {name: x[:1] for name, x in state.items()}
    return keys.to(DEVICE), {name: x.to(DEVICE) for name, x in state.items()}


def by_kernel(codec: SubspaceCodec, keys, state, block: int, backend: str = "triton"):
    """(codes, scale, zero) by `squat_quantize`."""
    base = codec.base
    layout = {"bits": base.bits, "group": base.group, "block": block, "dtype": getattr(torch, base.dtype)}
    return squat_quantize(keys, state["subspace"], state["gain"], **layout, backend=backend)


def assert_same_bits(codec: SubspaceCodec, keys, state, block: int) -> None:
    """Assert that kernel and reference give the codec's bits."""
    parts = codec.with_state(state).encode(keys).parts
    for backend in ("triton", "torch"):
        for name, tensor in zip(("codes", "scale", "zero"), by_kernel(codec, keys, state, block, backend), strict=True):
            assert tensor.dtype == parts[name].tensor.dtype
            assert torch.equal(tensor, parts[name].tensor), (backend, name)
