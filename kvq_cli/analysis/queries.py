"""Do queries of a response lie in a few dimensions that the prompt shows, and what does SQuat make of that?"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import LongTensor, Tensor

from kvq_cli.analysis.activations import spread
from kvq_cli.analysis.study import Findings, Show, Study, Subject, register
from kvq_cli.analysis.watching import watching_queries
from kvq_cli.attention.capture_points import AttentionLayer, attention_layers
from kvq_cli.codecs.base import Prompt, PromptCodec
from kvq_cli.errors import UsageError
from kvq_cli.methods.kivi import Kivi
from kvq_cli.methods.squat import Squat
from kvq_cli.models import LoadedModel

#: Which tokens' deviation from which subspace (Fig. 2, left); the last one is not in the paper.
CURVES = {
    "whole": "its own queries",
    "prompt": "its prompt's queries",
    "sequence": "another sequence's",
    "text": "another text's",
    "response": "response only, from its prompt's",
}
METHODS = ("kivi", "squat")
#: Layers whose deviation is drawn.
DRAWN = 4


def by_kv_head(queries: Tensor, kv_heads: int) -> Tensor:
    """`[1, query_heads, tokens, head_dim]` -> `[kv_heads, query heads of it * tokens, head_dim]` float64."""
    return queries[0].double().unflatten(0, (kv_heads, -1)).flatten(1, 2)


def directions(queries: Tensor) -> Tensor:
    """Right singular vectors of `[kv_heads, queries, head_dim]`, as columns, that of the largest value first."""
    return torch.linalg.eigh(queries.mT @ queries).eigenvectors.flip(-1)


def deviations(queries: Tensor, vectors: Tensor) -> Tensor:
    """|q - Proj q| of normalized queries (Definition 1) from the first r = 0 ... head_dim of `vectors`: the mean over
    all, `[head_dim + 1]`. queries: `[kv_heads, queries, head_dim]`, vectors: `[kv_heads, head_dim, head_dim]`."""
    unit = queries / queries.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    inside = (unit @ vectors).square_().cumsum(-1)
    left = (inside[..., -1:] - inside).clamp_min_(0).sqrt_().mean((0, 1))
    return torch.cat([left.new_ones(1), left])


@dataclass(frozen=True)
class Scores:
    """Attention of the last queries to all keys of a layer, exact and quantized.

    scaling: what q . k is multiplied with. boundary: `[queries]`, each query sees the keys before it as they were
    quantized. hidden: `[queries, tokens]`, True where it does not see a key at all.
    """

    scaling: float
    boundary: Tensor
    hidden: Tensor

    def of(self, queries: Tensor, keys: Tensor) -> Tensor:
        """`[query_heads, queries, head_dim]` and `[kv_heads, tokens, head_dim]` -> `[query_heads, queries, tokens]`."""
        return queries @ keys.repeat_interleave(len(queries) // len(keys), dim=0).mT * self.scaling

    def error(self, exact: Tensor, quantized: Tensor) -> float:
        """Mean |difference| of the scores of keys that are seen quantized."""
        return (exact - quantized).abs()[:, self._packed & ~self.hidden].mean().item()

    def moved(self, exact: Tensor, quantized: Tensor) -> float:
        """Share of the attention weight that goes to other tokens than it should: half the L1 distance, mean."""
        seen = torch.where(self._packed, quantized, exact)
        first, second = (one.masked_fill(self.hidden, -torch.inf).softmax(-1) for one in (exact, seen))
        return (first - second).abs().sum(-1).mean().item() / 2

    @property
    def _packed(self) -> Tensor:
        return torch.arange(self.hidden.shape[1], device=self.hidden.device) < self.boundary.unsqueeze(1)


@register
@dataclass(frozen=True)
class Queries(Study):
    """How far queries are from subspaces of r dimensions made of other queries; SQuat's and KIVI's error in scores.

    A window is a prompt, and `response` tokens that the model adds to it (sampled). Subspaces are made of the queries
    of all query heads of a kv head: of the whole sequence, of its prompt, of another window, of a window of the dataset
    `other`. dimensions: those of the table (none: a quarter of the head). Errors are those of the response's queries
    with keys quantized in `group`s to `bits`; SQuat has `rank` dimensions of the prompt and strength `strength`.
    pre_rope: queries and keys are looked at and quantized before RoPE, as in the paper's figure.
    """

    name = "queries"
    source = "SQuat Figs. 2, 5"
    samples = 4

    response: int = 128
    other: str = "pydoc"
    dimensions: int | None = None
    pre_rope: bool = True
    bits: int = 2
    group: int = 32
    rank: int = 5
    strength: float = 0.001

    def __post_init__(self) -> None:
        if self.response < 1:
            raise UsageError(f"study queries: response={self.response} must be at least 1 token")
        if self.dimensions is not None and self.dimensions < 1:
            raise UsageError(f"study queries: dimensions={self.dimensions} must be at least 1")
        self.methods()

    def methods(self) -> dict[str, Kivi]:
        """Both quantizers, with the paper's windows: a group is packed as soon as it is full (appendix E.2)."""
        common = {"bits": self.bits, "group": self.group, "residual": self.group, "pre_rope": self.pre_rope}
        return {"kivi": Kivi(**common), "squat": Squat(**common, rank=self.rank, strength=self.strength)}

    def run(self, subject: Subject, show: Show) -> Findings:
        """See `Study.run`. One layer's queries and keys are held at a time, and the directions of two other texts."""
        prompt = subject.seqlen - self.response
        if prompt < self.group:
            raise UsageError(
                f"study queries: --seqlen {subject.seqlen} leaves {prompt} tokens of prompt before a response of "
                f"{self.response}, which is not one group of {self.group}"
            )
        windows = replace(subject, samples=subject.samples + 1).windows
        another = replace(subject, samples=1).tokens(self.other, "evaluation")[0]
        sequences = _with_responses(subject.loaded, windows[:-1, :prompt], self.response, subject.seed, show)
        layers = [_Layer(site, self, prompt, subject) for site in attention_layers(subject.loaded.model)]
        passes = [("sequence", windows[-1]), ("text", another), *(("whole", tokens) for tokens in sequences)]
        with watching_queries(subject.loaded.model, self.pre_rope) as watch:
            for done, (name, tokens) in enumerate(passes):
                show("windows", done, len(passes))
                watch(tokens, lambda layer, seen, name=name: layers[layer].add(name, seen))
            show("windows", len(passes), len(passes))
        return self._found(layers, subject)

    def _found(self, layers: list[_Layer], subject: Subject) -> Findings:
        head_dim = subject.loaded.shape.head_dim
        r = min(head_dim // 4 if self.dimensions is None else self.dimensions, head_dim)
        count = subject.samples
        numbers = {
            "deviation": {name: [(one.curves[name] / count).tolist() for one in layers] for name in CURVES},
            "score_error": {name: [one.errors[name][0] / count for one in layers] for name in METHODS},
            "moved_attention": {name: [one.errors[name][1] / count for one in layers] for name in METHODS},
        }
        rows = []
        for index in range(len(layers)):
            row = [numbers["deviation"][name][index][r] for name in CURVES]
            row += [numbers[what][name][index] for what in ("score_error", "moved_attention") for name in METHODS]
            rows.append([index, *row])
        rows.append(["mean", *(sum(row[i] for row in rows) / len(rows) for i in range(1, len(rows[0])))])
        columns = ["layer", *CURVES, *(f"{what} {name}" for what in ("score error", "moved") for name in METHODS)]
        notes = [
            f"deviation of all queries from the first {r} of {head_dim} dimensions of the whole sequence, its prompt, "
            "another sequence, another text; response: of the response's queries from the prompt's",
            f"score error: mean of the scaled |q . k - q . k'| {'before' if self.pre_rope else 'after'} RoPE; "
            "moved: share of the attention weight (after RoPE) that goes to other tokens",
        ]
        return Findings(columns, rows, numbers, lambda figure: _draw(figure, numbers), (13, 7.5), notes)


class _Layer:
    """One layer's directions of other texts, and sums over the sequences."""

    def __init__(self, site: AttentionLayer, study: Queries, prompt: int, subject: Subject) -> None:
        self._site, self._prompt, self._pre_rope = site, prompt, study.pre_rope
        plans = {name: method.plan(site.index, subject.loaded.shape, {}) for name, method in study.methods().items()}
        self._plans = {name: plan.keys for name, plan in plans.items()}
        self._vectors: dict[str, Tensor] = {}
        self.curves: dict[str, Tensor | float] = dict.fromkeys(CURVES, 0.0)
        self.errors = {name: [0.0, 0.0] for name in METHODS}

    def add(self, name: str, seen: Prompt) -> None:
        """`name`: "sequence" or "text", whose directions are wanted, or "whole" for a sequence to be measured."""
        kv_heads = seen.keys.shape[1]
        queries = by_kv_head(seen.queries, kv_heads)
        if name != "whole":
            self._vectors[name] = directions(queries)
            return
        own = {"whole": directions(queries)}
        own["prompt"] = directions(by_kv_head(seen.queries[:, :, : self._prompt], kv_heads))
        for other, vectors in {**own, **self._vectors}.items():
            self.curves[other] = self.curves[other] + deviations(queries, vectors).cpu()
        response = by_kv_head(seen.queries[:, :, self._prompt :], kv_heads)
        self.curves["response"] = self.curves["response"] + deviations(response, own["prompt"]).cpu()
        for method in METHODS:
            for place, error in enumerate(self._errors(method, seen)):
                self.errors[method][place] += error

    def _errors(self, method: str, seen: Prompt) -> tuple[float, float]:
        """Of the response's queries: the mean error of a score, and the moved attention weight."""
        plan, tokens, codec = self._plans[method], seen.keys.shape[2], self._plans[method].codec
        if isinstance(codec, PromptCodec):
            parts = (x[:, :, : self._prompt] for x in (seen.keys, seen.values, seen.queries))
            codec = codec.with_state(codec.fit(Prompt(*parts)))
        packed = plan.window.packed(tokens)
        restored = codec.decode(codec.encode(seen.keys[:, :, :packed]), torch.float32)
        queries, keys = seen.queries[0].float(), seen.keys[0].float()
        quantized = torch.cat([restored[0], keys[:, packed:]], dim=1)
        places = torch.arange(self._prompt, tokens, device=keys.device)
        boundary = [plan.window.packed(place + 1) for place in places.tolist()]
        scaling = getattr(self._site.module, "scaling", None) or keys.shape[-1] ** -0.5
        scores = Scores(scaling, torch.tensor(boundary, device=keys.device), self._hidden(places, tokens))
        exact, changed = (scores.of(queries[:, self._prompt :], one) for one in (keys, quantized))
        error = scores.error(exact, changed)
        if self._pre_rope:
            turn = self._site.rotation.at
            asked = turn(queries, 0)[:, self._prompt :]
            exact, changed = (scores.of(asked, turn(one, 0)) for one in (keys, quantized))
        return error, scores.moved(exact, changed)

    def _hidden(self, places: Tensor, tokens: int) -> Tensor:
        behind = places.unsqueeze(1) - torch.arange(tokens, device=places.device)
        window = self._site.sliding_window
        return behind < 0 if window is None else (behind < 0) | (behind >= window)


def _with_responses(loaded: LoadedModel, prompts: LongTensor, tokens: int, seed: int, show: Show) -> list[LongTensor]:
    """Each prompt `[prompt]` with `tokens` more that the model samples after it."""
    found, device = [], loaded.model.device
    for done, prompt in enumerate(prompts):
        show("responses", done, len(prompts))
        ids = prompt[None].to(device)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
            torch.manual_seed(seed + done)
            options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": True, "top_k": 0}
            found.append(loaded.model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].cpu())
    show("responses", len(prompts), len(prompts))
    return found


