"""Decode attention over keys and values that are packed as codes of a transform's components (docs/METHOD.md):

    out = softmax(scaling q K^T) V,  K = R(S_k z_k + mean_k),  V = S_v z_v + mean_v

z are centroids' components. Keys are computed a tile at a time and never stored; values are transformed once, as sums:
sum p v = S sum p z + mean sum p. Sinks and recent tokens are exact. Packed tokens are processed in spans of
`Workspace.span`, so that no buffer grows with the context:

    transform = Transform(centroids, synthesis, mean, make_steps({4: [16] * heads}, dim, device))
    keys = Transformed(codes, transform, Side(Dense(ring), count, sinks, ring))
    out = transform_attention(query[:, :, 0], keys, values, lengths, scaling, rope=rope)[:, :, None]

No argument is read on the host; the number of launches depends on the tensors' shapes alone.

    parts.py, checks.py  tensors, their shapes  sums.py    kernels of p z, of exact tokens, of S_v
    read.py              lookup of components   launch.py  spans, splits, arguments
    scores.py            kernel of K and q K^T  reference.py  the same in PyTorch
"""

from __future__ import annotations

from torch import Tensor

from kvq_kernels.decode_attention.parts import Rope
from kvq_kernels.launch_device import Backend, uses_triton
from kvq_kernels.transform_attention.checks import check_arguments
from kvq_kernels.transform_attention.launch import make_steps, new_workspace, plan_splits, run_kernels
from kvq_kernels.transform_attention.parts import Steps, Transform, Transformed, TransformWorkspace
from kvq_kernels.transform_attention.reference import transform_attention_reference

__all__ = [
    "Steps",
    "Transform",
    "TransformWorkspace",
    "Transformed",
    "make_steps",
    "new_workspace",
    "plan_splits",
    "transform_attention",
]


def transform_attention(
    query: Tensor,
    keys: Transformed,
    values: Transformed,
    lengths: Tensor,
    scaling: float,
    *,
    rope: Rope | None = None,
    window: int | None = None,
    workspace: TransformWorkspace | None = None,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """softmax(scaling q K^T) V over each row's first lengths[b] tokens: sinks, packed and recent ones.

    query:   `[B, Q, D]` float16, bfloat16 or float32, after RoPE, D even; query heads of a kv head are neighbours.
    keys, values: `Transformed` with the same windows; either may have a transform per kv head or of several.
    lengths: int32 `[B]`, tokens of each row, the new one included; 0 gives zeros.
    scaling: factor on the scores, usually 1 / sqrt(D).
    rope:    rotary embedding of the keys; None: none.
    window:  newest tokens that a query sees; None: all.
    workspace, out `[B, Q, D]`: contiguous; allocated if not given.
    backend: "auto" is "triton" on a GPU and under TRITON_INTERPRET=1, else "torch".

    Returns `[B, Q, D]` in the query's type. Products with components have float16 operands and float32 sums, of a
    float32 query float32 operands. ValueError for shapes that do not fit.
    """
    check_arguments(query, keys, values, lengths, rope, out)
    if not uses_triton(query, backend):
        result = transform_attention_reference(query, keys, values, lengths, scaling, rope, window).to(query.dtype)
        return result if out is None else out.copy_(result)
    return run_kernels(query, keys, values, lengths, scaling, rope, window, workspace, out)
