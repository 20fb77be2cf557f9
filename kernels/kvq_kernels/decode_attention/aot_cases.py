"""Ahead-of-time cases of decode attention: every storage family at Llama-3.1-8B's shapes, as sides without memory.

`kvq_kernels.aot_cases` describes a `Launch`; the benchmarks fill the same sides with random numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from kvq_kernels.aot_cases import Launch, stored_bytes
from kvq_kernels.decode_attention.arguments import side_spec
from kvq_kernels.decode_attention.configs import choose_tile
from kvq_kernels.decode_attention.kernel import combine_kernel, split_kernel
from kvq_kernels.decode_attention.launch import COMBINE_OPTIONS, Workspace, arguments, combine_constants, constants
from kvq_kernels.decode_attention.outliers import CHUNK
from kvq_kernels.decode_attention.pages import cell_views, changed, stored_tensors
from kvq_kernels.decode_attention.parts import Codebook, Dense, Directions, Outliers, Packed, Pages, Rope, Side, Uniform
from kvq_kernels.decode_attention.several_queries import query_rows
from kvq_kernels.planar import high_words, low_words

ROWS, HEADS, GROUP, DIM, TOKENS = 8, 8, 4, 128, 4096

Axis = Literal["channel", "token"]
#: Cases that are read from pages, too -> tokens of a cell. Above the limits of instructions per number on sm_90, and
#: left out: innerq-2bit-hybrid, 4.58 (limit 4.5; without pages 4.4), kvquant-2bit-outliers, 6.23 (limit 6).
PAGED = {
    "fp16": 64,
    "kivi-2bit-g32": 32,
    "kivi-4bit-g128": 128,
    "innerq-2bit": 128,
    "temporal-2bit": 128,
    "temporal-2bit-outliers": 128,
    "channel-2bit": 128,
    "kvquant-2bit": 128,
    "turboquant-4bit": 64,
}
#: Launches of several queries per row: name -> (case, queries).
SEVERAL_QUERIES = {
    f"{case}-{queries}-queries": (case, queries)
    for case in ("fp16", "kivi-2bit-g32", "kivi-2bit-g32-paged", "kvquant-2bit", "temporal-2bit")
    for queries in (4, 16)
}
#: Bytes per thread that ptxas spills where several queries read codebooks, though registers are left (168 of 255).
SPILLS = {"sm_100": 16}
#: Splits of the combinations; their count is one more.
COMBINED = {"combine": 8, "combine-1024": 1024}


def _empty(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _side(packed: Packed, dtype: torch.dtype = torch.float16, dim: int = DIM) -> Side:
    """With 32 sinks and a ring buffer of 128 tokens."""
    sinks, ring = (_empty(ROWS, HEADS, n, dim, dtype=dtype) for n in (32, 128))
    return Side(packed, _empty(ROWS, dtype=torch.int32), sinks, ring)


def uniform(bits: int, axis: Axis, group: int, symmetric: bool = False, dtype: torch.dtype = torch.float16) -> Side:
    """Uniform codes with a zero-point per group or, symmetric, a constant level."""
    words = low_words(bits, DIM) + high_words(bits, DIM)
    size = (ROWS, HEADS, TOKENS // group, DIM) if axis == "channel" else (ROWS, HEADS, TOKENS, DIM // group)
    zero, level = (None, 2 ** (bits - 1) - 1) if symmetric else (_empty(*size, dtype=dtype), 0)
    codes = _empty(ROWS, HEADS, TOKENS, words, dtype=torch.int32)
    return _side(Uniform(codes, _empty(*size, dtype=dtype), bits, axis, group, zero, level), dtype)


def codebook(block: tuple[int, int], normalize: bool = False) -> Side:
    """Vector codebooks of 256 entries per 8 bits of codes, with mean and standard deviation per channel or without."""
    size = block[0] * block[1]
    codes = _empty(ROWS, HEADS, TOKENS // block[0], DIM // block[1], dtype=torch.uint8)
    stats = [_empty(HEADS, DIM) for _ in range(2)] if normalize else (None, None)
    return _side(Codebook(codes, _empty(HEADS, DIM // size, 256, size), block, *stats))


def hybrid(bits: int, axis: Axis) -> Side:
    """InnerQ's groups of 32, symmetric or asymmetric each, with a word of sign bits or a zero-point; keys with a
    norm."""
    side = uniform(bits, axis, 32, symmetric=True)
    assert isinstance(side.packed, Uniform)
    word = _empty(*side.packed.scale.shape, dtype=torch.int32)
    side = replace(side, packed=replace(side.packed, level=0, sign=word, hybrid=True))
    norm = _empty(ROWS, HEADS, DIM, dtype=torch.float32)
    return replace(side, norm=norm) if axis == "token" else side


def scalars(bits: int, keys: bool) -> Side:
    """KVQuant's scalar codebook for all channels; keys are normalized per channel, values per token."""
    words = low_words(bits, DIM) + high_words(bits, DIM)
    codes = _empty(ROWS, HEADS, TOKENS, words, dtype=torch.int32)
    stats = [_empty(HEADS, DIM) for _ in range(2)] if keys else (None, None)
    tokens = () if keys else (_empty(ROWS, 1, TOKENS), _empty(ROWS, 1, TOKENS))
    return _side(Codebook(codes, _empty(1, 1, 2**bits, 1), (1, 1), *stats, *tokens))


