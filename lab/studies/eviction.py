"""Eviction beside quantization: what dropping tokens (kvpress) and storing fewer bits (kvq) cost at the same bytes.

    python -m lab.studies.eviction write SAMPLES.json TEXT... --model smollm2
    python -m lab.studies.eviction kvq SAMPLES.json METHOD... --model smollm2
    KVPRESS/bin/python -m lab.studies.eviction kvpress SAMPLES.json SHARE... --model FOLDER

KVPRESS is an environment of its own, since kvpress 0.5.5 needs transformers < 5.3: `pip install kvpress==0.5.5`. FOLDER
has the same weights in Hugging Face's format (smollm2: in ~/.cache/kvq/models). SHARE is that of the tokens kept.

A sample is a prompt, whose cache is compressed after an exact pass over it, and the tokens behind it, which decode
steps read one after the other (teacher-forced) from the compressed cache: windows of texts, and RULER's niah_single_2,
where the prompt ends before the question. Prints a row per method: bits per number of the prompt's cache, where an
evicted number has 0 and a kept one 16; KL from the uncompressed model in nats per token with its standard error over
windows; top-1 agreement; and how many needles greedy decoding finds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvq_cli.evaluation.divergence import divergence

#: The classes of kvpress, and RULER's task.
PRESSES, NEEDLES = ("SnapKVPress", "ExpectedAttentionPress"), "niah_single_2"


@dataclass(frozen=True)
class Sample:
    """prompt: token ids whose cache is compressed; behind: those decoded after it, of which the last `scored` are
    predictions to compare; needle: whether they are an answer."""

    prompt: list[int]
    behind: list[int]
    scored: int
    needle: bool


@dataclass(frozen=True)
class Score:
    bits: float
    kl: float
    top1: float
    answered: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("write", "kvq", "kvpress"))
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="+", metavar="TEXT | METHOD | SHARE")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=2048, help="of a prompt")
    parser.add_argument("--scored", type=int, default=64, help="tokens behind it")
    parser.add_argument("--windows", type=int, default=2, help="of each text")
    parser.add_argument("--needles", type=int, default=8)
    given = parser.parse_args()
    if given.step == "write":
        given.file.write_text(json.dumps([asdict(sample) for sample in written(given)]))
        return
    samples = [Sample(**sample) for sample in json.loads(given.file.read_text())]
    with torch.inference_mode():
        scores = list((scores_of_kvq if given.step == "kvq" else scores_of_kvpress)(given, samples))
    print("| method | bits | KL | top-1 | needles |\n|---|---|---|---|---|")
    for name in scores[0]:
        print(row(Path(name).name, samples, [of_sample[name] for of_sample in scores]))


def written(given: argparse.Namespace) -> Iterator[Sample]:
    """Windows of the texts, and needle questions whose prompts are as long as RULER's of that many tokens."""
    from kvq_cli.data.texts import load_text, token_windows
    from kvq_cli.evaluation.ruler.families import Sources
    from kvq_cli.evaluation.ruler.haystack import Haystack
    from kvq_cli.evaluation.ruler.questions import question_source
    from kvq_cli.evaluation.ruler.samples import RulerSamples
    from kvq_cli.evaluation.ruler.tasks import TASKS
    from kvq_cli.evaluation.ruler.templates import select_templates
    from kvq_cli.models import load_model

    loaded = load_model(given.model, "cpu", given.dtype)
    for name in given.names:
        length = given.tokens + given.scored + 1
        for window in token_windows(loaded.tokenizer, load_text(name, "evaluation"), length)[: given.windows].tolist():
            yield Sample(window[: given.tokens], window[given.tokens :], given.scored, needle=False)
    sources = Sources(Haystack(load_text("prose", "evaluation"), "prose"), question_source([], 0))
    templates = select_templates("standard", loaded.name)
    drawn = RulerSamples(TASKS[NEEDLES], given.tokens, loaded.tokenizer, templates, sources, seed=0)
    for sample in (drawn[index] for index in range(given.needles)):
        asked = sample.prompt.rindex("\nWhat ")
        prompt, question, answer = (
            loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (sample.prompt[:asked], sample.prompt[asked:], f" {sample.references[0]}")
        )
        yield Sample(prompt, question + answer, len(answer), needle=True)


