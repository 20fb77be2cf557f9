"""The storage families that are compiled and read without a GPU, at Llama-3.1-8B's shapes: sides without memory."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton

from kvq_kernels.aot_cases import Launch
from kvq_kernels.decode_attention.configs import choose_tile
from kvq_kernels.decode_attention.kernel import combine_kernel, split_kernel
from kvq_kernels.decode_attention.launch import Workspace, arguments, constants
from kvq_kernels.decode_attention.outliers import PIECE
from kvq_kernels.decode_attention.parts import Codebook, Dense, Outliers, Rope, Side, Uniform
from kvq_kernels.decode_attention.spec import SideSpec
from kvq_kernels.planar import high_words, low_words

ROWS, HEADS, GROUP, DIM, TOKENS = 8, 8, 4, 128, 4096


def _empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _side(packed, dtype: torch.dtype = torch.float16) -> Side:
    windows = [_empty(ROWS, HEADS, n, DIM, dtype=dtype) for n in (32, 128)]
    return Side(packed, _empty(ROWS, dtype=torch.int32), *windows)


def uniform(bits: int, axis: str, group: int, symmetric: bool = False, dtype: torch.dtype = torch.float16) -> Side:
    words = low_words(bits, DIM) + high_words(bits, DIM)
    size = (ROWS, HEADS, TOKENS // group, DIM) if axis == "channel" else (ROWS, HEADS, TOKENS, DIM // group)
    zero, level = (None, 2 ** (bits - 1) - 1) if symmetric else (_empty(*size, dtype=dtype), 0)
    codes = _empty(ROWS, HEADS, TOKENS, words, dtype=torch.int32)
    return _side(Uniform(codes, _empty(*size, dtype=dtype), bits, axis, group, zero, level), dtype)


def codebook(block: tuple[int, int], normalize: bool = False) -> Side:
    size = block[0] * block[1]
    codes = _empty(ROWS, HEADS, TOKENS // block[0], DIM // block[1], dtype=torch.uint8)
    stats = [_empty(HEADS, DIM) for _ in range(2)] if normalize else (None, None)
    return _side(Codebook(codes, _empty(HEADS, DIM // size, 256, size), block, *stats))


def hybrid(bits: int, axis: str) -> Side:
    """InnerQ's groups of 32, symmetric or asymmetric each, with a word of sign bits or a zero-point; keys' normed."""
    side = uniform(bits, axis, 32, symmetric=True)
    word = _empty(*side.packed.scale.shape, dtype=torch.int32)
    side = replace(side, packed=replace(side.packed, level=0, sign=word, hybrid=True))
    norm = _empty(ROWS, HEADS, DIM, dtype=torch.float32)
    return replace(side, norm=norm) if axis == "token" else side


def scalars(bits: int, keys: bool) -> Side:
    """KVQuant's: one codebook of single numbers for all channels, which are normalized (keys), or tokens are."""
    words = low_words(bits, DIM) + high_words(bits, DIM)
    codes = _empty(ROWS, HEADS, TOKENS, words, dtype=torch.int32)
    stats = [_empty(HEADS, DIM) for _ in range(2)] if keys else (None, None)
    tokens = () if keys else (_empty(ROWS, 1, TOKENS), _empty(ROWS, 1, TOKENS))
    return _side(Codebook(codes, _empty(1, 1, 2**bits, 1), (1, 1), *stats, *tokens))


