"""Decode attention over cached layer inputs, from which keys and values are rematerialized (XQuant,
https://arxiv.org/abs/2508.10395):

    out = softmax(scaling q K^T) V,  K = R(norm(X^ W_k + b_k)),  V = X^ W_v + b_v

X^ is dequantized a tile at a time and multiplied by W_k (a model's own projection, or S B^T of latents, section 3.3.1);
keys and values are never stored. Values are absorbed: sum p x^ is multiplied by W_v once. Tokens are processed in spans
of `Workspace.span`, so that no buffer grows with the context:

    keys = Latents(Side(Uniform(codes, scale, 2, "channel", 128, zero), count, sinks, ring), up)
    out = rematerialize(query[:, :, 0], keys, values, lengths, scaling, rope=rope, workspace=workspace)[:, :, None]

No argument is read on the host; the number of launches depends on the tensors' shapes alone.

    parts.py     tensors         scores.py    kernel of K and q K^T           launch.py     spans, arguments
    spec.py      their format    sums.py      kernels of p X^ and of W_v      reference.py  the same in PyTorch
    read.py      dequantization
"""

from __future__ import annotations

from torch import Tensor

from kvq_kernels.decode_attention.checks import check_offset_and_out, check_per_row
from kvq_kernels.decode_attention.parts import Dense, Rope, Uniform
from kvq_kernels.launch_device import Backend, uses_triton
from kvq_kernels.rematerialize.launch import new_workspace, plan_splits, run_kernels
from kvq_kernels.rematerialize.parts import Latents, Norm
from kvq_kernels.rematerialize.reference import rematerialize_reference
from kvq_kernels.spans import Workspace

__all__ = ["Latents", "Norm", "Workspace", "new_workspace", "plan_splits", "rematerialize"]


def rematerialize(
    query: Tensor,
    keys: Latents,
    values: Latents,
    lengths: Tensor,
    scaling: float,
    *,
    rope: Rope | None = None,
    window: int | None = None,
    workspace: Workspace | None = None,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """softmax(scaling q K^T) V over each row's first lengths[b] tokens, whose layer inputs are cached.

    query:   `[B, Q, D]` float16, bfloat16 or float32, after RoPE, D even; query heads of a kv head are neighbours.
    keys, values: `Latents` with the same packed tokens, sinks and ring; values have no norm.
    lengths: int32 `[B]`, tokens of each row, the new one included; 0 gives zeros.
    scaling: factor on the scores, usually 1 / sqrt(D).
    rope:    rotary embedding of the keys; None: none.
    window:  newest tokens that a query sees; None: all.
    workspace, out `[B, Q, D]`: contiguous; allocated if not given.
    backend: "auto" is "triton" on a GPU and under TRITON_INTERPRET=1, else "torch".

    Returns `[B, Q, D]` in the query's type, which x is rounded to before products; sums are float32. ValueError for
    shapes that do not fit.
    """
    _check(query, keys, values, lengths, rope, out)
    if not uses_triton(query, backend):
        result = rematerialize_reference(query, keys, values, lengths, scaling, rope, window).to(query.dtype)
        return result if out is None else out.copy_(result)
    return run_kernels(query, keys, values, lengths, scaling, rope, window, workspace, out)


def _check(
    query: Tensor, keys: Latents, values: Latents, lengths: Tensor, rope: Rope | None, out: Tensor | None
) -> None:
    """ValueError for shapes and formats that do not fit."""
    _, heads, dim = query.shape
    for name, side in (("keys", keys), ("values", values)):
        channels = side.weight.shape[1]
        if channels != keys.weight.shape[1] or channels % dim or heads * dim % channels or dim % 2:
            raise ValueError(f"{heads} query heads of {dim} channels over {channels} channels of {name}")
        packed = side.held.packed
        if not isinstance(packed, (Dense, Uniform)) or (isinstance(packed, Uniform) and packed.hybrid):
            raise ValueError(f"{name} must be packed as plain uniform codes or not at all")
        if isinstance(packed, Uniform) and (packed.sign is not None or packed.level):
            raise ValueError(f"{name} must have zero-points")
    for name, x in (
        ("lengths", lengths),
        ("keys.held.count", keys.held.count),
        ("values.held.count", values.held.count),
    ):
        check_per_row(name, x, query)
    check_offset_and_out(rope, out, query)
    if values.norm is not None or values.first is not None:
        raise ValueError("values have neither a norm nor a separate first channel: they are sums of cached inputs")
    windows = [
        tuple(0 if x is None else x.shape[2] for x in (side.held.sinks, side.held.ring)) for side in (keys, values)
    ]
    if windows[0] != windows[1]:
        raise ValueError(f"keys have (sinks, ring_size) = {windows[0]}, values {windows[1]}")
