"""What is measured while the reference model is trained: answers to samples that it never sees, and unseen prose."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from . import curriculum, tasks
from .loss import loss_of


@dataclass
class Watch:
    """Samples that training never asks for, drawn once."""

    name: str
    ids: torch.Tensor
    answers: torch.Tensor


WATCHED = {
    "single_noise": partial(tasks.needles),
    "single_prose": partial(tasks.needles, hay="prose"),
    "multikey_prose": partial(tasks.needles, hay="prose", keys=4),
    "multiquery": partial(tasks.needles, hay="prose", keys=4, queries=4),
    "multivalue": partial(tasks.needles, hay="prose", values=4),
    "chains": partial(tasks.chains),
}


def watch_list(lessons: curriculum.Curriculum, lengths, samples: int) -> list[Watch]:
    """The same few samples of each task at each length, for the whole run."""
    found = []
    for length in lengths:
        for name, draw in WATCHED.items():
            for index in range(samples):
                rng = random.Random(f"watch-{name}-{length}-{index}")
                ids, weights = lessons.fit(rng, draw, length - 1) or ([], [])
                # The last weighted token is the stop token; RULER does not look at it.
                answers = torch.tensor([weight == tasks.ANSWER for weight in weights[:-1]])
                found.append(Watch(f"{name}@{length}", torch.tensor([0, *ids[:-1]]), answers))
    return found


@torch.no_grad()
def evaluate(model, watched: list[Watch], held_out: np.ndarray, device: str, window: int = 512) -> dict:
    """Share of whole answers and of answer tokens that greedy decoding gives right, and perplexity of unseen prose."""
    out: dict[str, list] = {}
    for sample in watched:
        hidden = model.model(input_ids=sample.ids[None].to(device), use_cache=False).last_hidden_state[0, :-1]
        places = sample.answers.nonzero().flatten().to(device)
        guesses = F.linear(hidden[places], model.lm_head.weight).argmax(-1).cpu()
        right = guesses == sample.ids[1:][sample.answers]
        out.setdefault(sample.name, []).append((float(right.all()), float(right.float().mean())))
    scores = {name: [round(float(x), 3) for x in np.mean(pairs, axis=0)] for name, pairs in out.items()}
    count = min(48, len(held_out) // window)
    ids = torch.from_numpy(held_out[: count * window].astype(np.int64).reshape(count, window)).to(device)
    ids = torch.cat([torch.zeros_like(ids[:, :1]), ids], dim=1)
    # The first token is not scored: nothing but <|bos|> stands before it.
    weights = torch.ones_like(ids[:, 1:], dtype=torch.float32)
    weights[:, 0] = 0
    losses = [float(loss_of(model, ids[i : i + 8], weights[i : i + 8])) for i in range(0, count, 8)]
    return {"tasks": scores, "perplexity": round(math.exp(sum(losses) / float(weights.sum())), 2)}