def with_outliers(side: Side, together: bool = False) -> Side:
    """One number in a hundred of blocks of 32 tokens of a head, or of each of their tokens of all heads together."""
    blocks = TOKENS // 32
    size = (ROWS, 1, blocks, HEADS * DIM // 100 * 32) if together else (ROWS, HEADS, blocks, 32 * DIM // 100)
    start = _empty(ROWS, 1, blocks, HEADS + 1, dtype=torch.int32) if together else None
    return replace(side, outliers=Outliers(_empty(*size, dtype=torch.int16), _empty(*size), 32, start))


def dense() -> Side:
    return _side(Dense(_empty(ROWS, HEADS, TOKENS, DIM)))


def rope() -> Rope:
    tables = [_empty(32, 2, DIM // 2, dtype=torch.float32), _empty(Rope.STEP, 2, DIM // 2, dtype=torch.float32)]
    return Rope("half", _empty(DIM // 2, dtype=torch.float32), 1.0, *tables, _empty(Rope.STEP, 2, DIM // 2))


def shipped() -> dict[str, tuple[Side, Side, Rope | None]]:
    """name -> keys, values, rotation."""
    cases: dict[str, tuple[Side, Side, Rope | None]] = {"fp16": (dense(), dense(), None)}
    for bits, group in ((1, 32), (2, 32), (2, 128), (3, 32), (4, 32), (4, 128), (8, 128)):
        keys, values = uniform(bits, "channel", group), uniform(bits, "token", group)
        cases[f"kivi-{bits}bit-g{group}"] = (keys, values, None)
    for bits in (2, 4):
        cases[f"innerq-{bits}bit"] = (uniform(bits, "token", 32), uniform(bits, "channel", 32), None)
        symmetric = [uniform(bits, axis, 32, symmetric=True) for axis in ("token", "channel")]
        cases[f"innerq-{bits}bit-inside"] = (*symmetric, None)
    halves = [uniform(2, axis, 32, dtype=torch.bfloat16) for axis in ("channel", "token")]
    cases["kivi-2bit-g32-bfloat16"] = (*halves, None)
    cases["innerq-2bit-hybrid"] = (hybrid(2, "token"), hybrid(2, "channel"), None)
    for size in (2, 4, 8):
        cases[f"temporal-{8 // size}bit"] = (codebook((size, 1), True), codebook((size, 1)), rope())
        cases[f"channel-{8 // size}bit"] = (codebook((1, size)), codebook((1, size)), rope())
    keys, values, rotation = cases["temporal-2bit"]
    cases["temporal-2bit-outliers"] = (with_outliers(keys), with_outliers(values), rotation)
    for bits in (2, 3, 4):
        cases[f"kvquant-{bits}bit"] = (scalars(bits, keys=True), scalars(bits, keys=False), rope())
    keys, values, rotation = cases["kvquant-2bit"]
    cases["kvquant-2bit-outliers"] = (with_outliers(keys), with_outliers(values, together=True), rotation)
    return cases


def family(name: str) -> str:
    keys, values, _ = shipped()[name]
    kinds = {type(side.packed) for side in (keys, values)}
    return "codebook" if Codebook in kinds else "uniform" if Uniform in kinds else "dense"


def tile_of(name: str, gpu: str):
    keys, values, _ = shipped()[name]
    return choose_tile(gpu, SideSpec.of(keys, DIM), SideSpec.of(values, DIM))


def launches(gpu: str) -> dict[str, Launch]:
    """The split pass of every family, and the combination."""
    found = {}
    for name, (keys, values, rotation) in shipped().items():
        query = _empty(ROWS, HEADS * GROUP, DIM, dtype=keys.ring.dtype)
        workspace = Workspace.like(query, 8)
        tile = tile_of(name, gpu)
        fixed = constants(query.dtype, keys, values, rotation, GROUP, DIM, tile)
        given = arguments(query, keys, values, keys.count, rotation, DIM**-0.5, workspace)
        numbers = 2 * fixed["N"] * DIM
        bits = (_bits(keys) + _bits(values)) / 2
        turns = max(_pieces(side, fixed["N"]) for side in (keys, values))
        options = tile.options()
        found[name] = Launch(split_kernel, given, fixed, options, family(name), numbers, bits, max(1, turns), turns > 0)
    given = (workspace.partial, workspace.logsum, query, workspace.splits + 1)
    found["combine"] = Launch(combine_kernel, given, {"D": DIM, "WIDE": DIM, "S": triton.next_power_of_2(9)})
    return found


def _pieces(side: Side, tokens: int) -> int:
    """In how many pieces the outliers of a tile of so many tokens of one head are added, where heads have as many."""
    if side.outliers is None:
        return 0
    return -(-side.outliers.index.numel() * tokens // (ROWS * HEADS * TOKENS * PIECE.value))


def _bits(side: Side) -> float:
    """Read per packed number: codes, scales, zero-points and outliers; codebooks stay in the caches."""
    packed = side.packed
    parts = [packed.numbers] if isinstance(packed, Dense) else [packed.codes]
    if isinstance(packed, Uniform):
        parts += [part for part in (packed.scale, packed.zero, packed.sign) if part is not None]
    if isinstance(packed, Codebook) and packed.token_scale is not None:
        parts += [packed.token_scale, packed.token_zero]
    if side.outliers is not None:
        lists = side.outliers
        parts += [lists.index, lists.value, *([] if lists.start is None else [lists.start])]
    return 8 * sum(part.numel() * part.element_size() for part in parts) / (ROWS * HEADS * TOKENS * DIM)
