"""Evaluation during training: accuracy on held-out samples of the tasks, and perplexity of held-out prose."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from . import tasks
from .curriculum import Curriculum
from .loss import loss_of

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


@dataclass
class Sample:
    """A held-out sample of a task. name: `task@length`; answers: True at the ids that the model must predict."""

    name: str
    ids: torch.Tensor
    answers: torch.Tensor


TASKS = {
    "single_noise": partial(tasks.needles),
    "single_prose": partial(tasks.needles, hay="prose"),
    "multikey_prose": partial(tasks.needles, hay="prose", keys=4),
    "multiquery": partial(tasks.needles, hay="prose", keys=4, queries=4),
    "multivalue": partial(tasks.needles, hay="prose", values=4),
    "chains": partial(tasks.chains),
}


def held_out_samples(curriculum: Curriculum, lengths: Sequence[int], count: int) -> list[Sample]:
    """`count` samples of each task at each length, the same in every evaluation of a run."""
    samples = []
    for length in lengths:
        for name, draw in TASKS.items():
            for index in range(count):
                rng = random.Random(f"watch-{name}-{length}-{index}")
                ids, weights = curriculum.fit(rng, draw, length - 1) or ([], [])
                # The last weighted token is the stop token, which RULER does not score.
                answers = torch.tensor([weight == tasks.ANSWER for weight in weights[:-1]])
                samples.append(Sample(f"{name}@{length}", torch.tensor([0, *ids[:-1]]), answers))
    return samples


@torch.no_grad()
def evaluate(
    model: LlamaForCausalLM, samples: list[Sample], held_out: np.ndarray, device: str, window: int = 512
) -> dict[str, Any]:
    """Accuracy by task (share of correct answers and of correct answer tokens) and perplexity of held-out prose."""
    by_name: dict[str, list] = {}
    for sample in samples:
        hidden = model.model(input_ids=sample.ids[None].to(device), use_cache=False).last_hidden_state[0, :-1]
        positions = sample.answers.nonzero().flatten().to(device)
        predicted = F.linear(hidden[positions], model.lm_head.weight).argmax(-1).cpu()
        correct = predicted == sample.ids[1:][sample.answers]
        by_name.setdefault(sample.name, []).append((float(correct.all()), float(correct.float().mean())))
    scores = {name: [round(float(x), 3) for x in np.mean(pairs, axis=0)] for name, pairs in by_name.items()}
    count = min(48, len(held_out) // window)
    ids = torch.from_numpy(held_out[: count * window].astype(np.int64).reshape(count, window)).to(device)
    ids = torch.cat([torch.zeros_like(ids[:, :1]), ids], dim=1)
    # The first token is not scored: its only context is <|bos|>.
    weights = torch.ones_like(ids[:, 1:], dtype=torch.float32)
    weights[:, 0] = 0
    losses = [float(loss_of(model, ids[i : i + 8], weights[i : i + 8])) for i in range(0, count, 8)]
    return {"tasks": scores, "perplexity": round(math.exp(sum(losses) / float(weights.sum())), 2)}
