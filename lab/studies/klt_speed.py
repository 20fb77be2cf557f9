"""Time of a codec's steps on a CPU, for the layers of artifacts of one model.

python -m lab.studies.klt_speed ARTIFACT... [--tokens 512] [--rounds 40]

Prints milliseconds per layer: packing keys and values; decoding them, as compressed prefill does; for one query per
query head, scores (decode, RoPE, product) and weighted sums of values, as a decode step does. Artifacts run in turn, so
that a machine that slows down slows all of them; the least of all rounds counts, averaged over layers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kvq_cli import load_artifact
from kvq_cli.artifact import Artifact
from kvq_cli.attention.rotary import Rotation
from kvq_cli.codecs.base import Codec, PromptCodec
from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.registry import from_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", nargs="+", metavar="ARTIFACT", help="folders that kvq calibrate wrote")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    columns = [timed_steps(load_artifact(path), arguments.tokens) for path in arguments.artifacts]
    least = [{name: [float("inf")] * len(runs) for name, runs in column.items()} for column in columns]
    for _ in range(arguments.rounds):
        for name in columns[0]:
            for layer in range(len(columns[0][name])):
                for column, found in zip(columns, least, strict=True):
                    start = time.perf_counter()
                    column[name][layer]()
                    found[name][layer] = min(found[name][layer], time.perf_counter() - start)
    print(f"{'ms per layer':16}", *arguments.artifacts)
    for name in columns[0]:
        cells = (
            f"{1000 * sum(found[name]) / len(found[name]):{len(path)}.3f}"
            for path, found in zip(arguments.artifacts, least, strict=True)
        )
        print(f"{name:16}", *cells)


def timed_steps(artifact: Artifact, tokens: int) -> dict[str, list[Callable[[], object]]]:
    """By name, one function per layer that runs a step once."""
    sizes = artifact.config["model"]["fingerprint"]
    shape = ModelShape(
        **{key: sizes[key] for key in ("layers", "query_heads", "kv_heads", "head_dim", "hidden_size")},
        dtype=artifact.config["model"]["dtype"],
    )
    method, steps = from_config(artifact.method_config), {}
    for layer in range(shape.layers):
        plan = method.plan(layer, shape, artifact.layer(layer))
        for name, step in layer_steps(plan.keys.codec, plan.values.codec, shape, tokens, layer).items():
            steps.setdefault(name, []).append(step)
    return steps


def layer_steps(
    keys: Codec | PromptCodec, values: Codec | PromptCodec, shape: ModelShape, tokens: int, seed: int
) -> dict[str, Callable[[], object]]:
    """One layer's steps on random keys, values, queries and weights."""
    if isinstance(keys, PromptCodec) or isinstance(values, PromptCodec):
        raise SystemExit("this method is fit to prompts")
    generator = torch.Generator().manual_seed(seed)
    heads, group = shape.kv_heads, shape.query_heads // shape.kv_heads

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(1, heads, *sizes, generator=generator)

    k, v, query = drawn(tokens, shape.head_dim), drawn(tokens, shape.head_dim), drawn(group, shape.head_dim)
    weights = drawn(group, tokens).softmax(dim=-1)
    rotation = Rotation("half", 10000.0 ** -torch.linspace(0, 1, shape.head_dim // 2), shape.head_dim)
    packed_keys, packed_values = keys.encode(k), values.encode(v)
    return {
        "pack": lambda: (keys.encode(k), values.encode(v)),
        "decode keys": lambda: keys.decode(packed_keys, torch.float32),
        "decode values": lambda: values.decode(packed_values, torch.float32),
        "scores": lambda: query @ rotation.ahead(keys.decode_by_channel(packed_keys).mT).mT,
        "weighted sums": lambda: values.weighted_sum(weights, packed_values),
    }


if __name__ == "__main__":
    main()
