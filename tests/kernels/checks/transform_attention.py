"""Random transform codes, and a check that attention over them by the kernels is as good as PyTorch's."""

from __future__ import annotations

import torch
from kernel_cases import assert_error_at_most_twice
from kvq_kernels import fields
from kvq_kernels.decode_attention import Dense, PerHead, Rope, Side
from kvq_kernels.decode_attention.pages import changed
from kvq_kernels.decode_attention.reference import decode_attention_reference
from kvq_kernels.transform_attention import Transform, Transformed, new_workspace, transform_attention
from paged_cases import paged

TYPES = {32: torch.int32, 16: torch.int16, 8: torch.uint8}


def pack(codes, widths, keys):
    """Tensors of all parts of codes [B, G, T, K], as `fields` places them; T is a multiple of 16."""
    rows, groups, tokens, _ = codes.shape
    by_field = codes.unflatten(3, (-1, 8)).movedim(3, 0) if widths else ()
    shape = (rows, groups, tokens, 4) if keys else (rows, groups, tokens // 16, 8, 8)
    packed = []
    for number, part in enumerate(fields.parts(fields.rate(widths))):
        words = torch.zeros(*shape, part.words, dtype=torch.int64)
        for x, width, place in zip(by_field, widths, fields.places(widths), strict=True):
            if place.part == number:
                # Keys: component 2 lane + half. Values: token 2 pair + half, component lane.
                x = x.unflatten(3, (4, 2)) if keys else x.unflatten(2, (-1, 8, 2)).transpose(4, 5)
                assert int(x.max()) < 2**width
                at = place.shift + place.offset
                words[..., place.word] |= x[..., 0] << at | x[..., 1] << (at + part.room)
        signed = torch.where(words >= 2 ** (part.bits - 1), words - 2**part.bits, words) if part.bits > 8 else words
        packed.append(signed.to(TYPES[part.bits]))
    return tuple(packed)


class Case:
    """Random cache with rows of `lengths` tokens: sinks, packed tokens in blocks of 16, at least `recent` others.

    keys, values: widths of the fields, or of each of `members`, tuples of kv heads; of the keys and of the values where
    they differ. joined: one transform of all heads. gain: whether keys and values have one.
    """

    def __init__(self, lengths, keys=(4, 3, 2, 2), values=(3, 2, 2, 1), dim=32, heads=2, group=2, dtype=torch.float16,
                 sinks=3, recent=2, rope="half", rotated=None, scale=1.1, offset=0, window=None, gain=(True, True),
                 joined=False, packed=True, mean=1.0, seed=0, members=None, value_members=None):  # fmt: skip
        g = torch.Generator().manual_seed(seed)
        rows, self.dtype, self.window = len(lengths), dtype, window
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.query = torch.randn(rows, heads * group, dim, generator=g).to(dtype)
        count = ((self.lengths - sinks - recent).clamp_min(0) // 16 * 16).int()
        room, ring_size, self.rope = max(16, int(count.max())), recent + 16, None
        if rope is not None:
            offsets = torch.full((rows,), offset, dtype=torch.int32) if offset else None
            width = rotated or dim
            frequencies = 10000.0 ** (-torch.arange(width // 2) * 2 / width)
            self.rope = Rope.tables(rope, frequencies, max(lengths) + offset + 1, scale=scale, offset=offsets)

        def random(*shape):
            return torch.randn(*shape, generator=g)

        def stored(widths, heads, keys, gains):
            groups, width = (1, heads * dim) if joined else (heads, dim)
            bits = torch.tensor([float(w) for w in widths for _ in range(8)])
            none = torch.zeros(rows, groups, room, 0, dtype=torch.int64)
            codes = [torch.randint(0, 2**w, (rows, groups, room, 8), generator=g) for w in widths]
            codes = torch.cat([none, *codes], dim=3)
            center = (2.0**bits - 1) / 2 + 0.1 * random(groups, len(bits))
            synthesis = random(groups, width, len(bits)) * 2.0**-bits / max(1, len(bits)) ** 0.5 * 3
            numbers = tuple(widths), synthesis, mean * random(groups, width), center
            rotation = None if rope is None else (rope, rotated or dim)
            make = (Transform.of_keys, (dim, rotation)) if keys else (Transform.of_values, (dim,))
            gain = torch.randint(100, 150, (rows, groups, room), generator=g).byte() if gains else None
            return Transformed(pack(codes, tuple(widths), keys), gain, make[0](*numbers, *make[1]))

        def side(widths, members, keys, gains):
            if members is None:
                held = stored(widths, heads, keys, gains)
            else:
                each = (stored(x, len(own), keys, gains) for x, own in zip(widths, members, strict=True))
                held = PerHead(tuple(each), members)
            sinks_tensor = random(rows, heads, sinks, dim).to(dtype) if sinks else None
            ring = random(rows, heads, ring_size, dim).to(dtype)
            return Side(held if packed else Dense(ring), count, sinks_tensor, ring)

        self.sides = [side(keys, members, True, gain[0]), side(values, value_members or members, False, gain[1])]
        self.scaling = dim**-0.5

    @property
    def keys(self):
        return self.sides[0]

    @property
    def values(self):
        return self.sides[1]

    def in_pages(self, block_size, first=0):
        """(case, the same in shuffled pages); see `paged_cases.paged`."""
        plain, new = paged(self, block_size, first=first)
        new.sides = [changed(side, lambda x: x.squeeze(2)) for side in new.sides]
        return plain, new

    def run(self, poisoned=True):
        """Output of the kernels; their buffers are filled with NaN before."""
        out = torch.full_like(self.query, torch.nan)
        workspace = new_workspace(self.query, *self.sides)
        workspace.partial.fill_(torch.nan)
        workspace.logsum.fill_(torch.nan)
        args = (self.query, *self.sides, self.lengths, self.scaling)
        options = {"rope": self.rope, "window": self.window}
        return transform_attention(*args, **options, workspace=workspace, out=out, backend="triton")

    def reference(self, dtype, round_to=None):
        args = (self.query, *self.sides, self.lengths, self.scaling, self.rope)
        return decode_attention_reference(*args, dtype, round_to, self.window)

    def check(self, floor=5e-4):
        """Assert at most twice PyTorch's error, or 2 `floor` of 16-bit queries: a key is rounded five times to float16,
        and its transform once."""
        exact, out = self.reference(torch.float64), self.run()
        floor = 0 if self.dtype == torch.float32 else floor
        assert_error_at_most_twice(out, self.reference(torch.float32, self.dtype).to(self.dtype), exact, floor)
