"""Ahead-of-time cases of rematerialization: Llama-3.1-8B's latents, and Llama-2-7B's layer inputs."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from kvq_kernels.aot_cases import Launch
from kvq_kernels.decode_attention.parts import Rope, Side, Uniform
from kvq_kernels.planar import high_words, low_words
from kvq_kernels.rematerialize.launch import Call, project_launch, score_launch, sum_launch
from kvq_kernels.rematerialize.parts import Latents
from kvq_kernels.rematerialize.scores import score_kernel
from kvq_kernels.rematerialize.spec import Source
from kvq_kernels.rematerialize.sums import project_kernel, sum_kernel
from kvq_kernels.spans import GridLaunch, Workspace

ROWS, TOKENS, HEADS, DIM, WIDTH, GROUP = 1, 32768, 32, 128, 4096, 128
SPAN, SPLITS = 8192, 8


def _empty(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _side(bits: int, axis: Literal["channel", "token"], rank: int, channels: int, dtype: torch.dtype) -> Latents:
    words = low_words(bits, rank) + high_words(bits, rank)
    per_group = (TOKENS // GROUP, rank) if axis == "channel" else (TOKENS, rank // GROUP)
    scale, zero = (_empty(ROWS, 1, *per_group, dtype=dtype) for _ in range(2))
    packed = Uniform(_empty(ROWS, 1, TOKENS, words, dtype=torch.int32), scale, bits, axis, GROUP, zero)
    held = Side(packed, _empty(ROWS, dtype=torch.int32), ring=_empty(ROWS, 1, 2 * GROUP, rank, dtype=dtype))
    # S B^T, or a model's projection, which is stored transposed.
    return Latents(held, _empty(rank, channels, dtype=dtype) if rank < WIDTH else _empty(channels, rank, dtype=dtype).T)


def _call(gpu: str, bits: int, rank: int, dtype: torch.dtype = torch.float16) -> Call:
    query, lengths = _empty(ROWS, HEADS, DIM, dtype=dtype), _empty(ROWS, dtype=torch.int32)
    rope = Rope.tables("half", _empty(DIM // 2, dtype=torch.float32), TOKENS)
    if rank < WIDTH:
        keys, values = _side(bits, "channel", rank, rank, dtype), _side(bits, "token", rank, rank, dtype)
    else:
        keys = values = _side(bits, "token", rank, rank, dtype)
    return Call(query, lengths, DIM**-0.5, rope, None, gpu, keys, values)


def calls(gpu: str) -> dict[str, Call]:
    """name -> arguments of `rematerialize`, without memory."""
    named = {f"latents-{bits}bit": _call(gpu, bits, 1024) for bits in (2, 3, 4)}
    named["latents-2bit-bf16"] = _call(gpu, 2, 1024, torch.bfloat16)
    return named | {f"input-{bits}bit": _call(gpu, bits, WIDTH) for bits in (2, 4)}


def launches(gpu: str) -> dict[str, Launch]:
    """Scores and sums of packed tokens of every case; of exact tokens, and the projection, once."""
    named: dict[str, Launch] = {}
    all_calls = calls(gpu)
    for name, call in all_calls.items():
        named |= _packed(name, call)
    call = all_calls["latents-2bit"]
    workspace = Workspace.like(call.query, 1024, SPAN, SPLITS)
    keys, values = Source.exact(call.keys), Source.exact(call.values)
    named["scores-exact"] = _launch(score_kernel, score_launch(call, keys, 0, workspace))
    named["sums-exact"] = _launch(sum_kernel, sum_launch(call, values, 0, workspace, 0))
    named["project"] = _launch(project_kernel, project_launch(call, workspace, 1, call.query))
    return named


def _packed(name: str, call: Call) -> dict[str, Launch]:
    """Scores and sums of packed tokens."""
    workspace = Workspace.like(call.query, call.values.rank, SPAN, SPLITS)
    keys, values = Source.packed(call.keys), Source.packed(call.values)
    scores, sums = score_launch(call, keys, 0, workspace), sum_launch(call, values, 0, workspace, 1)
    return {
        f"scores-{name}": _launch(score_kernel, scores, keys.bits),
        f"sums-{name}": _launch(sum_kernel, sums, values.bits),
    }


def _launch(kernel: Any, launch: GridLaunch, bits: int = 0) -> Launch:
    """bits: of a code; 0: dense numbers."""
    _, arguments, constants, options = launch
    # Kind "none", without a limit of instructions per number: products, not codes, are most of the work.
    numbers = constants["N"] * constants["R"] * constants.get("F", 1) if bits else 0
    return Launch(kernel, arguments, constants, options, "none", numbers, float(bits))