def _draw(figure, numbers: dict) -> None:
    """Above: deviation over dimensions, some layers. Below: errors by layer."""
    above, below = figure.subfigures(2, 1)
    layers = len(numbers["score_error"]["kivi"])
    shown = spread(layers, DRAWN)
    for axis, layer in zip(above.subplots(1, len(shown), sharey=True, squeeze=False)[0], shown, strict=True):
        for name, label in CURVES.items():
            style = {"whole": {"linewidth": 4, "alpha": 0.4}, "response": {"linestyle": "--"}}.get(name, {})
            axis.plot(numbers["deviation"][name][layer], label=label, **style)
        axis.set(title=f"layer {layer}", xlabel="dimensions r", ylim=(0, 1))
        axis.grid(alpha=0.3)
    above.axes[0].set_ylabel("deviation of queries")
    above.axes[-1].legend(fontsize=7, title="subspace of", title_fontsize=7)
    labels = {"score_error": "mean error of a score", "moved_attention": "share of attention moved"}
    for axis, (what, label) in zip(below.subplots(1, 2), labels.items(), strict=True):
        for shift, name in ((-0.2, "kivi"), (0.2, "squat")):
            axis.bar([layer + shift for layer in range(layers)], numbers[what][name], 0.4, label=name)
        axis.set(xlabel="layer", ylabel=label)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(fontsize=8)
