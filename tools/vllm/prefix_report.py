"""Prefixes loaded from a prefix store by vLLM with its own cache: bytes, time to first token, and what codes change.

    .venv/vllm/bin/python tools/vllm/prefix_report.py examples/texts/*.txt.xz --model smollm2 --tokens 1000 \
        --artifacts artifacts/smollm2/klt-4bit artifacts/smollm2/klt-3bit artifacts/smollm2/klt-2bit

Each text gives a prompt and the tokens after it. One engine computes all of the prompt; every other engine stores the
prompts, loads them, and computes the distribution of each next token after those before it. `KL` is from the first
engine's distributions, in nats a token, and from those with blocks stored as they are, with the share of tokens whose
likeliest one is the same. Each engine also answers greedily: `alike` are the tokens before the first that differs, a
mean over prompts. Times to the first token are the least of `--rounds` rounds, a mean over prompts, on the
clock and of the CPU, which other programs do not lengthen; files are in the operating system's cache by then. On a
machine without a GPU, set KVQ_VLLM_CPU=1: FlexAttention then runs in PyTorch.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoTokenizer

from kvq_cli.data.texts import load_text, token_windows
from kvq_cli.evaluation.formats import markdown
from kvq_cli.models import model_source
from kvq_cli.vllm.prefix_store.settings import RAW, StoreSettings

#: Without a store.
COMPUTED = "nothing: computed"
COLUMNS = ("stored", "bytes", "fewer", "seconds", "of CPU", "KL", "same", "alike", "KL to raw", "same", "alike")


class Prompt(NamedTuple):
    """following: the next tokens of its text."""

    tokens: list[int]
    following: list[int]


class Found(NamedTuple):
    """nbytes: of the smallest file, which has codes, where any has; 0: there is none. seconds: to the first token,
    on the clock and of the CPU. logs: of probabilities, float32 `[prompts, tokens, vocabulary]`. answers: greedy ones,
    int64 `[prompts, tokens]`."""

    nbytes: int
    seconds: tuple[float, float]
    logs: Tensor
    answers: Tensor


class Engine:
    """vLLM in this process. Requests run alone."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def compute(self, tokens: list[int], new: int = 1) -> list[int]:
        """Compute `new` next tokens, greedily, where vLLM's own cache has nothing of the prompt."""
        from vllm import SamplingParams

        self._llm.reset_prefix_cache()
        greedy = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
        (answer,) = self._llm.generate([{"prompt_token_ids": tokens}], greedy, use_tqdm=False)
        return list(answer.outputs[0].token_ids)

    def store(self, prompts: list[Prompt]) -> None:
        """Compute prompts, and wait until their blocks are written."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        for prompt in prompts:
            self.compute(prompt.tokens)
        get_kv_transfer_group().transfers.writer.flush()

    def seconds(self, prompt: list[int]) -> tuple[float, float]:
        """Return the time to the first token, on the clock and of the CPU."""
        start, cpu = time.perf_counter(), time.process_time()
        self.compute(prompt)
        return time.perf_counter() - start, time.process_time() - cpu

    def logs(self, prompt: Prompt) -> Tensor:
        """Return the logarithms of the probabilities of each token after the prompt, float32 `[tokens, vocabulary]`."""
        hidden: list[Tensor] = []
        (model,) = self._llm.apply_model(lambda model: model)
        hook = model.register_forward_hook(lambda module, inputs, output: hidden.append(output.clone()))
        self.compute([*prompt.tokens, *prompt.following[:-1]])
        hook.remove()
        last = torch.cat(hidden)[-len(prompt.following) :]
        return model.compute_logits(last).float().log_softmax(-1)


@contextmanager
def running(arguments: argparse.Namespace, store: StoreSettings | None) -> Iterator[Engine]:
    """Return an engine with room for one prompt and the tokens after it."""
    from vllm import LLM

    llm: Any = LLM(
        model=model_source(arguments.model),
        enforce_eager=True,
        dtype=arguments.dtype,
        block_size=arguments.block_size,
        attention_config={"backend": arguments.backend},
        kv_transfer_config=None if store is None else store.transfer_config(),
        max_num_batched_tokens=512,
        max_num_seqs=1,
        max_model_len=arguments.tokens + arguments.new + 1,
        kv_cache_memory_bytes=1 << 30,
        num_gpu_blocks_override=2 - -(arguments.tokens + arguments.new) // arguments.block_size,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )
    try:
        yield Engine(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def measure(engine: Engine, prompts: list[Prompt], rounds: int, nbytes: int = 0) -> Found:
    """nbytes: as in `Found`."""
    times = torch.tensor([[engine.seconds(prompt.tokens) for _ in range(rounds)] for prompt in prompts])
    clock, cpu = times.amin(1).mean(0).tolist()
    logs = torch.stack([engine.logs(prompt) for prompt in prompts])
    answers = torch.tensor([engine.compute(prompt.tokens, len(prompt.following)) for prompt in prompts])
    return Found(nbytes, (clock, cpu), logs, answers)


def row(title: str, found: Found, computed: Found, raw: Found) -> list[str]:
    """Return a row of the table."""
    fewer = f"{raw.nbytes / found.nbytes:.1f} times" if found.nbytes else ""
    nbytes = f"{found.nbytes:,}" if found.nbytes else ""
    cells = [title, nbytes, fewer, *(f"{seconds:.2f}" for seconds in found.seconds)]
    for other in (computed, raw):
        same = (found.logs.argmax(-1) == other.logs.argmax(-1)).float().mean().item()
        alike = (found.answers == other.answers).int().cumprod(-1).sum(-1).float().mean().item()
        cells += [f"{divergence(other.logs, found.logs):.4f}", f"{100 * same:.1f} %", f"{alike:.1f}"]
    return cells


def divergence(exact: Tensor, other: Tensor) -> float:
    """Return the mean Kullback-Leibler divergence of `other` from `exact`, in nats."""
    return (exact.exp() * (exact - other)).sum(-1).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="a prompt each")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16", help="of the model and the cache")
    parser.add_argument("--artifacts", nargs="+", default=[], metavar="DIR", help="of klt")
    parser.add_argument("--tokens", type=int, default=1000, help="of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens after a prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--backend", default="FLEX_ATTENTION", help="vLLM's attention")
    arguments = parser.parse_args()
    for name, value in {"PYTHONHASHSEED": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
        os.environ.setdefault(name, value)
    tokenizer = AutoTokenizer.from_pretrained(model_source(arguments.model))
    prompts, length = [], arguments.tokens + arguments.new
    for text in arguments.texts:
        window = token_windows(tokenizer, load_text(text, "evaluation"), length, 1)[0].tolist()
        prompts.append(Prompt(window[: arguments.tokens], window[arguments.tokens :]))
    found = {}
    with running(arguments, None) as engine:
        found[COMPUTED] = measure(engine, prompts, arguments.rounds)
    for title in (RAW, *arguments.artifacts):
        with TemporaryDirectory() as folder, running(arguments, StoreSettings(folder, title)) as engine:
            engine.store(prompts)
            nbytes = min(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))
            found[title] = measure(engine, prompts, arguments.rounds, nbytes)
    rows = [row(title, each, found[COMPUTED], found[RAW]) for title, each in found.items()]
    print(markdown(COLUMNS, rows))


if __name__ == "__main__":
    main()
