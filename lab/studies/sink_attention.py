"""What compressing the first tokens does to attention: the weight that they receive, before and after.

python -m lab.studies.sink_attention ARTIFACT TEXT... [--model smollm2] [--tokens 1024] [--sinks 8]

The artifact is of `kvq calibrate --method temporalkv --bits 2`, or another method that keeps keys before RoPE. Prints
by layer, mean over heads, the queries of the second half of a window, and one window of each text: the share of
attention that the first tokens receive, exact and with their keys compressed; half the L1 distance of the two attention
distributions; and the error of their keys and values relative to their norm.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from kvq_cli import load_artifact
from kvq_cli.attention.capture_points import AttentionLayer, attention_layers
from kvq_cli.codecs.base import Prompt
from kvq_cli.data.texts import load_text, token_windows
from kvq_cli.methods.base import LayerPlan, StreamPlan
from kvq_cli.methods.registry import from_config
from kvq_cli.models import load_model
from kvq_cli.papers.studies.activation_hooks import query_hooks

COLUMNS = ("exact", "compressed", "moved", "error of keys", "of values")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("texts", nargs="+", metavar="TEXT")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--sinks", type=int, default=8)
    given = parser.parse_args()
    loaded = load_model(given.model, "cpu", "float32")
    artifact = load_artifact(given.artifact).with_options({"sinks": 0})
    method, sites = from_config(artifact.method_config), attention_layers(loaded.model)
    plans = [method.plan(site.index, loaded.shape, artifact.layer(site.index)) for site in sites]
    sums = torch.zeros(len(sites), len(COLUMNS), dtype=torch.float64)

    def sink(layer: int, sequence: Prompt) -> None:
        sums[layer] += torch.tensor(effect(sites[layer], plans[layer], sequence, given.sinks), dtype=torch.float64)

    with query_hooks(loaded.model, pre_rope=True) as run:
        for name in given.texts:
            run(token_windows(loaded.tokenizer, load_text(name, "evaluation"), given.tokens, 1, seed=0)[0], sink)
    means = sums / len(given.texts)
    print(f"{'layer':>5}" + "".join(f"{title:>14}" for title in COLUMNS))
    for layer, row in [*enumerate(means), ("mean", means.mean(0))]:
        print(f"{layer:>5}" + "".join(f"{value:>14.3f}" for value in row.tolist()))


def effect(site: AttentionLayer, plan: LayerPlan, sequence: Prompt, first: int) -> list[float]:
    """The numbers of COLUMNS for one layer and window."""
    queries, keys = sequence.queries[0].float(), sequence.keys[0].float()
    restored = torch.cat([decoded(plan.keys, keys, first), keys[:, first:]], dim=1)
    rotate, tokens = site.rotation.at, keys.shape[1]
    half = rotate(queries, 0)[:, tokens // 2 :]
    masked = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)[tokens // 2 :]
    scaling = getattr(site.module, "scaling", None) or keys.shape[-1] ** -0.5

    def attention(side: Tensor) -> Tensor:
        scores = half @ rotate(side, 0).repeat_interleave(len(half) // len(side), dim=0).mT * scaling
        return scores.masked_fill(masked, -torch.inf).softmax(-1)

    exact, compressed = attention(keys), attention(restored)
    values = sequence.values[0].float()
    return [
        exact[..., :first].sum(-1).mean().item(),
        compressed[..., :first].sum(-1).mean().item(),
        (exact - compressed).abs().sum(-1).mean().item() / 2,
        relative_error(restored[:, :first], keys[:, :first]),
        relative_error(decoded(plan.values, values, first), values[:, :first]),
    ]


def decoded(plan: StreamPlan, numbers: Tensor, first: int) -> Tensor:
    """The first tokens of `[kv_heads, tokens, head_dim]` after compression."""
    return plan.codec.decode(plan.codec.encode(numbers[None, :, :first]), torch.float32)[0]


def relative_error(restored: Tensor, exact: Tensor) -> float:
    return ((restored - exact).norm(dim=-1) / exact.norm(dim=-1)).mean().item()


if __name__ == "__main__":
    main()
