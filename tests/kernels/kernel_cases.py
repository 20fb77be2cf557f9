"""Random packed caches of every storage family, from random bits; the reference dequantizes them."""

from __future__ import annotations

from functools import partial

import torch
from kvq_kernels.decode_attention import (
    Codebook,
    Dense,
    Directions,
    Outliers,
    PerHead,
    Rope,
    Side,
    Uniform,
    Workspace,
    decode_attention,
)
from kvq_kernels.decode_attention.reference import decode_attention_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def words(bits: int, count: int) -> int:
    """Planar words of `count` codes."""
    return sum(-(-count * part // 32) for part in {3: (2, 1)}.get(bits, (bits,)))


def random_words(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=generator)


def uniform(g, shape, dtype, bits=2, axis="channel", group=32, mode="asymmetric") -> Uniform:
    """mode: "asymmetric", "inside" (symmetric, signed codes), "extra" (symmetric, sign words), "hybrid-extra"."""
    rows, heads, tokens, dim = shape
    groups = (-(-tokens // group), dim) if axis == "channel" else (tokens, dim // group)
    size = (rows, heads, *groups)
    scale = (torch.rand(size, generator=g) + 0.2) * 3 / 2**bits
    zero, level, sign, hybrid = (torch.randn(size, generator=g) - 1.5).to(dtype), 0, None, mode.startswith("hybrid")
    if mode == "inside":
        level = 2 ** (bits - 1) - 1
    if mode.endswith("extra"):
        sign = random_words(g, *size)
    if hybrid:
        flip = torch.rand(size, generator=g) < 0.5
        scale = torch.where(flip, -scale, scale)
        sign = torch.where(flip, zero.float().view(torch.int32), sign)
    keeps_zero = mode == "asymmetric"
    codes = random_words(g, rows, heads, tokens, words(bits, dim))
    return Uniform(codes, scale.to(dtype), bits, axis, group, zero if keeps_zero else None, level, sign, hybrid)


def codebook(
    g, shape, dtype, block=(4, 1), entries=256, share=4, normalize=False, per_token=False, book_heads=None
) -> Codebook:
    """book_heads: number of heads with codebooks (default: all; one codebook for all heads with `per_token`)."""
    rows, heads, tokens, dim = shape
    size, book_heads = block[0] * block[1], book_heads or (1 if per_token else heads)
    centroids = torch.randn(book_heads, dim // share, entries, size, generator=g).to(dtype)
    count = (rows, heads, -(-tokens // block[0]))
    if entries == 256:
        codes = torch.randint(0, 256, (*count, dim // block[1]), dtype=torch.uint8, generator=g)
    else:
        codes = random_words(g, *count, words(entries.bit_length() - 1, dim // block[1]))
    stats = [0.5 * torch.randn(heads, dim, generator=g), 0.5 + 0.5 * torch.rand(heads, dim, generator=g)]
    stats = [x.half() for x in stats]
    token = [(torch.rand(rows, 1, tokens, generator=g) + 0.5).to(dtype) for _ in range(2)] if per_token else []
    return Codebook(codes, centroids, block, *(stats if normalize else (None, None)), *token)


def directions(g, shape, dtype, bits=4, unit=True) -> Directions:
    rows, heads, tokens, dim = shape
    codes = random_words(g, rows, heads, tokens, words(bits, dim))
    norm = (torch.rand(rows, heads, tokens, 1, generator=g) * 8 + 1).half()
    return Directions(codes, norm, torch.randn(2**bits, generator=g).sort().values / dim**0.5, bits, unit)


def dense(g, shape, dtype, stored=None) -> Dense:
    """stored: type of the numbers, instead of `dtype`."""
    return Dense(torch.randn(shape, generator=g).to(stored or dtype))


def per_head(g, shape, dtype, makers, heads) -> PerHead:
    """Different storage per head: kv heads heads[i] by makers[i]."""
    rows, _, tokens, dim = shape
    stored = [
        make(g, (rows, len(stored_heads), tokens, dim), dtype) for make, stored_heads in zip(makers, heads, strict=True)
    ]
    return PerHead(tuple(stored), heads)


def scalars(bits, dim=64):
    """Makers of KVQuant's keys and values: one scalar codebook for all channels."""
    make = partial(codebook, block=(1, 1), entries=2**bits, share=dim)
    return partial(make, normalize=True), partial(make, per_token=True)


def random_outliers(g, shape, dtype, tokens=32, capacity=5, pooled=False) -> Outliers:
    """`capacity` outliers in each block of `tokens` tokens of a head or, pooled, of all heads."""
    rows, heads, count, dim = shape
    lists, numbers = (rows, heads, count // tokens), tokens * dim
    if pooled:
        positions = (
            torch.rand(rows, 1, count // tokens, heads * numbers, generator=g).topk(capacity).indices.sort().values
        )
        bounds = (torch.arange(heads + 1) * numbers).expand(*positions.shape[:3], -1).contiguous()
        index, start = positions % numbers, torch.searchsorted(positions, bounds).int()
    else:
        index, start = torch.rand(*lists, numbers, generator=g).topk(capacity).indices, None
    return Outliers(index.to(torch.int16), (3 * torch.randn(index.shape, generator=g)).to(dtype), tokens, start)


TEMPORAL = (partial(codebook, normalize=True), codebook)
CHANNEL = (partial(codebook, block=(1, 4)), partial(codebook, block=(1, 4)))
HALF = {"rope": ("half", 64), "offset": 3}


def assert_error_at_most_twice(out, in_torch, exact, floor: float = 0.0) -> None:
    """Assert that the error of `out` is at most twice PyTorch's, against `exact` in float64.

    PyTorch's error counts as `floor` or a quarter of the type's last digit, if it is less.
    """
    assert out.isfinite().all()
    error, other = ((x.double() - exact).norm() / exact.norm() for x in (out, in_torch))
    other = max(other, floor, torch.finfo(out.dtype).eps / 4)
    print(f"error / PyTorch's: {error / other:.2f}")
    assert error <= 2 * other, f"error {error:.3g}, PyTorch's {other:.3g}"


class Case:
    """Random cache with rows of `lengths` tokens: sinks, packed tokens, and `unpacked` (keys', values') recent ones."""

    def __init__(self, make_keys, make_values, lengths, dim=64, heads=1, group=2, dtype=torch.float16, sinks=0,
                 unpacked=(0, 0), rope=None, offset=0, rope_scale=1.0, outliers=(None, None), norm=False, window=None,
                 seed=0):  # fmt: skip
        g = torch.Generator().manual_seed(seed)
        rows, self.dtype = len(lengths), dtype
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        room = -(-max(lengths) // 128) * 128
        self.query = torch.randn(rows, heads * group, dim, generator=g).to(dtype)
        self.sides = []
        self.window = window
        for make, waiting, choose in zip((make_keys, make_values), unpacked, outliers, strict=True):
            side_dtype = dtype if dtype != torch.float32 else torch.float16
            packed = make(g, (rows, heads, room, dim), side_dtype)
            lists = None if choose is None else choose(g, (rows, heads, room, dim), side_dtype)
            count = (self.lengths - sinks - waiting).clamp_min(0) // 8 * 8
            sizes = sinks, waiting + 19
            windows = [torch.randn(rows, heads, n, dim, generator=g).to(dtype) for n in sizes]
            count = (self.lengths - sinks).clamp_min(0) if waiting == 0 else count
            windows = windows[0] if sinks else None, windows[1] if waiting else None
            norms = torch.rand(rows, heads, dim, generator=g) + 0.5 if norm and not self.sides else None
            self.sides.append(Side(packed, count.int(), *windows, lists, norms))
        self.rope = None
        if rope is not None:
            style, width = rope
            frequencies = 10000.0 ** (-torch.arange(width // 2) * 2 / width)
            offsets = torch.full((rows,), offset, dtype=torch.int32) if offset else None
            self.rope = Rope.tables(style, frequencies, room + 256, scale=rope_scale, offset=offsets)
        self.scaling = dim**-0.5

    def several(self, queries: int) -> Case:
        """The case with so many random queries per row."""
        rows, heads, dim = self.query.shape
        noise = torch.Generator().manual_seed(1)
        self.query = torch.randn(rows, heads, queries, dim, generator=noise).to(self.dtype)
        return self

    def run(self, splits: int = 2) -> torch.Tensor:
        """Output of the kernels; their buffers are filled with NaN before."""
        workspace = self.workspace = Workspace.like(self.query, splits)
        out = torch.full_like(self.query, torch.nan)
        for poisoned in (workspace.partial, workspace.logsum):
            poisoned.fill_(torch.nan)
        args = (self.query, *self.sides, self.lengths, self.scaling)
        return decode_attention(
            *args, rope=self.rope, window=self.window, workspace=workspace, out=out, backend="triton"
        )

    def reference(self, dtype: torch.dtype, round_to: torch.dtype | None = None) -> torch.Tensor:
        args = (self.query, *self.sides, self.lengths, self.scaling, self.rope, dtype, round_to, self.window)
        return decode_attention_reference(*args)

    def check(self, splits: int = 2) -> None:
        """Assert at most twice PyTorch's error, which dequantizes to the model's type and computes in float32."""
        exact, out = self.reference(torch.float64), self.run(splits)
        assert_error_at_most_twice(out, self.reference(torch.float32, self.dtype).to(self.dtype), exact)
