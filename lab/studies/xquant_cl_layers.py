"""Which layers' differences cost XQuant-CL its loss: KL divergence where one layer's difference takes more bits.

python -m lab.studies.xquant_cl_layers ARTIFACT TEXT... [--model smollm2] [--bits 2] [--more 4] [--tokens 1024]

The artifact is what `kvq calibrate --model smollm2 --method xquant-cl --set group=64` writes, or another of XQuant-CL.
Prints KL to the uncompressed model (nats per token, mean over one window of each text, of which the second half is
scored) with all differences at `--bits`, and with one layer's at `--more`; and beside it, what the paper's argument
rests on: how large a layer's change of X is, as the root mean square of X_i - X_(i-1) over that of X_i.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from kvq_cli import load_artifact
from kvq_cli.artifact import Artifact
from kvq_cli.attention.capture_points import attention_layers
from kvq_cli.methods.base import LayerPlan, ModelShape
from kvq_cli.methods.xquant_cl import XQuantCL
from kvq_cli.models import LoadedModel, load_model
from kvq_cli.papers.studies.activation_hooks import watch_inputs
from lab.studies.kl import Windows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("texts", nargs="+", metavar="TEXT")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--bits", type=int, default=2)
    parser.add_argument("--more", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024)
    given = parser.parse_args()
    loaded = load_model(given.model, "cpu", "float32")
    artifact = load_artifact(given.artifact).with_options({"bits": given.bits})
    windows = Windows(loaded, given.texts, given.tokens)
    first, layers = artifact.method_config["base_layers"], loaded.shape.layers
    none = mean_kl(artifact, windows, {})
    every = mean_kl(artifact, windows, dict.fromkeys(range(first, layers), given.more))
    print(f"all at {given.bits} bits: KL {none:.4f}; all at {given.more} bits: KL {every:.4f}")
    print(f"{'layer':>5} {'change of X':>12} {f'at {given.more} bits':>12} {'share':>8}")
    changes = relative_changes(loaded, windows.windows)
    for layer in range(first, layers):
        kl = mean_kl(artifact, windows, {layer: given.more})
        print(f"{layer:>5} {changes[layer]:>12.3f} {kl:>12.4f} {(none - kl) / none:>8.0%}", flush=True)


def mean_kl(artifact: Artifact, windows: Windows, bits: Mapping[int, int]) -> float:
    """KL divergence with some layers' differences at other bits, mean over the windows."""
    plan = XQuantCL.plan

    def finer(method: XQuantCL, layer: int, shape: ModelShape, tensors: Mapping[str, Tensor]) -> LayerPlan:
        return plan(replace(method, bits=bits.get(layer, method.bits)), layer, shape, tensors)

    with patch.object(XQuantCL, "plan", finer):
        return windows.kl(artifact)


def relative_changes(loaded: LoadedModel, windows: list[Tensor]) -> list[float]:
    """Root mean square of X_i - X_(i-1) over that of X_i by layer, without the first token of a window."""
    sites = attention_layers(loaded.model)
    squares = torch.zeros(2, len(sites), dtype=torch.float64)
    below = [torch.zeros(())]

    def sink(layer: int, kind: str, numbers: Tensor) -> None:
        if kind == "x":
            x = numbers[1:].double()
            squares[0, layer] += (x - below[0]).square().sum()
            squares[1, layer] += x.square().sum()
            below[0] = x

    for window in windows:
        below[0] = torch.zeros(())
        watch_inputs(loaded.model, sites, window, sink)
    return (squares[0] / squares[1]).sqrt().tolist()


if __name__ == "__main__":
    main()