def directions(bits: int) -> Side:
    """TurboQuant's keys: codes of a direction, and a norm per token and head."""
    words = low_words(bits, DIM) + high_words(bits, DIM)
    codes = _empty(ROWS, HEADS, TOKENS, words, dtype=torch.int32)
    return _side(Directions(codes, _empty(ROWS, HEADS, TOKENS, 1), _empty(2**bits, dtype=torch.float32), bits))


def with_outliers(side: Side, pooled: bool = False) -> Side:
    """1% outliers per block of 32 tokens: a list per head or, pooled, one list for all heads."""
    blocks = TOKENS // 32
    size = (ROWS, 1, blocks, HEADS * DIM // 100 * 32) if pooled else (ROWS, HEADS, blocks, 32 * DIM // 100)
    start = _empty(ROWS, 1, blocks, HEADS + 1, dtype=torch.int32) if pooled else None
    return replace(side, outliers=Outliers(_empty(*size, dtype=torch.int16), _empty(*size), 32, start))


def dense(dtype: torch.dtype = torch.float16, dim: int = DIM) -> Side:
    """Numbers that are not quantized."""
    return _side(Dense(_empty(ROWS, HEADS, TOKENS, dim, dtype=dtype)), dtype, dim)


def rope() -> Rope:
    """Tables for `TOKENS` positions."""
    coarse, fine = (_empty(rows, 2, DIM // 2, dtype=torch.float32) for rows in (TOKENS // Rope.STEP, Rope.STEP))
    return Rope("half", _empty(DIM // 2, dtype=torch.float32), 1.0, coarse, fine, _empty(Rope.STEP, 2, DIM // 2))


def paged(side: Side, cell: int) -> Side:
    """The side in pages of two cells of `cell` tokens, in one allocation."""
    count, stored = ROWS * TOKENS // cell, list(stored_tensors(side))
    # Strides of heads and cells are multiples of 64 bytes.
    pool = _empty(count, 1, HEADS, 1 << 16, dtype=torch.uint8).transpose(1, 2)
    parts = [((cell // unit, tensor.shape[3]), tensor.dtype) for _, tensor, unit in stored]
    pairs = zip(cell_views(pool, parts), stored, strict=True)
    views = iter([view[:, : tensor.shape[1]] for view, (_, tensor, _) in pairs])
    table, slots = _empty(ROWS, TOKENS // cell, dtype=torch.int32), _empty(ROWS, dtype=torch.int32)
    return replace(changed(side, lambda _: next(views)), pages=Pages(table, cell, slots))


def storage_cases() -> dict[str, tuple[Side, Side, Rope | None]]:
    """name -> (keys, values, rope) of every storage family."""
    axes: tuple[Axis, Axis] = ("channel", "token")
    cases: dict[str, tuple[Side, Side, Rope | None]] = {"fp16": (dense(), dense(), None)}
    for bits, group in ((1, 32), (2, 32), (2, 128), (3, 32), (4, 32), (4, 128), (8, 128)):
        keys, values = uniform(bits, "channel", group), uniform(bits, "token", group)
        cases[f"kivi-{bits}bit-g{group}"] = (keys, values, None)
    for bits in (2, 4):
        cases[f"innerq-{bits}bit"] = (uniform(bits, "token", 32), uniform(bits, "channel", 32), None)
        keys, values = (uniform(bits, axis, 32, symmetric=True) for axis in reversed(axes))
        cases[f"innerq-{bits}bit-inside"] = (keys, values, None)
    keys, values = (uniform(2, axis, 32, dtype=torch.bfloat16) for axis in axes)
    cases["kivi-2bit-g32-bfloat16"] = (keys, values, None)
    cases["innerq-2bit-hybrid"] = (hybrid(2, "token"), hybrid(2, "channel"), None)
    for size in (2, 4, 8):
        cases[f"temporal-{8 // size}bit"] = (codebook((size, 1), True), codebook((size, 1)), rope())
        cases[f"channel-{8 // size}bit"] = (codebook((1, size)), codebook((1, size)), rope())
    keys, values, rotation = cases["temporal-2bit"]
    cases["temporal-2bit-outliers"] = (with_outliers(keys), with_outliers(values), rotation)
    for bits in (2, 3, 4):
        cases[f"kvquant-{bits}bit"] = (scalars(bits, keys=True), scalars(bits, keys=False), rope())
    for bits in (3, 4):
        cases[f"turboquant-{bits}bit"] = (directions(bits), uniform(bits, "token", 128), None)
    keys, values, rotation = cases["kvquant-2bit"]
    cases["kvquant-2bit-outliers"] = (with_outliers(keys), with_outliers(values, pooled=True), rotation)
    return cases


def launch_cases() -> dict[str, tuple[Side, Side, Rope | None]]:
    """`storage_cases`, those of `PAGED` in pages, as NAME-paged, and larger dense tokens, of which fewer fit a tile."""
    cases = storage_cases()
    wide_cases = {
        "fp16-dim256": (dense(dim=256), dense(dim=256), None),
        "fp32": (dense(torch.float32), dense(torch.float32), None),
    }
    paged_cases = {}
    for name, cell in PAGED.items():
        keys, values, rotation = cases[name]
        paged_cases[f"{name}-paged"] = (paged(keys, cell), paged(values, cell), rotation)
    return cases | wide_cases | paged_cases


def family(keys: Side, values: Side) -> str:
    """Return the kind of data that the main loop of a case reads, one of `kvq_kernels.aot_cases.KINDS`; "none" for
    float32, which no matrix unit multiplies."""
    kinds = {type(side.packed) for side in (keys, values)}
    if kinds & {Codebook, Directions}:
        return "codebook"
    if Uniform in kinds:
        return "uniform"
    return "none" if any(side.members[0].product_type == torch.float32 for side in (keys, values)) else "dense"


def launches(gpu: str) -> dict[str, Launch]:
    """The split pass of every case and of `SEVERAL_QUERIES`, and the combination."""
    sides = launch_cases()
    cases = {name: _split_pass(gpu, *sides[name], 1) for name in sides}
    cases |= {name: _split_pass(gpu, *sides[case], queries) for name, (case, queries) in SEVERAL_QUERIES.items()}
    return cases | {name: _combination(splits) for name, splits in COMBINED.items()}


def _split_pass(gpu: str, keys: Side, values: Side, rotation: Rope | None, queries: int) -> Launch:
    assert keys.ring is not None
    dim = keys.ring.shape[3]
    query = _empty(ROWS, HEADS * GROUP, queries, dim, dtype=keys.ring.dtype)
    tile = choose_tile(gpu, side_spec(keys, dim), side_spec(values, dim))
    fixed = constants(query.dtype, keys, values, rotation, GROUP, dim, tile, queries=queries)
    workspace, scaling = Workspace.like(query, 8), dim**-0.5
    q = query_rows(query)
    given = arguments(q, keys, values, keys.count, rotation, scaling, workspace, queries=queries)
    tokens = fixed["K"].N
    numbers = 2 * tokens * dim
    bits = (_bits(keys) + _bits(values)) / 2
    chunks = max(_chunks(side, tokens) for side in (keys, values))
    kind, options = family(keys, values), tile.options(queries)
    spills = SPILLS.get(gpu, 0) if kind == "codebook" and queries > 1 else 0
    inner = max(1, chunks)
    return Launch(split_kernel, given, fixed, options, kind, numbers, bits, inner, spills=spills, slow=chunks > 0)


def _combination(splits: int) -> Launch:
    query = _empty(ROWS, HEADS * GROUP, DIM)
    workspace = Workspace.like(query, splits)
    given = (workspace.partial, workspace.logsum, query, workspace.programs)
    return Launch(combine_kernel, given, combine_constants(DIM, workspace.programs), COMBINE_OPTIONS)


def _chunks(side: Side, tokens: int) -> int:
    """Return the chunks of outliers per head in a tile of `tokens` tokens, with equally many outliers per head."""
    if side.outliers is None:
        return 0
    return -(-side.outliers.index.numel() * tokens // (ROWS * HEADS * TOKENS * CHUNK.value))


def _bits(side: Side) -> float:
    """Bits read per packed number: codes, scales, zero-points and outliers; codebooks stay in caches."""
    assert side.ring is not None
    parts = [tensor for _, tensor, _ in stored_tensors(side)]
    return 8 * stored_bytes(*parts) / (ROWS * HEADS * TOKENS * side.ring.shape[3])
