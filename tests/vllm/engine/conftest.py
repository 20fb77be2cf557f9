"""A tiny model, its artifacts, what `generate` gives with them, and vLLM engines on a CPU in this process.

Needs vLLM and tests/vllm/platform: `make test-vllm`. Importing vLLM takes half a minute, an engine some seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from typing import Any

import pytest
import torch
import vllm_engines
from random_artifacts import random_parts, tiny_model
from random_transforms import random_transform
from vllm_engines import LENGTHS, NEW, V2, generated, running

from kvq_cli import load_artifact
from kvq_cli.artifact import save_artifact
from kvq_cli.artifact.contents import tensor_sizes
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.registry import build_parsed
from kvq_cli.methods.transform_specs import Profile, even_widths
from kvq_cli.models import model_shape
from kvq_cli.vllm.layout import CacheLayout, cache_layout
from kvq_cli.vllm.local_layers import served_shape
from kvq_cli.vllm.served import ServedMethod

# Read when vLLM is imported: one process, no network.
os.environ.update(KVQ_VLLM_CPU="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1")
os.environ.update(VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="1")
if V2:  # which vLLM takes where Triton runs, as on a GPU
    os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")

if "vllm" not in packages_distributions():  # find_spec would find this folder's parent
    collect_ignore_glob = ["test_*.py"]

VOCABULARY = 512
#: Methods for which a code flips on these prompts, by the error with which vLLM rounds keys after RoPE. One code is
#: enough: the model and its codebooks are random.
ROUNDED = ("temporalkv:outliers=0.01:hybrid=head",)


@pytest.fixture(scope="session")
def model():
    """A random Llama of 2 layers, 2 kv heads of 64."""
    sizes = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 64}
    return tiny_model(**sizes, vocab_size=VOCABULARY, max_position_embeddings=1024)


@pytest.fixture(scope="session")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


@dataclass(frozen=True)
class Case:
    """A method of the tiny model, planned for a server, and the tokens that `generate` gives for the prompts."""

    served: ServedMethod
    shape: ModelShape
    layout: CacheLayout
    expected: list[list[int]]

    @property
    def smallest(self) -> CacheLayout:
        """The smallest blocks, which fill up and are freed most often."""
        for size in range(16, 1024, 16):
            with suppress(UsageError):
                return cache_layout(self.served.plans(self.shape), self.shape, size)
        raise ValueError("no block size fits")


#: Bytes that four lanes have of klt's codes, of the keys and values of each layer.
RATES = ((1, 1), (6, 5))


def give_layers_other_bits(config: dict[str, Any], tensors: dict[str, torch.Tensor], shape: ModelShape) -> None:
    """Replace the transforms of klt's two served layers by some of `RATES`: parts of the second then lie in pages of
    the first."""
    for layer, rates in zip(shape.cached_layers, RATES, strict=True):
        for kind, rate in zip("kv", rates, strict=True):
            profile = Profile((even_widths(rate, shape.head_dim),) * shape.kv_heads, True)
            noise = torch.Generator().manual_seed(layer)
            drawn = random_transform(profile.widths, shape.kv_heads, shape.head_dim, noise)
            tensors |= {f"layers.{layer}.{kind}.{name}": tensor for name, tensor in drawn.items()}
            config["errors"]["layers"][layer][kind]["bytes"] = profile.nbytes
    config["sizes"] = tensor_sizes(tensors)


@pytest.fixture(scope="session")
def cases_of(prompts, tmp_path_factory) -> Callable[[Any], Callable[[str], Case]]:
    """`cases_of(model)("kivi:sinks=32")`, 2 bits, with a random artifact where the method needs one."""

    def of(model: Any) -> Callable[[str], Case]:
        made: dict[str, Case] = {}

        def get(text: str) -> Case:
            if text not in made:
                method: Any = build_parsed(text, bits=2)
                shape = served_shape(method, model_shape(model))
                if method.calibrates:
                    config, tensors = random_parts(method, model)
                    if method.name == "klt":
                        give_layers_other_bits(config, tensors, shape)
                    path = tmp_path_factory.mktemp("artifact") / "it"
                    save_artifact(path, config, tensors, "card")
                    method = load_artifact(path)
                served = ServedMethod.of(method)
                layout = cache_layout(served.plans(shape), shape)
                made[text] = Case(served, shape, layout, generated(model, method, prompts, NEW, text in ROUNDED))
            return made[text]

        return get

    return of


@pytest.fixture(scope="session")
def case(model, cases_of) -> Callable[[str], Case]:
    """`case("kivi:sinks=32")` of the tiny Llama."""
    return cases_of(model)


@pytest.fixture
def preempting(monkeypatch) -> Callable[..., Any]:
    """`with preempting() as count:` preempts all running requests twice, beside those that few blocks preempt;
    `count()` is how many there were."""

    @contextmanager
    def run() -> Iterator[Callable[[], int]]:
        with monkeypatch.context() as patch:
            preempted = vllm_engines.preempting(patch, (20, 35))
            yield lambda: len(preempted)

    return run


@pytest.fixture
def start(folder, case) -> Callable[..., Any]:
    """`with start("kivi", max_num_seqs=4) as engine:`."""

    def run(text: str, block_size: int | None = None, **options: Any) -> Any:
        one = case(text)
        return running(folder, one.served, block_size or one.layout.block_size, **options)

    return run
