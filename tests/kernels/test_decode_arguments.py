"""Arguments that decode attention refuses, and the tiles that it chooses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from kernel_cases import HALF, TEMPORAL, Case, codebook, dense, random_outliers, uniform
from kvq_kernels.decode_attention import Workspace, decode_attention
from kvq_kernels.decode_attention.arguments import side_spec
from kvq_kernels.decode_attention.configs import choose_tile

pytestmark = pytest.mark.gpu


def test_shapes_that_do_not_fit_are_refused():
    case = Case(uniform, uniform, [100], heads=2, group=1)
    with pytest.raises(ValueError, match="lengths"):
        decode_attention(case.query, *case.sides, case.lengths[:0], case.scaling)
    with pytest.raises(ValueError, match="kv heads"):
        decode_attention(case.query[:, :1], *case.sides, case.lengths, case.scaling)


def test_layouts_that_kernels_do_not_read_are_refused():
    case = Case(*TEMPORAL, [100, 90], **HALF, unpacked=(8, 8))
    keys, values = case.sides
    one = torch.tensor([90], dtype=torch.int32).expand(2)

    def refused(says: str, keys=keys, values=values, lengths=case.lengths, **options) -> None:
        with pytest.raises(ValueError, match=says):
            decode_attention(case.query, keys, values, lengths, case.scaling, **{"rope": case.rope, **options})

    refused("pass lengths.contiguous", lengths=one)
    refused("pass values.count.contiguous", values=replace(values, count=one))
    refused("pass rope.offset.contiguous", rope=replace(case.rope, offset=one))
    refused("rope.offset must have one number per row", rope=replace(case.rope, offset=one[:1]))
    refused("out must be contiguous", out=torch.empty(2, 64, 2, dtype=case.query.dtype).mT)
    refused("out must be contiguous", out=torch.empty_like(case.query[:1]))
    for like in (case.query[:1], case.query[:, :1], case.query[..., :32]):
        refused(r"make it with Workspace.like\(query", workspace=Workspace.like(like, 2))
    for missing in ("mean", "std"):
        packed = replace(keys.packed, **{missing: None})
        refused("pass both or neither", keys=replace(keys, packed=packed))
    refused(
        "pass both or neither", values=replace(values, packed=replace(values.packed, token_scale=torch.ones(2, 1, 128)))
    )
    with pytest.raises(ValueError, match="at least 1"):
        Workspace.like(case.query, 0)


def test_pytorch_writes_the_output_that_is_given():
    case = Case(dense, dense, [40, 7], heads=2, group=1)
    given = case.query, *case.sides, case.lengths, case.scaling
    new = decode_attention(*given, backend="torch")
    out = torch.full_like(new, torch.nan)
    assert decode_attention(*given, backend="torch", out=out) is out and torch.equal(out, new)
    with pytest.raises(ValueError, match="keys have 0 sinks, values 1"):
        decode_attention(case.query, case.sides[0], replace(case.sides[1], sinks=torch.zeros(2, 2, 1, 64)), *given[3:])


def test_tiles_longer_than_the_tables_of_cosines_are_refused():
    lists = partial(random_outliers, tokens=256)
    case = Case(*TEMPORAL, [200], **HALF, outliers=(lists, None))
    with pytest.raises(ValueError, match="blocks of at most 128"):
        case.run()
    with pytest.raises(ValueError, match="codes of at most 8"):
        Case(*(partial(codebook, block=(16, 1), share=1),) * 2, [200], **HALF).run()


@pytest.mark.parametrize(
    ("dim", "dtype", "tokens"), [(64, torch.float16, 64), (128, torch.float16, 64), (256, torch.bfloat16, 32),
                                 (128, torch.float32, 32), (192, torch.float32, 16), (512, torch.float32, 16)]
)  # fmt: skip
def test_large_dense_tokens_get_small_tiles(dim, dtype, tokens):
    """At most the 64 KB of keys and values that are loaded ahead for 128 channels of 16 bits."""
    spec = side_spec(Case(dense, dense, [1], dim=dim).sides[0], dim)
    tile = choose_tile("sm_89", *[replace(spec, itemsize=dtype.itemsize)] * 2)
    assert tile.tokens == tokens
    assert (tile.stages - 1) * tile.tokens * 2 * dim * dtype.itemsize <= 65536
    assert tile.stages == (2 if dim == 512 else 3)
