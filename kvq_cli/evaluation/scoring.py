"""Teacher-forced logits of a continuation, equal to those of token-by-token decoding after a prompt.

Methods fit their state (InnerQ's norms, SQuat's subspace, ZipCache's saliency, GEAR's low-rank factors) to the prompt
alone, never to scored tokens. All tokens of the continuation are computed in one forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvq_cli.attention.attach import Attached
from kvq_cli.cache.report import CacheReport
from kvq_cli.cache_argument import cache_argument
from kvq_cli.models import check_token_ids


def prompt_and_decoded(context: Sequence[int], continuation: Sequence[int]) -> tuple[list[int], list[int]]:
    """The tokens that a row's prompt has, and those decoded behind it, as `continuation_logits` says."""
    prompt = [*(context[:-1] or context)]
    return prompt, [*context[len(prompt) :], *continuation[:-1]]


@torch.inference_mode()
def continuation_logits(
    attached: Attached, contexts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]
) -> tuple[list[Tensor], CacheReport]:
    """Logits `[len(continuation), vocabulary]` that predict each row's continuation, and the cache's report.

    contexts, continuations: token ids of each row, of any lengths. The prompt is the context without its last token,
    which is decoded with the continuation: every logit comes from a decode step that reads the compressed cache.
    A context of one token is the prompt itself. ValueError for an empty context or continuation, KvqError for a token
    id that the model lacks.
    """
    if not all(contexts) or not all(continuations):
        raise ValueError("a context or a continuation has no tokens")
    check_token_ids(attached.model, [*contexts, *continuations])
    rows = [prompt_and_decoded(*row) for row in zip(contexts, continuations, strict=True)]
    prompts, decoded = [prompt for prompt, _ in rows], [tokens for _, tokens in rows]
    longest, columns = max(map(len, prompts)), max(map(len, decoded))
    model, cache = attached.model, attached.new_cache(longest + columns)
    ids = torch.tensor(
        [
            [0] * (longest - len(prompt)) + [*prompt] + tokens + [0] * (columns - len(tokens))
            for prompt, tokens in zip(prompts, decoded, strict=True)
        ]
    ).to(model.device)
    # Padding on the right follows all scored tokens of its row: none of them attends to it.
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * (len(prompt) + columns) for prompt in prompts])
    mask = mask.to(model.device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)

    def run(begin: int, end: int, keep: int) -> Tensor:
        return model(
            ids[:, begin:end],
            attention_mask=mask[:, :end],
            position_ids=positions[:, begin:end],
            **cache_argument(cache),
            use_cache=True,
            logits_to_keep=keep,
        ).logits

    logits = run(0, longest, 1)
    if columns:
        with attached.one_by_one():
            behind = run(longest, longest + columns, 0)
        # The prompt's logits predict the continuation of a context of one token alone; joining copies all logits.
        alone = any(len(context) == 1 for context in contexts)
        logits = torch.cat([logits, behind], dim=1) if alone else behind
    first = logits.shape[1] - columns  # column of the logits that follow the first decoded token
    scored = [
        row[first + len(tokens) - len(continuation) : first + len(tokens)]
        for row, tokens, continuation in zip(logits, decoded, continuations, strict=True)
    ]
    return scored, attached.report(cache)
