"""Print expected loss and cost of forms of klt's transform of the keys (docs/METHOD.md): of all kv heads together or of
each head, whole or block-diagonal by bands of RoPE frequencies.

    python -m lab.studies.klt_forms results/captured/smollm2/NAME

The folder is one that `kvq calibrate --captured` or `kvq reproduce` keeps. Values have one transform for all heads, and
codes are given out over the whole model, as klt does. The loss is relative to that of a transform per head. The cost is
what a decoded token takes: multiply-adds of the product with S, and components that are looked up, per layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvq_cli.calibration.allocation import Layouts, allocate
from kvq_cli.calibration.captured import CapturedStream
from lab.studies.klt_study import Floats, components, folder_options, read_stream, stream_names

BITS = (1.0, 2.0, 3.0)
BANDS = (1, 2, 4, 8)


def in_bands(x: Tensor, bands: int, joined: bool) -> Tensor:
    """Channels in an order in which those of a transform are adjacent: `[samples, tokens, kv_heads, head_dim]`.

    A band has the channels i and i + head_dim / 2 of adjacent frequencies, which RoPE rotates together.
    """
    split = x.unflatten(3, (2, bands, -1))  # [S, T, H, 2, bands, frequencies]
    order = (0, 1, 4, 2, 3, 5) if joined else (0, 1, 2, 4, 3, 5)
    return split.permute(order).reshape(x.shape)


def main() -> None:
    options = folder_options(str(__doc__)).parse_args()
    torch.set_num_threads(1)
    forms = [(joined, bands) for joined in (False, True) for bands in BANDS]
    keys: dict[tuple[bool, int], list[Floats]] = {form: [] for form in forms}
    values: list[Floats] = []
    for name in stream_names(options.folder):
        captured = read_stream(options.folder, name, options)
        if name.endswith("v"):
            values += components(captured, 1)[0]
            continue
        for joined, bands in forms:
            banded = CapturedStream(*(in_bands(each, bands, joined) for each in (captured.x, captured.g)), held_out=0)
            keys[joined, bands] += components(banded, bands * (1 if joined else options.heads))[0]
    print("bits  transform of         bands  loss   multiply-adds  components of keys")
    for bits in BITS:
        base = None
        for (joined, bands), rows in keys.items():
            loss, cost, kept = measured(rows, values, int(bits * 2 * sum(map(len, values)) / 8))
            base = base or loss
            what = "all heads" if joined else "each head"
            layers = len(values)
            print(f"{bits:<5} {what:20} {bands:<6} {loss / base:<6.3f} {cost / layers:<14.0f} {kept / layers:.0f}")


def measured(keys: Sequence[Floats], values: Sequence[Floats], codes: int) -> tuple[float, int, int]:
    """(expected loss of keys and values, multiply-adds of the keys' components, their number) of a token."""
    rows = [*keys, *values]
    lengths = allocate(rows, codes)
    loss = float(np.sum([Layouts(row).losses[len(chunks)] for row, chunks in zip(rows, lengths, strict=True)]))
    kept = [sum(chunks) for chunks in lengths[: len(keys)]]
    return loss, sum(n * len(row) for n, row in zip(kept, keys, strict=True)), sum(kept)


if __name__ == "__main__":
    main()
