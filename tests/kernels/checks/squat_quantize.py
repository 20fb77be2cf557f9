"""Random keys, and whether they are quantized to the same bits as by SQuat's codec."""

from __future__ import annotations

import torch
from kernel_cases import DEVICE
from kvq_kernels.squat_quantize import squat_quantize

from kvq_cli.codecs.base import Prompt
from kvq_cli.codecs.subspace import SubspaceCodec


def made(codec: SubspaceCodec, rows=2, heads=2, tokens=32, dtype=torch.float16, seed=0):
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
    own = {"bits": codec.base.bits, "group": codec.base.group, "dtype": codec.base.dtype}
    return squat_quantize(keys, state["subspace"], state["gain"], **own, block=block, backend=backend)


def same(codec: SubspaceCodec, keys, state, block: int) -> None:
    parts = codec.with_state(state).encode(keys).parts
    for backend in ("triton", "torch"):
        for name, own in zip(("codes", "scale", "zero"), by_kernel(codec, keys, state, block, backend), strict=True):
            assert own.dtype == parts[name].tensor.dtype
            assert torch.equal(own, parts[name].tensor), (backend, name)
