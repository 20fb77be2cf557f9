"""Whether queries of a response lie in a low-dimensional subspace of the prompt's, and the score errors of SQuat."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvq_cli.attention.capture_points import AttentionLayer, attention_layers
from kvq_cli.codecs.base import Prompt, PromptCodec
from kvq_cli.errors import UsageError
from kvq_cli.evaluation.generation import continue_ids
from kvq_cli.figures import integer_ticks
from kvq_cli.methods.kivi import Kivi, KiviGroups
from kvq_cli.methods.squat import Squat
from kvq_cli.models import LoadedModel
from kvq_cli.papers.studies.activation_hooks import query_hooks
from kvq_cli.papers.studies.activations import spread
from kvq_cli.papers.studies.study import Findings, ModelStudy, Progress, StudyInput, register

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Deviation of which queries from which subspace (Fig. 2, left); the last curve is not in the paper.
CURVES = {
    "whole": "its own queries",
    "prompt": "its prompt's queries",
    "sequence": "another sequence's",
    "text": "another text's",
    "response": "response only, from its prompt's",
}
LINE_STYLES: dict[str, dict[str, Any]] = {"whole": {"linewidth": 4, "alpha": 0.4}, "response": {"linestyle": "--"}}
METHODS = ("kivi", "squat")
#: How many layers' deviations the figure shows.
DRAWN_LAYERS = 4


def by_kv_head(queries: Tensor, kv_heads: int) -> Tensor:
    """Queries `[1, query_heads, tokens, head_dim]` grouped by kv head, float64 `[kv_heads, queries, head_dim]`."""
    return queries[0].double().unflatten(0, (kv_heads, -1)).flatten(1, 2)


def directions(queries: Tensor) -> Tensor:
    """Right singular vectors of `[kv_heads, queries, head_dim]` as columns, in descending order of singular values."""
    return torch.linalg.eigh(queries.mT @ queries).eigenvectors.flip(-1)


def deviations(queries: Tensor, vectors: Tensor) -> Tensor:
    """Mean distance |q - Proj q| of normalized queries (Definition 1) from the span of the first r = 0 ... head_dim
    columns of `vectors` `[kv_heads, head_dim, head_dim]`; `[head_dim + 1]`.

    queries: `[kv_heads, queries, head_dim]`.
    """
    unit = queries / queries.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    inside = (unit @ vectors).square_().cumsum(-1)
    outside = (inside[..., -1:] - inside).clamp_min_(0).sqrt_().mean((0, 1))
    return torch.cat([outside.new_ones(1), outside])


@dataclass(frozen=True)
class Scores:
    """Attention of the last queries to all keys of a layer, exact and quantized.

    scaling: the factor of q . k. boundary `[queries]`: keys before it are quantized for the query. hidden
    `[queries, tokens]`: True for keys that are masked for the query.
    """

    scaling: float
    boundary: Tensor
    hidden: Tensor

    def of(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Scores `[query_heads, queries, tokens]` of queries `[query_heads, queries, head_dim]` and keys
        `[kv_heads, tokens, head_dim]`."""
        return queries @ keys.repeat_interleave(len(queries) // len(keys), dim=0).mT * self.scaling

    def error(self, exact: Tensor, quantized: Tensor) -> float:
        """Mean absolute difference of the scores, over unmasked quantized keys."""
        return (exact - quantized).abs()[:, self._packed & ~self.hidden].mean().item()

    def moved(self, exact: Tensor, quantized: Tensor) -> float:
        """Mean total variation distance of the attention weights: half the L1 distance."""
        mixed = torch.where(self._packed, quantized, exact)
        first, second = (scores.masked_fill(self.hidden, -torch.inf).softmax(-1) for scores in (exact, mixed))
        return (first - second).abs().sum(-1).mean().item() / 2

    @property
    def _packed(self) -> Tensor:
        return torch.arange(self.hidden.shape[1], device=self.hidden.device) < self.boundary.unsqueeze(1)


@register
@dataclass(frozen=True)
class Queries(ModelStudy):
    """Distance of queries from r-dimensional subspaces of other queries; score errors of SQuat and KIVI.

    A sequence is a prompt and `response` tokens that the model samples after it. A subspace is spanned by the queries
    of all query heads of a kv head: of the whole sequence, its prompt, another window, or a window of the dataset
    `other`. dimensions: r in the table (none: a quarter of head_dim). Score errors are of the response's queries, with
    keys quantized in `group`s to `bits`; SQuat has rank `rank` and strength `strength`. pre_rope: analyze and quantize
    before RoPE, as in the paper's figure.
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

    def methods(self) -> dict[str, KiviGroups]:
        """Both methods, with the paper's residual window: a group is packed as soon as it is full (appendix E.2)."""
        kivi = Kivi(bits=self.bits, group=self.group, residual=self.group, pre_rope=self.pre_rope)
        squat = Squat(
            bits=self.bits,
            group=self.group,
            residual=self.group,
            pre_rope=self.pre_rope,
            rank=self.rank,
            strength=self.strength,
        )
        return {"kivi": kivi, "squat": squat}

    def run(self, data: StudyInput, progress: Progress) -> Findings:
        """See `ModelStudy.run`. Memory: queries and keys of one layer, and singular vectors of two other texts."""
        prompt = data.seqlen - self.response
        if prompt < self.group:
            raise UsageError(
                f"study queries: --seqlen {data.seqlen} leaves {prompt} tokens of prompt before a response of "
                f"{self.response}, which is not one group of {self.group}"
            )
        windows = replace(data, samples=data.samples + 1).windows
        another = replace(data, samples=1).tokens(self.other, "evaluation")[0]
        sequences = _with_responses(data.loaded, windows[:-1, :prompt], self.response, data.seed, progress)
        layers = [_Layer(site, self, prompt, data) for site in attention_layers(data.loaded.model)]
        passes = [("sequence", windows[-1]), ("text", another), *(("whole", tokens) for tokens in sequences)]
        with query_hooks(data.loaded.model, self.pre_rope) as run:
            for index, (name, tokens) in enumerate(passes):
                progress("windows", index, len(passes))

                def sink(layer: int, sequence: Prompt, name: str = name) -> None:
                    layers[layer].add(name, sequence)

                run(tokens, sink)
            progress("windows", len(passes), len(passes))
        return self._findings(layers, data)

    def _findings(self, layers: list[_Layer], data: StudyInput) -> Findings:
        head_dim = data.loaded.shape.head_dim
        r = min(head_dim // 4 if self.dimensions is None else self.dimensions, head_dim)
        count = data.samples
        numbers: dict[str, Any] = {
            "deviation": {name: [(layer.curves[name] / count).tolist() for layer in layers] for name in CURVES},
            "score_error": {name: [layer.errors[name][0] / count for layer in layers] for name in METHODS},
            "moved_attention": {name: [layer.errors[name][1] / count for layer in layers] for name in METHODS},
        }
        rows = []
        for index in range(len(layers)):
            row = [numbers["deviation"][name][index][r] for name in CURVES]
            row += [numbers[key][name][index] for key in ("score_error", "moved_attention") for name in METHODS]
            rows.append([index, *row])
        rows.append(["mean", *(sum(row[i] for row in rows) / len(rows) for i in range(1, len(rows[0])))])
        columns = ["layer", *CURVES, *(f"{title} {name}" for title in ("score error", "moved") for name in METHODS)]
        notes = [
            f"deviation of all queries from the first {r} of {head_dim} dimensions of the whole sequence, its prompt, "
            "another sequence, another text; response: of the response's queries from the prompt's subspace",
            f"score error: mean of the scaled |q . k - q . k'| {'before' if self.pre_rope else 'after'} RoPE; "
            "moved: share of the attention weight (after RoPE) that moves to other tokens",
        ]
        return Findings(columns, rows, numbers, lambda figure: _draw(figure, numbers), (13, 7.5), notes)


class _Layer:
    """A layer's singular vectors of other texts, and sums over the sequences."""

    def __init__(self, site: AttentionLayer, study: Queries, prompt: int, data: StudyInput) -> None:
        self._site, self._prompt, self._pre_rope = site, prompt, study.pre_rope
        plans = {name: method.plan(site.index, data.loaded.shape, {}) for name, method in study.methods().items()}
        self._plans = {name: plan.keys for name, plan in plans.items()}
        self._vectors: dict[str, Tensor] = {}
        self.curves: dict[str, Tensor] = dict.fromkeys(CURVES, torch.zeros((), dtype=torch.float32))
        self.errors = {name: [0.0, 0.0] for name in METHODS}

    def add(self, name: str, prompt: Prompt) -> None:
        """Store the singular vectors of another text (name "sequence" or "text"), or measure a sequence ("whole")."""
        kv_heads = prompt.keys.shape[1]
        queries = by_kv_head(prompt.queries, kv_heads)
        if name != "whole":
            self._vectors[name] = directions(queries)
            return
        vectors = {"whole": directions(queries)}
        vectors["prompt"] = directions(by_kv_head(prompt.queries[:, :, : self._prompt], kv_heads))
        for curve, of_subspace in {**vectors, **self._vectors}.items():
            self.curves[curve] = self.curves[curve] + deviations(queries, of_subspace).cpu()
        response = by_kv_head(prompt.queries[:, :, self._prompt :], kv_heads)
        self.curves["response"] = self.curves["response"] + deviations(response, vectors["prompt"]).cpu()
        for method in METHODS:
            for index, error in enumerate(self._errors(method, prompt)):
                self.errors[method][index] += error

    def _errors(self, method: str, sequence: Prompt) -> tuple[float, float]:
        """Mean score error and moved attention weight of the response's queries."""
        plan, tokens, codec = self._plans[method], sequence.keys.shape[2], self._plans[method].codec
        if isinstance(codec, PromptCodec):
            parts = (x[:, :, : self._prompt] for x in (sequence.keys, sequence.values, sequence.queries))
            codec = codec.with_state(codec.fit(Prompt(*parts)))
        packed = plan.window.packed(tokens)
        restored = codec.decode(codec.encode(sequence.keys[:, :, :packed]), torch.float32)
        queries, keys = sequence.queries[0].float(), sequence.keys[0].float()
        quantized = torch.cat([restored[0], keys[:, packed:]], dim=1)
        positions = torch.arange(self._prompt, tokens, device=keys.device)
        boundary = [plan.window.packed(position + 1) for position in positions.tolist()]
        scaling = getattr(self._site.module, "scaling", None) or keys.shape[-1] ** -0.5
        scores = Scores(scaling, torch.tensor(boundary, device=keys.device), self._hidden(positions, tokens))
        exact, approximate = (scores.of(queries[:, self._prompt :], side) for side in (keys, quantized))
        error = scores.error(exact, approximate)
        if self._pre_rope:
            rotate = self._site.rotation.at
            response = rotate(queries, 0)[:, self._prompt :]
            exact, approximate = (scores.of(response, rotate(side, 0)) for side in (keys, quantized))
        return error, scores.moved(exact, approximate)

    def _hidden(self, positions: Tensor, tokens: int) -> Tensor:
        distance = positions.unsqueeze(1) - torch.arange(tokens, device=positions.device)
        window = self._site.sliding_window
        return distance < 0 if window is None else (distance < 0) | (distance >= window)


def _with_responses(loaded: LoadedModel, prompts: Tensor, tokens: int, seed: int, progress: Progress) -> list[Tensor]:
    """Each prompt `[prompt]`, followed by `tokens` tokens that the model samples after it."""
    sequences, device = [], loaded.model.device
    settings: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": True, "top_k": 0}
    settings["eos_token_id"] = loaded.model.generation_config.eos_token_id  # not sampled before the last token
    for index, prompt in enumerate(prompts):
        progress("responses", index, len(prompts))
        ids = prompt[None].to(device)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
            torch.manual_seed(seed + index)
            sequences.append(continue_ids(loaded.model, ids, torch.ones_like(ids), None, settings)[0].cpu())
    progress("responses", len(prompts), len(prompts))
    return sequences


def _draw(figure: Figure, numbers: dict[str, Any]) -> None:
    """Above: deviation over dimensions, for some layers. Below: errors by layer."""
    above, below = figure.subfigures(2, 1, squeeze=False)[:, 0]
    layers = len(numbers["score_error"]["kivi"])
    shown = spread(layers, DRAWN_LAYERS)
    for axis, layer in zip(above.subplots(1, len(shown), sharey=True, squeeze=False)[0], shown, strict=True):
        for name, label in CURVES.items():
            axis.plot(numbers["deviation"][name][layer], label=label, **LINE_STYLES.get(name, {}))
        axis.set(title=f"layer {layer}", xlabel="dimensions r", ylim=(0, 1))
        axis.grid(alpha=0.3)
    above.axes[0].set_ylabel("deviation of queries")
    above.axes[-1].legend(fontsize=7, title="subspace of", title_fontsize=7)
    labels = {"score_error": "mean error of a score", "moved_attention": "share of attention moved"}
    for axis, (key, label) in zip(below.subplots(1, 2), labels.items(), strict=True):
        for shift, name in ((-0.2, "kivi"), (0.2, "squat")):
            axis.bar([layer + shift for layer in range(layers)], numbers[key][name], 0.4, label=name)
        axis.set(xlabel="layer", ylabel=label)
        integer_ticks(axis)
        axis.legend(fontsize=8)
