"""Attention of one query per row over what is kept of the layer input (XQuant, https://arxiv.org/abs/2508.10395):

    out = softmax(scaling q K^T) V,  K = R(norm(X^ W_k + b_k)),  V = X^ W_v + b_v

X^ is unpacked a tile at a time and multiplied by W_k (a model's own projection, or S B^T of latents, section 3.3.1);
neither keys nor values are ever held. Values are absorbed: sum p x^ is multiplied by W_v once. Tokens are taken in
spans of `Workspace.span`, so that no memory grows with the context:

    keys = Latents(Side(Uniform(codes, scale, 2, "channel", 128, zero), count, sinks, ring), up)
    out = rematerialize(query[:, :, 0], keys, values, lengths, scaling, rope=rope, workspace=workspace)[:, :, None]

No argument is read on the host; which launches there are depends on the room that tensors have, not on what is in them.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from triton import knobs

from kvq_kernels.decode_attention.parts import Codebook, Rope
from kvq_kernels.rematerialize.launch import new_workspace, plan_splits, run_kernels
from kvq_kernels.rematerialize.parts import Latents, Norm, Workspace
from kvq_kernels.rematerialize.reference import rematerialize_reference

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
    backend: Literal["auto", "triton", "torch"] = "auto",
) -> Tensor:
    """softmax(scaling q K^T) V of each row's first lengths[b] tokens.

    query:   `[B, Q, D]` float16, bfloat16 or float32, after RoPE, D even; query heads of one kv head lie side by side.
    keys, values: see `Latents`. Both keep the same tokens packed and in their windows; values have no norm.
    lengths: int32 `[B]`, tokens of each row, its own new one included; a row of 0 tokens gives zeros.
    scaling: times the scores, 1 / sqrt(D) as a rule.
    rope:    how keys are turned; None: not at all.
    window:  newest tokens that are seen; None: all.
    workspace, out `[B, Q, D]`: made if not given.
    backend: "auto" is "triton" on a GPU and under TRITON_INTERPRET=1, else "torch".

    Returns `[B, Q, D]` in the query's type, which x is rounded to before products; sums are in float32.
    ValueError for shapes that do not fit.
    """
    _check(query, keys, values, lengths)
    if backend == "auto":
        backend = "triton" if query.device.type == "cuda" or knobs.runtime.interpret else "torch"
    if backend == "torch":
        result = rematerialize_reference(query, keys, values, lengths, scaling, rope, window).to(query.dtype)
        return result if out is None else out.copy_(result)
    return run_kernels(query, keys, values, lengths, scaling, rope, window, workspace, out)


def _check(query: Tensor, keys: Latents, values: Latents, lengths: Tensor) -> None:
    rows, heads, dim = query.shape
    for name, side in (("keys", keys), ("values", values)):
        made = side.weight.shape[1]
        if made != keys.weight.shape[1] or made % dim or heads * dim % made or dim % 2:
            raise ValueError(f"{heads} query heads of {dim} channels over {made} channels of {name}")
        if isinstance(side.held.packed, Codebook) or getattr(side.held.packed, "hybrid", False):
            raise ValueError(f"{name} must be packed as plain uniform codes or not at all")
        if getattr(side.held.packed, "sign", None) is not None or getattr(side.held.packed, "level", 0):
            raise ValueError(f"{name} must have zero-points")
    for name, x in (
        ("lengths", lengths),
        ("keys.held.count", keys.held.count),
        ("values.held.count", values.held.count),
    ):
        if x.shape != (rows,) or x.device != query.device:
            raise ValueError(f"{name} must have one number per row, on {query.device}, not shape {tuple(x.shape)}")
    if values.norm is not None or values.first is not None:
        raise ValueError("values are sums of what is kept: they have neither a norm nor a channel of their own")
    windows = [
        tuple(0 if x is None else x.shape[2] for x in (side.held.sinks, side.held.ring)) for side in (keys, values)
    ]
    if windows[0] != windows[1]:
        raise ValueError(f"keys have (sinks, slots) = {windows[0]}, values {windows[1]}")