def scores_of_kvq(given: argparse.Namespace, samples: Sequence[Sample]) -> Iterator[dict[str, Score]]:
    from kvq_cli import attach
    from kvq_cli.attention.shared_prompts import SharedPrompts
    from kvq_cli.models import load_model

    model = load_model(given.model, "cpu", given.dtype).model
    with ExitStack() as stack:
        names = ("fp16", *given.names)  # of which the first is the uncompressed model
        attached = {name: stack.enter_context(attach(model, name)) for name in names}
        for sample in samples:
            shared, scores, exact = SharedPrompts([*attached.values()]), dict[str, Score](), None
            for name, method in attached.items():
                with shared.used_by(method):
                    cache = method.new_cache(len(sample.prompt))
                    read(model, cache, sample.prompt, 0)
                    bits = method.report(cache).measured_bits
                    with method.one_by_one():
                        logits = read(model, cache, sample.behind[:-1], len(sample.prompt))
                exact = logits if exact is None else exact
                scores[name] = scored(sample, exact, logits, bits)
            yield scores


def scores_of_kvpress(given: argparse.Namespace, samples: Sequence[Sample]) -> Iterator[dict[str, Score]]:
    import kvpress
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=getattr(torch, given.dtype)).eval()
    presses = {
        f"{name}, {float(share):.1%} of tokens": getattr(kvpress, name)(compression_ratio=1 - float(share))
        for share in given.names
        for name in PRESSES
    }
    for sample in samples:
        caches = {name: DynamicCache() for name in ("none", *presses)}

        def press_all(layer: Any, _args: Any, kwargs: dict[str, Any], output: Any, caches: Any = caches) -> None:
            """Give each press the layer's prompt, as kvpress's hook does, whose cache stays whole here."""
            whole = caches["none"].layers[layer.layer_idx]
            for name, press in presses.items():
                kept = press.compress(layer, kwargs["hidden_states"], whole.keys, whole.values, output[1], kwargs)
                caches[name].update(*kept, layer.layer_idx)

        hooks = []
        for layer in model.model.layers:
            layer.self_attn.rotary_emb = model.model.rotary_emb  # presses read it there
            hooks.append(layer.self_attn.register_forward_hook(press_all, with_kwargs=True))
        read(model, caches["none"], sample.prompt, 0)
        for hook in hooks:
            hook.remove()
        kept = {name: cache.get_seq_length() / len(sample.prompt) for name, cache in caches.items()}
        logits = {name: read(model, cache, sample.behind[:-1], len(sample.prompt)) for name, cache in caches.items()}
        yield {name: scored(sample, logits["none"], logits[name], 16 * kept[name]) for name in caches}


def read(model: Any, cache: Any, tokens: Sequence[int], first: int) -> Tensor:
    """Logits `[tokens, vocabulary]` behind tokens at positions from `first` on; of a prompt, behind its last token."""
    positions = torch.arange(first, first + len(tokens))[None]
    ids, keep = torch.tensor([[*tokens]]), 0 if first else 1
    return model(ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=keep).logits[0]


def scored(sample: Sample, exact: Tensor, logits: Tensor, bits: float) -> Score:
    ids = torch.tensor(sample.behind[-sample.scored - 1 :])
    exact, logits = exact[-sample.scored :], logits[-sample.scored :]
    sums = divergence(exact, logits, ids)
    answered = bool((logits.argmax(-1) == ids[1:]).all())
    return Score(bits, sums.kl / sums.tokens, sums.agreeing / sums.tokens, answered)


def row(name: str, samples: Sequence[Sample], scores: Sequence[Score]) -> str:
    texts = [score for sample, score in zip(samples, scores, strict=True) if not sample.needle]
    needles = [score.answered for sample, score in zip(samples, scores, strict=True) if sample.needle]
    bits, kl, top1 = torch.tensor([[score.bits, score.kl, score.top1] for score in texts], dtype=torch.float64).T
    error = kl.std() / len(kl) ** 0.5
    found = f"{sum(needles)} of {len(needles)}"
    return f"| {name} | {bits.mean():.2f} | {kl.mean():.4f} ±{error:.4f} | {top1.mean():.1%} | {found} |"


if __name__ == "__main__":
    main()
