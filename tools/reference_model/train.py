"""Trains the reference model: `python -m reference_model.train --text FILE... --out DIR`.

It runs on a CPU or a GPU, prints its progress, and, started again with the same arguments, continues from the last
checkpoint: a step's data depends on the seed and the step alone, and checkpoints are written atomically.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvq_cli.calibration import blocked_attention

from . import corpus
from .curriculum import Curriculum, Phase, phases, task_texts
from .evaluate import evaluate, held_out_samples
from .export import export
from .loss import cross_entropy
from .muon import Muon

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM

PRESETS = {"cpu": (24_000_000, 8192, 4096), "gpu": (600_000_000, 65536, 65536), "tiny": (400_000, 2048, 2048)}
"""Tokens of the whole training, of an optimizer step, and of a micro-batch (fastest when it fits the CPU's caches)."""

MATRIX_RATE, VECTOR_RATE = 5e-3, 2e-3
WARM_UP, DECAY = 50, 0.3
"""Steps of warm-up; the share of steps at the end in which the learning rate falls to zero."""
SAMPLES = 10
"""Held-out samples of each task and length."""


def config(vocabulary: int = 4096, **changes: Any) -> LlamaConfig:
    """The reference model's architecture."""
    from transformers import LlamaConfig

    return LlamaConfig(
        **{
            "vocab_size": vocabulary,
            "hidden_size": 256,
            "intermediate_size": 448,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 4096,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            **changes,
        }
    )


def build(settings: LlamaConfig, seed: int = 0) -> LlamaForCausalLM:
    """A newly initialized model. With transformers' initialization (std 0.02) it does not learn lookup by content."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(settings)
    for name, weight in model.named_parameters():
        if "embed_tokens" in name:
            torch.nn.init.normal_(weight, std=0.06)
        elif weight.ndim == 2:
            into_residual = "o_proj" in name or "down_proj" in name
            depth = (2 * settings.num_hidden_layers) ** -0.5 if into_residual else 1.0
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5 * depth)
    return model


def optimizers(model: LlamaForCausalLM, bfloat16: bool) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, computed in bfloat16 or float32; AdamW for the embeddings and norms."""
    matrices = [w for n, w in model.named_parameters() if w.ndim == 2 and "embed" not in n]
    others = [w for n, w in model.named_parameters() if w.ndim != 2 or "embed" in n]
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    return [
        Muon(matrices, lr=MATRIX_RATE, momentum=0.95, weight_decay=0.02, dtype=dtype),
        torch.optim.AdamW(others, lr=VECTOR_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def rate(step: int, steps: int) -> float:
    """The factor of the learning rate at a step: warm-up, constant, linear decay."""
    return min(1.0, (step + 1) / WARM_UP, (steps - step) / (steps * DECAY))


def _has_bfloat16_units() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware; float32 is faster where it is emulated."""
    tests = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, test, lambda: False)() for test in tests)


class Trainer:
    """The model, its optimizers and the current step."""

    def __init__(
        self,
        curriculum: Curriculum,
        settings: LlamaConfig,
        device: str,
        micro_batch: int,
        seed: int = 0,
        compiled: bool = True,
    ) -> None:
        self.curriculum, self.device, self.micro_batch, self.step = curriculum, device, micro_batch, 0
        self.bfloat16 = device == "cuda" or _has_bfloat16_units()
        self.model = build(settings, seed).to(device)
        self.optimizers = optimizers(self.model, self.bfloat16)
        self.full_rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self.body = self.model.model
        if compiled and (device == "cuda" or shutil.which(os.environ.get("CXX", "g++"))):
            self.body = torch.compile(self.body, dynamic=False)
        if device == "cpu":
            blocked_attention.register()
            self.model.config._attn_implementation = blocked_attention.NAME

    def advance(self) -> float:
        """Take an optimizer step and return the weighted mean loss."""
        ids, weights, _ = self.curriculum.batch(self.step)
        rows = max(1, self.micro_batch // (ids.shape[1] - 1))
        total, loss_sum = float(weights.sum()), 0.0
        for start in range(0, len(ids), rows):
            part = torch.from_numpy(ids[start : start + rows]).to(self.device)
            weight = torch.from_numpy(weights[start : start + rows]).to(self.device)
            with torch.autocast(self.device, torch.bfloat16, enabled=self.bfloat16):
                hidden = self.body(input_ids=part[:, :-1], use_cache=False).last_hidden_state
                hidden = hidden.bfloat16() if self.bfloat16 else hidden
                loss = cross_entropy(self.model, hidden, part, weight) / total
            loss.backward()
            loss_sum += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        factor = rate(self.step, self.curriculum.steps)
        for optimizer, full_rates in zip(self.optimizers, self.full_rates, strict=True):
            for group, full_rate in zip(optimizer.param_groups, full_rates, strict=True):
                group["lr"] = full_rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss_sum

    def save(self, file: Path) -> None:
        """Write a checkpoint, which replaces the last one only when it is complete."""
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        torch.save(state, file.with_suffix(".tmp"))
        file.with_suffix(".tmp").replace(file)

    def load(self, file: Path) -> None:
        """Restore model, optimizers and step from a checkpoint."""
        state = torch.load(file, map_location=self.device, weights_only=True)
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line, prepare the corpus and train."""
    parser = argparse.ArgumentParser(prog="python -m reference_model.train", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--text", type=Path, nargs="+", required=True, help="plain or .xz text, <|doc|> between documents"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the corpus, checkpoints, log and model")
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--tokens", type=int, help="tokens of the whole training (default: the preset's)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=5.0, help="between checkpoints")
    chosen = parser.parse_args(arguments)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if chosen.device == "auto" else chosen.device
    tokens, step_tokens, micro_batch = PRESETS[chosen.preset]
    corpus.prepare(chosen.text, chosen.out / "corpus", task_texts(chosen.seed), log=_log)
    curriculum, held_out = load_curriculum(chosen.out / "corpus", chosen.tokens or tokens, step_tokens, chosen.seed)
    trainer = Trainer(curriculum, config(curriculum.vocabulary), device, micro_batch, chosen.seed)
    command = f"python -m reference_model.train --text wikipedia_prose.txt.xz --preset {chosen.preset}"
    command += f" --tokens {chosen.tokens or tokens} --seed {chosen.seed}"
    run(trainer, chosen.out, held_out, chosen.minutes * 60, {"command": command})


def load_curriculum(folder: Path, tokens: int, step_tokens: int, seed: int) -> tuple[Curriculum, np.ndarray]:
    """The curriculum over a prepared corpus, and the second half of the held-out prose as token ids."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    curriculum = Curriculum(
        plan=phases(tokens, step_tokens, size),
        tokens=np.load(folder / "tokens.npy", mmap_mode="r"),
        encode=encode,
        decode=tokenizer.decode,
        vocabulary=size,
        seed=seed,
    )
    held_out = (folder / "held_out.txt").read_text(encoding="utf-8").replace(f"\n{corpus.DOCUMENT_SEPARATOR}\n", "\n\n")
    return curriculum, np.asarray(encode(held_out[len(held_out) // 2 :]))


def describe(curriculum: Curriculum) -> dict[str, Any]:
    """The training plan as the model card prints it."""
    plan = ", ".join(f"{phase.name}: {phase.tokens / 1e6:.1f}M" for phase in curriculum.plan)
    return {"plan": plan, "step_tokens": curriculum.plan[-1].step_tokens, "decay": DECAY, "samples": SAMPLES}


def run(trainer: Trainer, out: Path, held_out: np.ndarray, seconds: float, recipe: dict) -> None:
    """Train to the end of the plan. Every `seconds`: checkpoint, evaluate, export and log.

    recipe: recorded with the exported model.
    """
    checkpoint, curriculum = out / "checkpoint.pt", trainer.curriculum
    if checkpoint.exists():
        trainer.load(checkpoint)
        _log(f"continuing at step {trainer.step}")
    samples = held_out_samples(curriculum, (256, 512, 1024), SAMPLES)
    saved = time.monotonic()
    began, first = saved, trainer.step
    seen = tokens_before(curriculum, trainer.step)
    start = seen
    while trainer.step < curriculum.steps:
        phase = curriculum.phase(trainer.step)
        loss = trainer.advance()
        seen += phase.step_tokens
        now = time.monotonic()
        if trainer.step % 10 == 0 or trainer.step - first < 5:
            speed = (seen - start) / (now - began)
            total = tokens_before(curriculum, curriculum.steps)
            left = (total - seen) / speed / 60
            _log(
                f"step {trainer.step}/{curriculum.steps} {phase.name}: loss {loss:.3f}, {seen / 1e6:.2f}M of "
                f"{total / 1e6:.1f}M tokens, {speed:.0f} tokens/s, {left:.0f} min left"
            )
        last = trainer.step == curriculum.steps
        if now - saved > seconds or last:
            trainer.save(checkpoint)
            scores = {"step": trainer.step, "tokens": seen, "phase": phase.name, "loss": round(loss, 4)}
            if phase.alphabet is None:
                chosen = [each for each in samples if last or int(each.name.split("@")[1]) <= 2 * _longest(phase)]
                scores |= evaluate(trainer.model, chosen, held_out, trainer.device)
                export(
                    trainer.model,
                    out / "corpus" / "tokenizer.json",
                    out / "export",
                    scores,
                    recipe | describe(curriculum),
                )
            with open(out / "log.jsonl", "a", encoding="utf-8") as log:
                log.write(json.dumps(scores) + "\n")
            _log(json.dumps(scores))
            saved = time.monotonic()


def tokens_before(curriculum: Curriculum, step: int) -> int:
    """The number of tokens in the first `step` steps."""
    seen = 0
    for phase in curriculum.plan:
        done = min(step, phase.steps)
        seen, step = seen + done * phase.step_tokens, step - done
    return seen


def _longest(phase: Phase) -> int:
    return max(length for length, _ in phase.lengths)


def _log(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
