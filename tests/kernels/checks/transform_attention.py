"""Random transform codes, and a check that attention over them by the kernels is as good as PyTorch's."""

from __future__ import annotations

import torch
from checks.spans import SpanCase
from kvq_kernels.decode_attention import Dense, Side
from kvq_kernels.transform_attention import Steps, Transform, Transformed, TransformWorkspace, transform_attention
from kvq_kernels.transform_attention.reference import transform_attention_reference

#: By the components of a chunk, the chunks of each group of heads.
JOINED = {1: [3], 2: [10], 4: [5], 8: [1]}


class Case(SpanCase):
    """Random cache with rows of `lengths` tokens: sinks, packed tokens in whole blocks, and `unpacked` recent ones.

    keys, values: chunks of each group of heads by their components; as many groups as lists have items.
    """

    SIZES = (128, 2, 2)
    operation, reference_of, workspace_of = transform_attention, transform_attention_reference, TransformWorkspace.like

    def __init__(self, lengths, keys=None, values=JOINED, dim=32, heads=2, group=2, dtype=torch.float16, sinks=0,
                 unpacked=0, flush=8, rope="half", rotated=None, offset=0, window=None, words=16, stored=None,
                 packed=True, seed=0):  # fmt: skip
        g = torch.Generator().manual_seed(seed)
        rows, self.dtype, self.window = len(lengths), dtype, window
        keys = keys or {1: [2, 0], 2: [4, 3], 4: [3, 0], 8: [0, 2]}
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.query = torch.randn(rows, heads * group, dim, generator=g).to(dtype)
        count = ((self.lengths - sinks - unpacked).clamp_min(0) // flush * flush).int()
        room, ring_size = max(32, -(-max(lengths) // 32) * 32), unpacked + flush
        stored = stored or (dtype if dtype != torch.float32 else torch.float16)

        def random(*shape):
            return torch.randn(*shape, generator=g)

        def side(counts):
            groups = len(next(iter(counts.values())))
            kept = [sum(size * chunks[i] for size, chunks in counts.items()) for i in range(groups)]
            channels = heads * dim // groups
            synthesis = torch.cat([(random(channels, n) / max(1, n) ** 0.5).flatten() for n in kept])
            device = torch.get_default_device()
            steps = Steps.of(counts, channels, words, device)
            transform = Transform(random(sum(kept), 256).to(stored), synthesis, random(heads, dim), steps)
            codes = torch.randint(0, 256, (rows, 1, room, sum(map(sum, counts.values()))), generator=g).byte()
            exact = random(rows, heads, sinks, dim).to(dtype) if sinks else None, random(rows, heads, ring_size, dim)
            ring = exact[1].to(dtype)
            return Transformed(codes if packed else None, transform, Side(Dense(ring), count, exact[0], ring))

        self.keys, self.values = side(keys), side(values)
        self.make_rope(rope, rotated or dim, offset, room)
        self.scaling = dim**-0.5
