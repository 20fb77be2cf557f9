"""Tiny random models of many families, and methods that need no artifact."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from kvq_cli.artifact import Artifact, fingerprint
from kvq_cli.attention.capture_points import attention_layers
from kvq_cli.calibration.factors import factorize
from kvq_cli.codecs.codebook import CodebookCodec
from kvq_cli.codecs.identity import IdentityCodec
from kvq_cli.methods.base import LayerPlan, Method, StreamPlan
from kvq_cli.methods.registry import to_config
from kvq_cli.methods.window import Window
from kvq_cli.models import model_shape

sys.path.insert(0, str(Path(__file__).parent))  # for codec_methods

_NAMES = {"gptoss": "GptOss", "smollm3": "SmolLM3", "gpt_neox": "GPTNeoX", "gpt2": "GPT2", "opt": "OPT"}
_NAMES |= {"diffllama": "DiffLlama", "hunyuan": "HunYuanDenseV1"}
#: As many kv heads as query heads, of head_dim hidden_size / heads.
_MULTI_HEAD = ("gpt_neox", "gpt2", "opt", "persimmon")


@pytest.fixture(autouse=True, scope="module")
def few_splits():
    """Interpreted kernels divide a row into few splits: a GPU's multiprocessors would run dozens of empty programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvq_kernels.decode_attention.launch.DEFAULT_SM_COUNT", 1)
        yield


@pytest.fixture(scope="session")
def tiny() -> Callable[..., transformers.PreTrainedModel]:
    """`tiny("qwen3", sliding_window=9)`: a random model of 3 layers, 4 query heads, 2 kv heads, 97 words."""

    def make(family: str, **options) -> transformers.PreTrainedModel:
        torch.manual_seed(0)
        name = _NAMES.get(family, family.capitalize())
        text = f"{name}Text" if family in ("gemma3", "llama4") else name
        sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
        dim = {} if family in ("qwen2", "phi3", "olmo2", *_MULTI_HEAD) else {"head_dim": 16}
        if family in _MULTI_HEAD:
            del heads["num_key_value_heads"]
        config = getattr(transformers, f"{text}Config")(**{**sizes, **heads, **special, **dim, **options})
        head = "LMHeadModel" if family == "gpt2" else "ForCausalLM"
        model = getattr(transformers, f"{name}{head}")(config).eval().requires_grad_(False)
        for parameter in model.parameters():  # the library's own start is so flat that all attention is alike
            if parameter.ndim > 1:
                parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
        if getattr(config, "attn_logit_softcapping", None):
            # transformers 5.17 computes Gemma 2 by SDPA, which leaves out the cap of the scores.
            model.set_attn_implementation("eager")
        return model

    return make


@pytest.fixture(scope="module")
def one_layer(tiny):
    """`one_layer(heads=(4, 2))`: query heads and kv heads of 32 channels."""

    def make(heads=(4, 2), **options):
        query_heads, kv_heads = heads
        shape = {"num_attention_heads": query_heads, "num_key_value_heads": kv_heads, "head_dim": 32}
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return tiny("llama", num_hidden_layers=1, **shape, **options).to(device)

    return make


@dataclass(frozen=True)
class Probe(Method):
    """A method with any codec, window and source of keys."""

    name = "probe"
    paper = summary = ""
    source: str = "pre_rope"
    codec: str = "codebook"
    window: Window = Window(4, 0, 4)
    value_window: Window | None = None

    def __post_init__(self) -> None:
        pass

    @property
    def nominal_bits(self) -> float:
        return 2.0

    def plan(self, layer, shape, tensors) -> LayerPlan:
        codec = IdentityCodec() if self.codec == "identity" else self._codebook(shape, layer)
        values = self.value_window or self.window
        return LayerPlan(StreamPlan(self.source, codec, self.window), StreamPlan("value", codec, values))

    def _codebook(self, shape, layer: int) -> CodebookCodec:
        noise = torch.Generator().manual_seed(layer)
        size = 4
        centroids = torch.randn(shape.kv_heads, shape.head_dim // size, 256, size, generator=noise)
        return CodebookCodec(centroids, (4, 1), shape.head_dim)


@pytest.fixture(scope="session")
def probe() -> type[Probe]:
    return Probe


@pytest.fixture(scope="session")
def prompt() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """`prompt(40, pads=(7, 0))` -> random token ids and the left-padded attention mask."""

    def make(columns: int, pads: tuple[int, ...] = (0,)) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.Generator().manual_seed(1)
        ids = torch.randint(3, 97, (len(pads), columns), generator=noise)
        mask = torch.ones_like(ids)
        for row, count in enumerate(pads):
            mask[row, :count] = 0
        return ids * mask, mask

    return make


@pytest.fixture(scope="session")
def factored() -> Callable[[transformers.PreTrainedModel, Method], Artifact]:
    """`factored(model, method)`: the artifact of a method that needs factors of the model's weights."""

    def make(model: transformers.PreTrainedModel, method: Method) -> Artifact:
        shape, tensors = model_shape(model), {}
        spec = method.calibration(shape)
        for site in attention_layers(model):
            actual, _ = factorize(site, spec.factors(site.index), shape.torch_dtype)
            tensors |= {f"layers.{site.index}.{name}": tensor for name, tensor in actual.items()}
        made_for = {"name": "tiny", "fingerprint": fingerprint(model).to_dict()}
        return Artifact({"method": to_config(method), "model": made_for}, tensors, Path("nowhere"))

    return make
