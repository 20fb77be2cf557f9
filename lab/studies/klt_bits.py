"""Print what each restriction of klt's storage costs (docs/METHOD.md), by expected loss on captured activations.

    python -m lab.studies.klt_bits results/captured/smollm2/NAME --samples 16

The folder is one that `kvq calibrate --method klt --captured` keeps. Each head has its own transform and
gains. A loss is also given in bits: how many more bits per number it takes to lose as little as fields of 8 components
that choose their widths alone, head by head.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from kvq_cli.calibration.allocation import MENU_OF_LAYER, Allocation
from kvq_cli.calibration.captured import CapturedStream
from kvq_cli.calibration.profiles import RATE, Floats, Profiles
from kvq_cli.calibration.transforms import TransformSettings, effective_tokens, fit_transform
from kvq_cli.calibration.work_folder import WorkFolder

BITS = (2.0, 2.25, 2.5, 3.0, 4.0)
MENUS = (8, 4, 2, 1)
SETTINGS = TransformSettings(groups=1, metric="full", gain=True, fisher=True, damping=0.1)


def stream_names(folder: Path) -> list[str]:
    """The captured streams, layer by layer: `0.k`, `0.v`, `1.k`, ..."""
    names = [file.name.removesuffix(".x.bf16") for file in folder.glob("*.x.bf16")]
    return sorted(names, key=lambda name: (int(name.split(".")[0]), name))


def read_stream(folder: Path, name: str, options: argparse.Namespace) -> CapturedStream:
    """What was captured of a stream, all of it for training. options: `heads`, `head_dim`, `samples`."""
    row = 2 * options.heads * options.head_dim
    tokens = (folder / f"{name}.x.bf16").stat().st_size // row // options.samples
    shape = (options.samples, tokens, options.heads, options.head_dim)
    x, g = (WorkFolder(folder).read_samples(f"{name}.{quantity}", shape) for quantity in "xg")
    return CapturedStream(x, g, held_out=0)


def losses_of_heads(captured: CapturedStream) -> list[Floats]:
    """The losses `[fields, 9]` of each head, which has a transform of its own."""
    settings = replace(SETTINGS, groups=captured.x.shape[2])
    return list(fit_transform(captured, settings).losses.numpy())


def free_fields(heads: Sequence[Floats], nbytes: float) -> float:
    """The least loss of fields with any widths, `nbytes` together: a byte of a field is one bit of width."""
    losses, low, high = np.concatenate(heads), -300.0, 300.0

    def widths(price: float) -> Floats:
        return (losses + 2.0**price * np.arange(9)).argmin(1)

    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if widths(middle).sum() > nbytes else (low, middle)
    return float(losses[np.arange(len(losses)), widths(high)].sum())


def allocated(
    units: Sequence[tuple[Floats, Floats]],
    groups: int,
    nbytes: float,
    menu: int,
    layers: Sequence[int] | None = None,
) -> float:
    """The loss of layers, or of heads in `layers`."""
    pairs = Allocation(units, (groups, groups), int(nbytes / RATE), menu, layers=layers).solve()
    return sum(
        Profiles(side).loss(widths)
        for unit, pair in zip(units, pairs, strict=True)
        for side, widths in zip(unit, pair, strict=True)
    )


def restrictions(heads: dict[str, list[Floats]], nbytes: float) -> Iterator[tuple[str, float]]:
    """What is restricted, and the least expected loss. heads: losses of each stream's heads. nbytes: of codes."""
    yield "fields of 8 components, any width", free_fields([row for rows in heads.values() for row in rows], nbytes)
    layers = range(len(heads) // 2)
    count = len(heads["0.k"])
    units = [(heads[f"{layer}.k"][head], heads[f"{layer}.v"][head]) for layer in layers for head in range(count)]
    of_unit = [layer for layer in layers for _ in range(count)]
    yield "whole bytes a lane, a profile of each head", allocated(units, 1, nbytes, len(units))
    for menu in MENUS[:2]:
        yield f"each head one of {menu} pairs of profiles", allocated(units, 1, nbytes, menu)
    shared = f"each head one of 8 pairs, {MENU_OF_LAYER} in a layer"
    yield shared, allocated(units, 1, nbytes, MENUS[0], of_unit)
    summed = [(np.sum(heads[f"{layer}.k"], axis=0), np.sum(heads[f"{layer}.v"], axis=0)) for layer in layers]
    yield "whole bytes a lane, a profile of all heads of a layer", allocated(summed, count, nbytes, len(summed))
    for menu in MENUS:
        yield f"each layer one of {menu} pairs of profiles", allocated(summed, count, nbytes, menu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--heads", type=int, default=3, help="kv heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    heads = {}
    for name in stream_names(options.folder):
        captured = read_stream(options.folder, name, options)
        heads[name] = losses_of_heads(captured)
        print(f"{name}: {effective_tokens(captured):.0f} effective tokens")
    streams = len(heads) * options.heads

    def nbytes(bits: float) -> float:
        return bits * streams * options.head_dim / 8 - streams  # a gain of a byte each

    every = [row for rows in heads.values() for row in rows]
    scale = np.arange(0.5, 6, 0.05)
    curve = np.log([free_fields(every, nbytes(bits)) for bits in scale])
    for bits in BITS:
        for what, loss in restrictions(heads, nbytes(bits)):
            lost = bits - np.interp(-np.log(loss), -curve, scale)
            print(f"{bits:<5} {what:54} loss {loss:.3e}  bits lost {lost:.3f}")


if __name__ == "__main__":
    main()
