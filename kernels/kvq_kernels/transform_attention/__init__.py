"""Decode attention over keys and values that are packed as codes of a transform's components (docs/METHOD.md):

    out = softmax(scaling q K^T) V,  K = R(g S_k (c - center) + mean_k),  V = g S_v (c - center) + mean_v

c are codes of 1 to 8 bits, g is a gain per token and group of kv heads. Keys are computed in registers and never
stored; values are transformed once, as sums: sum p g S (c - center) = S (sum p g c - center sum p g). Sinks and recent
tokens are exact; all are one pass:

    transform = Transform.of_keys(widths, synthesis, mean, center, dim, ("half", dim))
    keys = Side(Transformed(codes, gain, transform), count, sinks, ring)
    out = transform_attention(query[:, :, 0], keys, values, lengths, scaling, rope=rope)[:, :, None]

Heads may have different widths: `PerHead((Transformed, ...), heads)`, with one launch for the heads that are stored
alike. Packed tokens may be in pages, `Side.pages`, best of whole tiles (64 tokens). No argument is read on the host. A
transform of all heads, and float32 queries, take a simple path: one layer's tokens are unpacked to numbers of the
query's type, for `decode_attention`.

    launch.py, configs.py      splits, tuned tiles    kernel.py, addresses.py  the pass over packed and exact tokens
    arguments.py, checks.py    tensors as arguments   codes.py                 words to float16 numbers
    rotated_keys.py            a tile's keys, turned queries; the format is in decode_attention/formats/transformed.py
"""

from __future__ import annotations

from torch import Tensor

from kvq_kernels.decode_attention.formats.transformed import Transform, Transformed
from kvq_kernels.decode_attention.launch import Workspace
from kvq_kernels.decode_attention.parts import Rope, Side
from kvq_kernels.decode_attention.reference import decode_attention_reference
from kvq_kernels.launch_device import Backend, uses_triton
from kvq_kernels.transform_attention.checks import check_arguments
from kvq_kernels.transform_attention.launch import new_workspace, plan_splits, run_kernels

__all__ = ["Transform", "Transformed", "Workspace", "new_workspace", "plan_splits", "transform_attention"]


def transform_attention(
    query: Tensor,
    keys: Side,
    values: Side,
    lengths: Tensor,
    scaling: float,
    *,
    rope: Rope | None = None,
    window: int | None = None,
    workspace: Workspace | None = None,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """softmax(scaling q K^T) V over each row's first lengths[b] tokens: sinks, packed and recent ones.

    query:   `[B, Q, D]` float16, bfloat16 or float32, after RoPE, D even; query heads of a kv head are neighbours.
    keys, values: `Side`s with the same windows, packed as `Transformed` or `PerHead` of such; the keys' transforms are
             of `Transform.of_keys` with `rope`. Before anything is packed: `Dense` with any numbers.
    lengths: int32 `[B]`, tokens of each row, the new one included; 0 gives zeros.
    scaling: factor on the scores, usually 1 / sqrt(D).
    rope:    rotary embedding of the keys; None: none.
    window:  newest tokens that a query sees; None: all.
    workspace: of `new_workspace`; allocated if not given. out: `[B, Q, D]`, contiguous; likewise.
    backend: "auto" is "triton" on a GPU and under TRITON_INTERPRET=1, else "torch".

    Returns `[B, Q, D]` in the query's type. Products have float16 operands and float32 sums (float16 ones where tuned),
    of a float32 query float32 operands. ValueError for shapes that do not fit.
    """
    check_arguments(query, keys, values, lengths, rope, workspace, out)
    if not uses_triton(query, backend):
        result = decode_attention_reference(query, keys, values, lengths, scaling, rope, window=window).to(query.dtype)
        return result if out is None else out.copy_(result)
    return run_kernels(query, keys, values, lengths, scaling, rope, window, workspace, out)
