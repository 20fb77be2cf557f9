"""KL divergence of next-token predictions with a compressed cache from the uncompressed model's."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import exp
from typing import TypeVar

import torch
from torch import Tensor

from kvq_cli.attention.attach import Attached, attach
from kvq_cli.attention.capture_points import decoder_of
from kvq_cli.evaluation.divergence import Divergence, divergence
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

    The first half is the prompt, from which a method may compute constants (SQuat's subspace, InnerQ's norms). Each
    token attends to what it would see in token-by-token decoding. Logits of one window and method are held at a time.
    """
    model, half = loaded.model, windows.shape[1] // 2
    divergences: dict[Key, list[Divergence]] = {key: [] for key in methods}
    bits: dict[Key, float] = {}
    with ExitStack() as stack:
        attached = {
            key: stack.enter_context(attach(model, method, prefill="compressed", backend="torch"))
            for key, method in methods.items()
        }
        for window, tokens in enumerate(windows):
            ids = tokens[None].to(model.device)
            exact = model(ids, use_cache=False).logits[0, half:].clone()
            for number, (key, model_under_method) in enumerate(attached.items()):
                progress("predictions", window * len(attached) + number, len(windows) * len(attached))
                logits, bits[key] = _logits(model_under_method, ids, half)
                divergences[key].append(divergence(exact, logits, ids[0, half:]))
        progress("predictions", len(windows) * len(attached), len(windows) * len(attached))
    return {key: _mean(parts, bits[key]) for key, parts in divergences.items()}


def _logits(attached: Attached, ids: Tensor, half: int) -> tuple[Tensor, float]:
    """Logits of the second half, `[tokens, vocabulary]`, and bits per packed number."""
    cache = attached.new_cache()
    decoder_of(attached.model)(input_ids=ids[:, :half], past_key_values=cache, use_cache=True)
    logits = attached.model(ids[:, half:], past_key_values=cache, use_cache=True).logits[0]
    return logits, attached.report(cache).packed_bits


def _mean(parts: list[Divergence], packed_bits: float) -> Predictions:
    tokens = sum(part.tokens for part in parts)
    kl, nll, agreeing = (sum(getattr(part, name) for part in parts) / tokens for name in ("kl", "nll", "agreeing"))
    return Predictions(kl, exp(nll), agreeing, packed_bits)
