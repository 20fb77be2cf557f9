"""The launches that are compiled and read without a GPU: Llama-3.1-8B's latents, and Llama-2-7B's layer input."""

from __future__ import annotations

import torch

from kvq_kernels.decode_attention.parts import Dense, Rope, Side, Uniform
from kvq_kernels.decode_attention.spec import first_words
from kvq_kernels.rematerialize.launch import Call, project_launch, score_launch, sum_launch
from kvq_kernels.rematerialize.parts import Latents, Workspace
from kvq_kernels.rematerialize.scores import score_kernel
from kvq_kernels.rematerialize.spec import Source
from kvq_kernels.rematerialize.sums import project_kernel, sum_kernel
from kvq_kernels.shipped import Launch

ROWS, TOKENS, HEADS, DIM, GROUP = 1, 32768, 32, 128, 128
BITS = (1, 2, 3, 4, 8, 16)


def _empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _side(bits: int, axis: str, rank: int, made: int) -> Latents:
    if bits == 16:
        packed = Dense(_empty(ROWS, 1, TOKENS, rank))
    else:
        words = first_words(bits, rank) + (first_words(1, rank) if bits == 3 else 0)
        per_group = (TOKENS // GROUP, rank) if axis == "channel" else (TOKENS, rank // GROUP)
        sides = [_empty(ROWS, 1, *per_group) for _ in range(2)]
        packed = Uniform(_empty(ROWS, 1, TOKENS, words, dtype=torch.int32), sides[0], bits, axis, GROUP, sides[1])
    held = Side(packed, _empty(ROWS, dtype=torch.int32), ring=_empty(ROWS, 1, 2 * GROUP, rank))
    return Latents(held, _empty(made, rank).T)


def _calls(gpu: str) -> dict[str, Call]:
    query, lengths = _empty(ROWS, HEADS, DIM), _empty(ROWS, dtype=torch.int32)
    tables = [_empty(rows, 2, DIM // 2, dtype=torch.float32) for rows in (TOKENS // Rope.STEP, Rope.STEP)]
    rope = Rope("half", _empty(DIM // 2, dtype=torch.float32), 1.0, *tables)
    found = {}
    for bits in BITS:
        latents = [_side(bits, axis, 1024, 1024) for axis in ("channel", "token")]
        found[f"latents-{bits}bit"] = Call(query, *latents, lengths, DIM**-0.5, rope, None, gpu)
        whole = _side(bits, "token", 4096, 4096)
        found[f"input-{bits}bit"] = Call(query, whole, whole, lengths, DIM**-0.5, rope, None, gpu)
    return found


def launches(gpu: str) -> dict[str, Launch]:
    """Scores and sums of packed tokens at all bits; those of the other tokens, and the product with W_v, once each."""
    found = {}
    for name, call in _calls(gpu).items():
        workspace = Workspace.like(call.query, call.values.rank, 8192, 8)
        keys, values = Source.packed(call.keys), Source.packed(call.values)
        found[f"scores-{name}"] = _launch(score_kernel, score_launch(call, keys, 0, workspace), call, keys)
        found[f"sums-{name}"] = _launch(sum_kernel, sum_launch(call, values, 0, workspace, 1), call, values)
        if name.endswith("-16bit"):
            keys, values = Source.exact(call.keys), Source.exact(call.values)
            exact = name.removesuffix("-16bit")
            found[f"scores-{exact}-exact"] = _launch(score_kernel, score_launch(call, keys, 0, workspace), call, keys)
            found[f"sums-{exact}-exact"] = _launch(sum_kernel, sum_launch(call, values, 0, workspace, 0), call, values)
            found[f"project-{exact}"] = _launch(project_kernel, project_launch(call, workspace, 1, call.query), call)
    return found


def _launch(kernel, launch: tuple, call: Call, source: Source | None = None) -> Launch:
    _, given, fixed, options = launch
    # kind "none": products, not the unpacking of codes, are what these kernels are made of.
    numbers = 0 if source is None else fixed["N"] * fixed["R"] * fixed.get("F", 1)
    bits = 0.0 if source is None else float(source.bits)
    return Launch(kernel, given, fixed, options["num_warps"], options["num_stages"], "none", numbers, bits)
