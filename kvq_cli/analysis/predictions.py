"""How compressed caches change what a model predicts: the next-token distributions of many methods on one text."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import exp
from typing import TypeVar

import torch
from torch import Tensor

from kvq_cli.analysis.divergence import Divergence, divergence
from kvq_cli.analysis.study import Show
from kvq_cli.attention.attach import Attached, attach
from kvq_cli.attention.capture_points import decoder_of
from kvq_cli.methods.base import Method
from kvq_cli.models import LoadedModel

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Predictions:
    """Of the second half of all windows: KL(p_exact || p_method) per token in nats, perplexity, the share of tokens
    with the same most probable one, and bits per packed number, scales included."""

    kl: float
    perplexity: float
    top1: float
    packed_bits: float


@torch.inference_mode()
def predictions(
    loaded: LoadedModel, windows: Tensor, methods: Mapping[Key, Method], show: Show
) -> dict[Key, Predictions]:
    """Predict the second half of each of `windows` `[windows, tokens]` under each method.

    The first half is a prompt of which a method may freeze what it needs (SQuat's subspace, InnerQ's norms); tokens of
    both see what decoding one by one would see. One window's logits of one method are held at a time.
    """
    model, half = loaded.model, windows.shape[1] // 2
    found: dict[Key, list[Divergence]] = {key: [] for key in methods}
    bits: dict[Key, float] = {}
    with ExitStack() as attached:
        under = {
            key: attached.enter_context(attach(model, method, prefill="compressed", backend="torch"))
            for key, method in methods.items()
        }
        for window, tokens in enumerate(windows):
            ids = tokens[None].to(model.device)
            exact = model(ids, use_cache=False).logits[0, half:].clone()
            for number, (key, one) in enumerate(under.items()):
                show("predictions", window * len(under) + number, len(windows) * len(under))
                logits, bits[key] = _continued(one, ids, half)
                found[key].append(divergence(exact, logits, ids[0, half:]))
        show("predictions", len(windows) * len(under), len(windows) * len(under))
    return {key: _mean(parts, bits[key]) for key, parts in found.items()}


def _continued(attached: Attached, ids: Tensor, half: int) -> tuple[Tensor, float]:
    """Logits of the second half, `[tokens, vocabulary]`, and bits per packed number."""
    cache = attached.new_cache()
    decoder_of(attached.model)(input_ids=ids[:, :half], past_key_values=cache, use_cache=True)
    logits = attached.model(ids[:, half:], past_key_values=cache, use_cache=True).logits[0]
    return logits, attached.report(cache).packed_bits


def _mean(parts: list[Divergence], packed_bits: float) -> Predictions:
    tokens = sum(part.tokens for part in parts)
    kl, nll, agreeing = (sum(getattr(part, name) for part in parts) / tokens for name in ("kl", "nll", "agreeing"))
    return Predictions(kl, exp(nll), agreeing, packed_bits)
