"""KL divergence of next-token predictions with a compressed cache from the uncompressed model's."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import exp
from typing import TypeVar

import torch
from torch import Tensor

from kvq_cli.attention.attach import attach
from kvq_cli.data.texts import unknown_token
from kvq_cli.evaluation.divergence import Divergence, divergence
from kvq_cli.evaluation.scoring import continuation_logits
from kvq_cli.methods.base import Method
from kvq_cli.models import LoadedModel
from kvq_cli.papers.studies.study import Progress

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Predictions:
    """Means over the tokens of all second halves. kl: KL(p_exact || p_method) per token in nats; top1: share of tokens
    for which both have the same most probable token; packed_bits: bits per packed number, scales included."""

    kl: float
    perplexity: float
    top1: float
    packed_bits: float


@torch.inference_mode()
def predictions(
    loaded: LoadedModel, windows: Tensor, methods: Mapping[Key, Method], progress: Progress
) -> dict[Key, Predictions]:
    """Compare predictions for the second half of each of `windows` `[windows, tokens]`, by key of `methods`.

    The first half is the prompt, to which methods fit their state; see `continuation_logits`. Logits of one window and
    method are held at a time. The tokenizer's unknown token is not scored.
    """
    model, half = loaded.model, windows.shape[1] // 2
    unscored = unknown_token(loaded.tokenizer)
    divergences: dict[Key, list[Divergence]] = {key: [] for key in methods}
    bits: dict[Key, float] = {}
    with ExitStack() as stack:
        attached = {
            key: stack.enter_context(attach(model, method, prefill="compressed", backend="torch"))
            for key, method in methods.items()
        }
        for window, tokens in enumerate(windows):
            ids, context, continuation = tokens[None].to(model.device), tokens[:half].tolist(), tokens[half:].tolist()
            exact = model(ids, use_cache=False).logits[0, half - 1 :].clone()
            for number, (key, model_under_method) in enumerate(attached.items()):
                progress("predictions", window * len(attached) + number, len(windows) * len(attached))
                [logits], report = continuation_logits(model_under_method, [context], [continuation])
                bits[key] = report.packed_bits
                divergences[key].append(divergence(exact, logits, tokens[half - 1 :], unscored))
        progress("predictions", len(windows) * len(attached), len(windows) * len(attached))
    return {key: _mean(parts, bits[key]) for key, parts in divergences.items()}


def _mean(parts: list[Divergence], packed_bits: float) -> Predictions:
    tokens = sum(part.tokens for part in parts)
    kl, nll, agreeing = (sum(getattr(part, name) for part in parts) / tokens for name in ("kl", "nll", "agreeing"))
    return Predictions(kl, exp(nll), agreeing, packed_bits)
