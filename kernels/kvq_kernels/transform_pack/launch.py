"""Launch of encoding and packing: output tensors and arguments of the kernel."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from kvq_kernels import fields
from kvq_kernels.launch_device import on_its_device
from kvq_kernels.transform_pack.kernel import AHEAD, pack_kernel
from kvq_kernels.transform_pack.tables import PackTables
from kvq_kernels.tuning import configuration, family

OPERATION = "transform_pack"


#: Channels of a group, at most: a program has the sums of 16 tokens in registers.
MAX_WIDTH = 256


def unsupported(width: int) -> str | None:
    """Reason why the kernel does not support groups of so many channels; None: it does."""
    if width > MAX_WIDTH or width % AHEAD.value:
        return f"groups have at most {MAX_WIDTH} channels, a multiple of {AHEAD.value}, not {width}"
    return None


def launch(
    x: Tensor, tables: PackTables, gpu: str
) -> tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """(grid, arguments, constants, options) of `pack_kernel`; arguments 5 and 6 are its outputs."""
    rows, groups, tokens, width = x.shape
    components, gain = tables.integers.shape[2], tables.gain
    if not all(table.is_contiguous() for table in (*tables[:9], *(() if gain is None else gain[:3]))):
        raise ValueError("the kernel reads contiguous tables")
    codes, index = tables.outputs(x)
    by_size = {part.size: out for part, out in zip(tables.parts, codes, strict=True)}
    # Missing tensors are never read or written; a pointer that is None cannot be advanced.
    parts = tuple(by_size.get(size, codes[0]) for size in fields.PIECES)
    searched = (tables.step,) * 3 if gain is None else gain[:3]
    numbers = (1.0, 1.0, 1.0) if gain is None else (gain.limit, gain.total, gain.largest)
    given = (
        x,
        x.stride()[:3],
        tables[:9],
        searched,
        (tables.limit, *numbers),
        parts,
        codes[0] if index is None else index,
        tokens,
        components,
        0 if gain is None else gain.first,
        tables.rate,
    )
    padded = max(16, triton.next_power_of_2(components))
    fixed = {"W": width, "K": padded, "VALUES": tables.values, "GAIN": gain is not None, "T": fields.BLOCK}
    config = configuration(OPERATION, "large" if padded > 128 else "small", gpu)
    options = {"num_warps": config["warps"], "num_stages": 1}
    return (tokens // fields.BLOCK, groups, rows), given, fixed, options


@on_its_device
def run_kernel(x: Tensor, tables: PackTables) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """`transform_pack` by the kernel."""
    x = x if x.stride(3) == 1 else x.contiguous()
    grid, given, fixed, options = launch(x, tables, family(x.device))
    if x.numel():
        pack_kernel[grid](*given, **fixed, **options)
    by_size = dict(zip(fields.PIECES, given[5], strict=True))
    return tuple(by_size[part.size] for part in tables.parts), None if tables.gain is None else given[6]
