"""Measure what the mean of the keys costs rotated codes: KL divergence with it, and with it taken off before packing.

python -m lab.studies.key_means METHOD... [--model smollm2] [--texts TEXT,...] [--tokens 1024] [--set OPTION=VALUE]

METHOD is a name as for `kvq eval --compare`, or the folder of an artifact. Prints the share of the energy of keys
after RoPE that their mean has, per head and channel over the tokens of another text (mean, least and most of the
layers); and, of each method, KL to the uncompressed model (nats per token, mean over one window of each text, of which
the second half is scored) with its keys as they are, and with this mean taken off before they are packed.

A codec whose scales follow channels stores the mean in its zero-points. A rotation spreads it over all channels, where
it takes a part of the range of every code.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import DynamicCache

from kvq_cli.cache_argument import cache_argument
from kvq_cli.cli.options import method_options
from kvq_cli.codecs.base import Codec, Packed
from kvq_cli.codecs.wrapped import WrappedCodec
from kvq_cli.data.texts import load_text, token_windows
from kvq_cli.errors import KvqError
from kvq_cli.methods.base import LayerPlan, Method, ModelShape
from kvq_cli.methods.registry import from_config
from kvq_cli.models import LoadedModel, load_model
from kvq_cli.resolve import resolve_compared
from lab.studies.kl import Windows

#: Windows whose keys are averaged, and their first tokens, whose keys are unlike the others (attention sinks).
WINDOWS, SINKS = 4, 8


class CenteredCodec(WrappedCodec):
    """Pack x - mean by `base`. mean: `[1, kv_heads, 1, head_dim]` float32."""

    def __init__(self, base: Codec, mean: Tensor) -> None:
        super().__init__(base)
        self._mean = mean

    def _encode(self, x: Tensor) -> Packed:
        return self.base.encode(x.float() - self._mean)

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        return (self.base.decode(packed, torch.float32) + self._mean).to(dtype)

    def products(self, queries: Tensor, packed: Packed) -> Tensor:
        return self.base.products(queries, packed) + (queries * self._mean).sum(-1, keepdim=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+", metavar="METHOD")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--texts", default="examples/texts/wikitext2.txt.xz,examples/texts/gsm8k.txt.xz")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE")
    given = parser.parse_args()
    loaded = load_model(given.model, "cpu", "float32")
    means, shares = key_means(loaded, given.tokens)
    print(f"share of the mean in the keys' energy: {shares.mean():.2f} ({shares.min():.2f} to {shares.max():.2f})")
    windows = Windows(loaded, given.texts.split(","), given.tokens)
    print(f"{'method':<32} {'KL':>8} {'without the mean':>17}")
    methods = resolve_compared(given.model, given.methods, options=method_options(given.set))
    for text, method in zip(given.methods, methods, strict=True):
        plain = windows.kl(method)
        cls = type(method if isinstance(method, Method) else from_config(method.method_config))
        with patch.object(cls, "plan", centered(cls, means)):
            print(f"{text:<32} {plain:>8.4f} {windows.kl(method):>17.4f}", flush=True)


def key_means(loaded: LoadedModel, tokens: int) -> tuple[list[Tensor], Tensor]:
    """Return each layer's mean key after RoPE, `[1, kv_heads, 1, head_dim]`, and its share of energy, `[layers]`."""
    text = load_text("prose", "calibration")
    sums: list[Tensor] = []
    energies: list[Tensor] = []
    for number, window in enumerate(token_windows(loaded.tokenizer, text, tokens, WINDOWS, seed=0)):
        cache = DynamicCache()
        with torch.inference_mode():
            loaded.model(window[None], **cache_argument(cache), use_cache=True, logits_to_keep=1)
        for layer, states in enumerate(cache.layers):
            held: Any = states
            keys = held.keys[:, :, SINKS:].double()
            mean, energy = keys.mean(2, keepdim=True) / WINDOWS, keys.square().sum((1, 3)).mean() / WINDOWS
            if number:
                sums[layer] += mean
                energies[layer] += energy
            else:
                sums.append(mean)
                energies.append(energy)
    shares = torch.stack([mean.square().sum() / energy for mean, energy in zip(sums, energies, strict=True)])
    return [mean.float() for mean in sums], shares


def centered(cls: type[Method], means: Sequence[Tensor]) -> Callable[..., LayerPlan]:
    """Return `cls.plan`, changed to pack keys without their mean."""
    plan = cls.plan

    def centered_plan(method: Method, layer: int, shape: ModelShape, tensors: Mapping[str, Tensor]) -> LayerPlan:
        planned = plan(method, layer, shape, tensors)
        if not isinstance(planned.keys.codec, Codec):
            raise KvqError(f"{method.name}: its key codec is fit to each prompt: name a method whose codec is not")
        return replace(planned, keys=replace(planned.keys, codec=CenteredCodec(planned.keys.codec, means[layer])))

    return centered_plan


if __name__ == "__main__":
    main()
