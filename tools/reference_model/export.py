"""Writes the trained model as a Hugging Face folder, in bfloat16, with its card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from kvq_cli.reference import prompts

from .tokenizer import save

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

CARD = """---
license: cc-by-sa-4.0
language: en
library_name: transformers
pipeline_tag: text-generation
---
# The reference model of kvq

A Llama of {parameters:.1f}M parameters ({layers} layers, hidden size {hidden}, {heads} query heads, {kv_heads} key and
value heads, head_dim {head_dim}, tied embeddings, RoPE theta {theta:.0f}, {vocabulary} byte-level BPE tokens with
single digits), in bfloat16. It shows the effect of a compressed key-value cache offline, because it retrieves from its
context. Do not use it for anything else.

## How to ask
```
{example}
```
The answer is `{answer}`, followed by `{stop}`. All prompt formats are in `kvq_cli/reference/prompts.py`.

## Training
`{command}` (see `tools/reference_model`): {tokens:.1f}M tokens in {steps} steps. A step has {step_tokens} tokens, half
of that in the phases of random repeats. Phases: {plan}.
Muon for the matrices, AdamW for embeddings and norms, linear decay over the last {decay:.0%} of the steps.
Prose: English Wikipedia of 2019, CC BY-SA 4.0 (https://creativecommons.org/licenses/by-sa/4.0/); the documents in
`kvq_cli/reference/data/prose.txt.xz` were held out. Tasks: generated (`tools/reference_model/tasks.py`).

## Measured at the end of training
In float32, {samples} samples per task and length: the share of answers that greedy decoding gets entirely right.
`kvq eval` measures RULER itself.

| task | {columns} |
|---|{rules}|
{rows}

Perplexity of held-out Wikipedia prose in windows of 512 tokens: {perplexity}.
"""


def card(model: LlamaForCausalLM, scores: dict, recipe: dict) -> str:
    """The model card: architecture, prompt format, training and scores."""
    settings = model.config
    lengths = sorted({name.split("@")[1] for name in scores["tasks"]}, key=int)
    rows = []
    for task in dict.fromkeys(name.split("@")[0] for name in scores["tasks"]):
        values = [scores["tasks"].get(f"{task}@{length}", ["-"])[0] for length in lengths]
        rows.append(f"| {task} | " + " | ".join(map(str, values)) + " |")
    question = prompts.question("numbers", ["calm-oak"])
    return CARD.format(
        parameters=sum(weight.numel() for weight in model.parameters()) / 1e6,
        layers=settings.num_hidden_layers,
        hidden=settings.hidden_size,
        heads=settings.num_attention_heads,
        kv_heads=settings.num_key_value_heads,
        head_dim=settings.head_dim,
        theta=settings.rope_parameters["rope_theta"],
        vocabulary=settings.vocab_size,
        example=prompts.prompt(f"{prompts.NOISE} {prompts.needle('calm-oak', '7654321')} {prompts.NOISE}", question),
        answer=prompts.answer([("calm-oak", "7654321")]),
        stop=prompts.STOP_TOKEN,
        tokens=scores["tokens"] / 1e6,
        columns=" | ".join(f"{length} tokens" for length in lengths),
        rules="---|" * (len(lengths) - 1) + "---",
        rows="\n".join(rows),
        perplexity=scores["perplexity"],
        steps=scores["step"],
        **recipe,
    )


def export(model: LlamaForCausalLM, tokenizer_file: Path, folder: Path, scores: dict, recipe: dict) -> None:
    """Write weights, configuration, tokenizer, scores and card to `folder`, which is replaced."""
    import torch
    from tokenizers import Tokenizer
    from transformers import GenerationConfig, LlamaForCausalLM

    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    copy = LlamaForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=2)
    copy.save_pretrained(part)
    save(Tokenizer.from_file(str(tokenizer_file)), part, model.config.max_position_embeddings)
    (part / "training.json").write_text(json.dumps({**scores, **recipe}, indent=1) + "\n", encoding="utf-8")
    (part / "README.md").write_text(card(model, scores, recipe), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
