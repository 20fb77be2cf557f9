"""Print what limits klt on captured activations: how codes are given out, what finer codes for single components would
save, and what chunks of two tokens would (docs/METHOD.md).

    python -m lab.studies.klt_study results/captured/smollm2/NAME [--join-keys]

The folder is one that `kvq calibrate --captured` or `kvq reproduce` keeps.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from kvq_cli.calibration.allocation import CHUNKS, allocate
from kvq_cli.calibration.captured import CapturedStream
from kvq_cli.calibration.transforms import fit_transform
from kvq_cli.calibration.work_folder import WorkFolder

Floats = NDArray[np.float64]
BITS = (1.0, 1.5, 2.0, 3.0, 4.0)


def water_filling(variances: Floats, weights: Floats, bits: float, most: float = np.inf) -> float:
    """Least squared error of independent Gaussians at `bits` per number on average, by reverse water-filling.

    weights: how many numbers each variance stands for. most: bits that a number can have. The level is found by
    bisection of its logarithm.
    """
    low, high = -80.0, float(np.log2(variances.max()))
    for _ in range(100):
        level = (low + high) / 2
        rates = np.clip(0.5 * (np.log2(np.maximum(variances, 1e-300)) - level), 0.0, most)
        low, high = (level, high) if (rates * weights).sum() > bits * weights.sum() else (low, level)
    return float((weights * variances * np.exp2(-2 * rates)).sum())


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


def folder_options(description: str) -> argparse.ArgumentParser:
    """A parser of the folder and of the sizes of what was captured there."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--heads", type=int, default=3, help="kv heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16)
    return parser


def components(captured: CapturedStream, groups: int) -> tuple[list[Floats], Floats]:
    """Variances of the components by group, and the correlation of each component with itself a token before."""
    fitted = fit_transform(captured, groups, "full")
    x = captured.x.double().flatten(2).unflatten(2, (groups, -1)).permute(2, 0, 1, 3)  # [G, samples, tokens, W]
    z = (x - fitted.mean.view(groups, 1, 1, -1)) @ fitted.analysis.mT.unsqueeze(1)
    ahead = (z[:, :, 1:] * z[:, :, :-1]).mean((1, 2))
    correlation = ahead / z.square().mean((1, 2)).clamp_min(1e-300)
    return [row.numpy() for row in fitted.variances], correlation.flatten().numpy()


def main() -> None:
    parser = folder_options(str(__doc__))
    parser.add_argument("--join-keys", action="store_true", help="one transform for the keys of all kv heads")
    options = parser.parse_args()
    torch.set_num_threads(1)
    groups_of = {"k": 1 if options.join_keys else options.heads, "v": 1}
    variances: list[Floats] = []
    kinds: list[str] = []
    correlations = []
    for name in stream_names(options.folder):
        kind = name.split(".")[1]
        rows, correlation = components(read_stream(options.folder, name, options), groups_of[kind])
        variances += rows
        kinds += [kind] * len(rows)
        correlations.append(correlation)
    every, ones = np.concatenate(variances), np.ones(sum(map(len, variances)))
    rho = np.clip(np.concatenate(correlations), -0.999, 0.999)
    pairs = np.concatenate([every * (1 + rho), every * (1 - rho)])
    for kind in "kv":
        total = sum(row.sum() for row, each in zip(variances, kinds, strict=True) if each == kind)
        print(f"loss of dropping all {kind}: {total / every.sum():.3f} of both")
    print(f"correlation of adjacent tokens, weighted by variance: {(rho * every).sum() / every.sum():.3f}")
    print("bits  bits of k  of v  dropped  chunks of 1  2  4  8  finer codes  two tokens   (loss / loss as it is)")
    for bits in BITS:
        lengths = allocate(variances, int(bits * len(every) / 8))
        sizes = [length for row in lengths for length in row]
        of = {
            kind: 8
            * sum(len(row) for row, each in zip(lengths, kinds, strict=True) if each == kind)
            / sum(len(row) for row, each in zip(variances, kinds, strict=True) if each == kind)
            for kind in "kv"
        }
        shares = [sizes.count(size) / len(sizes) for size in CHUNKS]
        capped = water_filling(every, ones, bits, most=8)
        finer = water_filling(every, ones, bits) / capped
        two = water_filling(pairs, np.full(len(pairs), 0.5), bits, most=8) / capped
        dropped = 1 - sum(sizes) / len(every)
        print(
            f"{bits:<5} {of['k']:<10.2f} {of['v']:<5.2f} {dropped:<8.3f}",
            *(f"{share:.3f}" for share in shares),
            f"     {finer:.3f}        {two:.3f}",
        )


if __name__ == "__main__":
    main()
