"""Ahead-of-time cases of attention over transform codes: Llama-3.1-8B's, keys per head or joined, values joined."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvq_kernels.aot_cases import Launch
from kvq_kernels.decode_attention.parts import Dense, Rope, Side
from kvq_kernels.spans import GridLaunch
from kvq_kernels.transform_attention.launch import (
    Call,
    exact_launch,
    make_steps,
    project_launch,
    score_launch,
    sum_launch,
)
from kvq_kernels.transform_attention.parts import Transform, Transformed, TransformWorkspace
from kvq_kernels.transform_attention.scores import score_kernel
from kvq_kernels.transform_attention.sums import exact_kernel, project_kernel, sum_kernel

ROWS, TOKENS, HEADS, KV_HEADS, DIM, SINKS, RING = 1, 32768, 32, 8, 128, 16, 16
SPAN, SPLITS, EXACT_SPLITS = 8192, 8, 1
#: By the components of a chunk, the chunks of a head at 2 bits: 32 codes.
PER_HEAD = {1: 4, 2: 8, 4: 14, 8: 6}
META = torch.device("meta")


def _empty(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def counts(joined: bool) -> dict[int, list[int]]:
    """By the components of a chunk, the chunks of each group of heads."""
    return {size: [number * KV_HEADS] if joined else [number] * KV_HEADS for size, number in PER_HEAD.items()}


def _side(joined: bool, dtype: torch.dtype, gpu: str) -> Transformed:
    chunks = counts(joined)
    groups, components = (1 if joined else KV_HEADS), sum(size * number for size, number in PER_HEAD.items())
    steps = make_steps(chunks, DIM * KV_HEADS // groups, META, gpu)
    synthesis = _empty(DIM * components * KV_HEADS * (KV_HEADS if joined else 1), dtype=torch.float32)
    mean = _empty(KV_HEADS, DIM, dtype=torch.float32)
    transform = Transform(_empty(components * KV_HEADS, 256, dtype=dtype), synthesis, mean, steps)
    codes = _empty(ROWS, 1, TOKENS, sum(map(sum, chunks.values())), dtype=torch.uint8)
    sinks, ring = (_empty(ROWS, KV_HEADS, tokens, DIM, dtype=dtype) for tokens in (SINKS, RING))
    return Transformed(codes, transform, Side(Dense(ring), _empty(ROWS, dtype=torch.int32), sinks, ring))


def _call(gpu: str, joined: bool, dtype: torch.dtype = torch.float16) -> Call:
    query, lengths = _empty(ROWS, HEADS, DIM, dtype=dtype), _empty(ROWS, dtype=torch.int32)
    rope = Rope.tables("half", _empty(DIM // 2, dtype=torch.float32), TOKENS)
    keys, values = _side(joined, dtype, gpu), _side(True, dtype, gpu)
    return Call(query, lengths, DIM**-0.5, rope, None, gpu, keys, values)


def calls(gpu: str) -> dict[str, Call]:
    """name -> arguments of `transform_attention`, without memory."""
    return {
        "keys-per-head": _call(gpu, False),
        "keys-joined": _call(gpu, True),
        "keys-per-head-bf16": _call(gpu, False, torch.bfloat16),
    }


def launches(gpu: str) -> dict[str, Launch]:
    """Scores and sums of packed tokens of every case; exact tokens and the projection of one."""
    named: dict[str, Launch] = {}
    for name, call in calls(gpu).items():
        workspace = _workspace(call)
        named[f"scores-{name}"] = _launch(score_kernel, score_launch(call, 0, workspace))
        named[f"sums-{name}"] = _launch(sum_kernel, sum_launch(call, 0, workspace, 0))
    call = calls(gpu)["keys-per-head"]
    workspace = _workspace(call)
    named["exact"] = _launch(exact_kernel, exact_launch(call, workspace))
    named["project"] = _launch(project_kernel, project_launch(call, workspace, 1, call.query))
    return named


def _workspace(call: Call) -> TransformWorkspace:
    return TransformWorkspace.like(call.query, call.values.rank, SPAN, SPLITS, EXACT_SPLITS)


def _launch(kernel: Any, launch: GridLaunch) -> Launch:
    _, arguments, constants, options = launch
    return Launch(kernel, arguments, constants, options)
