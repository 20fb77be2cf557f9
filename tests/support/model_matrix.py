"""Tiny random models of transformers' families, and what kvq does with each: docs/MODELS.md and its test."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from random_artifacts import random_parts
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvq_cli.artifact import Artifact, fingerprint
from kvq_cli.attention.attach import attach
from kvq_cli.attention.capture_points import AttentionLayer, attention_layers
from kvq_cli.calibration.factors import factorize
from kvq_cli.codecs.identity import IdentityCodec
from kvq_cli.errors import KvqError
from kvq_cli.layer_kinds import has_states, layer_kinds
from kvq_cli.methods.base import LayerPlan, Method, ModelShape, StreamPlan
from kvq_cli.methods.registry import build, method_class, method_names, to_config
from kvq_cli.methods.specs import FactorSpec
from kvq_cli.methods.window import Window
from kvq_cli.models import model_shape

LAYERS, VOCABULARY, TOKENS = 3, 97, 44
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
LINEAR = ["linear_attention", "full_attention", "linear_attention"]
#: transformers' model types that kvq computes, with options that show what is special about each.
FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bamba": {"attn_layer_indices": [1]},
    "biogpt": {},
    "bitnet": {},
    "cohere": {"use_qk_norm": True},
    "cohere2": {"sliding_window": 7, "layer_types": SLIDING},
    "ernie4_5": {},
    "exaone4": {"sliding_window": 7, "layer_types": SLIDING},
    "falcon_h1": {},
    "gemma": {},
    "gemma2": {"sliding_window": 7, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 7, "layer_types": SLIDING},
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {"rotary_pct": 0.5},
    "gpt_oss": {"sliding_window": 7, "num_local_experts": 2, "num_experts_per_tok": 1},
    "granite": {"attention_multiplier": 0.3},
    "granitemoe": {},
    "granitemoehybrid": {"layer_types": LINEAR},
    "helium": {},
    "hunyuan_v1_dense": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "llama": {},
    "llama4_text": {"attention_chunk_size": 7, "no_rope_layers": [1, 0, 1]},
    "ministral": {"sliding_window": 7, "layer_types": SLIDING},
    "mistral": {"sliding_window": 9},
    "mixtral": {},
    "modernbert-decoder": {"sliding_window": 8},
    "nanochat": {},
    "nemotron": {"partial_rotary_factor": 0.5},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "moe"]},
    "olmo": {"clip_qkv": 2.0},
    "olmo2": {},
    "olmo3": {"sliding_window": 7, "layer_types": SLIDING},
    "olmo_hybrid": {"layer_types": LINEAR},
    "olmoe": {},
    "opt": {},
    "persimmon": {"qk_layernorm": True},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {"partial_rotary_factor": 0.5, "sliding_window": 9},
    "phimoe": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {"use_sliding_window": True, "sliding_window": 5, "layer_types": SLIDING},
    "qwen3_moe": {},
    "qwen3_5_text": {"layer_types": LINEAR},
    "qwen3_next": {"layer_types": LINEAR},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "stablelm": {"qk_layernorm": True},
    "starcoder2": {"sliding_window": 9},
    "vaultgemma": {"sliding_window": 7, "layer_types": SLIDING},
}
#: Model types that kvq refuses, for different reasons.
REFUSED: dict[str, dict[str, Any]] = {
    "bert": {},
    "bloom": {},
    "codegen": {"rotary_dim": 8},
    "deepseek_v3": {},
    "diffllama": {},
    "falcon": {},
    "gemma4_text": {},
    "gptj": {"rotary_dim": 8},
    "jetmoe": {},
    "mamba": {},
    "minimax": {},
    "mpt": {},
    "recurrent_gemma": {},
    "rwkv": {},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention"]},
}
#: What layers of a kind have beside, or in place of, attention that is compressed.
_OTHER_KINDS = {
    "chunked_attention": "layers of chunked attention",
    "conv": "layers of convolutions",
    "hybrid": "Mamba beside attention",
    "linear_attention": "layers of linear attention or Mamba",
}
#: Standard deviation of the key biases of Qwen 2.5, which reach hundreds.
LARGE_BIASES = {"qwen2": 150.0}

_SIZES = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), 80),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 512),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **{"num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2},
    # Latent attention, which is refused, and linear attention: small enough to be built.
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_d_state": 8, "mamba_n_groups": 1},
    **{"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False},
}


def tiny_model(model_type: str, **options: Any) -> PreTrainedModel:
    """A random float32 model of 3 layers, 4 query heads, 2 kv heads (or 4) of 16 channels, and 97 words."""
    torch.manual_seed(0)
    config_class = transformers.CONFIG_MAPPING[model_type]
    names = {name for base in config_class.__mro__ for name in getattr(base, "__annotations__", {})}
    names |= {*inspect.signature(config_class.__init__).parameters, *getattr(config_class, "attribute_map", {})}
    config = config_class(**{**{key: size for key, size in _SIZES.items() if key in names}, **options})
    model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])(config)
    model = model.float().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:  # the library's own start is so flat that all attention is alike
            parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
        elif name.endswith("k_proj.bias"):
            parameter.normal_(std=LARGE_BIASES.get(model_type, 1.0))
    if getattr(config, "attn_logit_softcapping", None):
        # transformers 5.17 computes Gemma 2 by SDPA, which leaves out the cap of the scores.
        model.set_attn_implementation("eager")
    return model


@dataclass(frozen=True)
class Row:
    """What kvq does with a family. errors: largest difference of the logits from the model's own, relative to the
    largest logit, by what is cached in 16 bits or more; refused: reasons by method or kind of cache."""

    model_type: str
    features: str
    errors: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


class PreRope(Method):
    """Keys before RoPE and values, not compressed."""

    name, paper, summary = "pre-rope", "", ""

    @property
    def nominal_bits(self) -> float:
        return 16.0

    def plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, Tensor]) -> LayerPlan:
        window = Window(3, 2, 4)
        return LayerPlan(StreamPlan("pre_rope", IdentityCodec(), window), StreamPlan("value", IdentityCodec(), window))


def examine(model_type: str) -> Row:
    """Build the family's model, compare exact caches with the model's own logits, and decode with every method."""
    model = tiny_model(model_type, **{**FAMILIES, **REFUSED}[model_type])
    exact = {"after RoPE": build("fp16"), "before RoPE": PreRope(), "layer input": build("xquant", bits=16, group=16)}
    errors, refused = {}, {}
    own = _own_logits(model)
    for name, method in exact.items():
        try:
            errors[name] = ((_decoded(model, method) - own).abs().max() / own.abs().max()).item()
        except KvqError as error:
            refused[name] = str(error)
    for name in method_names():
        try:
            if not _decoded(model, small_method(name)).isfinite().all():
                raise ValueError(f"{model_type}: {name} gives logits that are not finite")
        except KvqError as error:
            refused[name] = str(error)
    layers = attention_layers(model, points="before RoPE" in errors)
    return Row(model_type, features(model, layers, "before RoPE" in errors), errors, refused)


def refusal(model_type: str) -> str:
    """The message with which kvq refuses the family; ValueError if it does not."""
    try:
        model = tiny_model(model_type, **REFUSED[model_type])
        with attach(model, build("fp16")) as kv:
            model(_ids(), past_key_values=kv.new_cache())
        raise ValueError(f"{model_type} is not refused")
    except KvqError as error:
        return str(error)


def features(model: PreTrainedModel, layers: list[AttentionLayer], rotations: bool) -> str:
    """What is special about a model's attention, as words between commas. rotations: those of `layers` are known."""
    shape, config = model_shape(model), model.config
    styles = {layer.rotation.style for layer in layers} if rotations else set()
    heads = {shape.query_heads: "MHA", 1: "MQA"}.get(shape.kv_heads, "GQA")
    normed = any(layer.key and type(layer.key.module).__name__.endswith("Norm") for layer in layers)
    rotated = "RoPE before the key norm" if normed else "no RoPE"
    words = [heads, rotated if styles == {"none"} else "layers without RoPE" if "none" in styles else ""]
    words.append("interleaved RoPE" if "interleaved" in styles else "")
    if any(0 < layer.rotation.width < shape.head_dim for layer in layers):
        words.append("partial RoPE")
    if any(layer.sliding_window for layer in layers):
        words.append("sliding window")
    if normed:
        words.append("key norm")
    if getattr(config, "attn_logit_softcapping", None):
        words.append("capped scores")
    if any(hasattr(layer.module, "sinks") for layer in layers):
        words.append("sink logits")
    words += [_OTHER_KINDS[kind] for kind in {*layer_kinds(config)} & {*_OTHER_KINDS}]
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if names & {"experts", "router", "block_sparse_moe"}:
        words.append("MoE")
    if any(getattr(getattr(layer.module, "k_proj", None), "bias", None) is not None for layer in layers):
        words.append("large biases (hundreds)" if config.model_type in LARGE_BIASES else "biases")
    return ", ".join(sorted({*words} - {""}, key=lambda word: (word != heads, word)))


def _ids() -> Tensor:
    return torch.randint(3, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))


def _own_logits(model: PreTrainedModel) -> Tensor:
    """The model's own logits, of one pass; of a model with other states, of the passes of `_decoded`: states of some
    families (Jamba) depend on how a text is cut."""
    if not has_states(model.config):
        return model(_ids()).logits
    return _passes(model, DynamicCache(config=model.config))


def _passes(model: PreTrainedModel, cache: Cache) -> Tensor:
    """Logits of a prompt, a chunk and single tokens."""
    ids, starts, parts = _ids(), [0, 20, 37, *range(38, TOKENS + 1)], []
    for first, last in pairwise(starts):
        # As `generate` does: Bamba counts them from 0 in each pass.
        positions = {"position_ids": torch.arange(first, last)[None]} if has_states(model.config) else {}
        parts.append(model(ids[:, first:last], past_key_values=cache, **positions).logits)
    return torch.cat(parts, dim=1)


def _decoded(model: PreTrainedModel, method: Method) -> Tensor:
    """Logits of a prompt, a chunk and single tokens, read from the compressed cache; some tokens must be packed."""
    with attach(model, ready_method(model, method), prefill="compressed") as kv:
        cache = kv.new_cache()
        logits = _passes(model, cache)
        # Windows that are shorter than what is recent drop all that is packed.
        assert cache.report().compressed > 0 or any(cache.dropped()) or method.nominal_bits == 16
    return logits


def small_method(name: str) -> Method:
    """The method at 2 bits, or the fewest that it has, with groups and windows that fit the tiny models."""
    wanted = {"bits": 2, "group": 16, "residual": 16, "sinks": 2, "recent": 4}
    known = {option.name: option.metadata["choices"] for option in fields(method_class(name))}
    defaults = {option.name: option.default for option in fields(method_class(name))}
    if (defaults.get("buffer") or 0) > TOKENS // 2:
        wanted["buffer"] = 16
    if known.get("bits") and 2 not in known["bits"]:
        wanted["bits"] = min(known["bits"])
    return build(name, **{key: value for key, value in wanted.items() if key in known})


def ready_method(model: PreTrainedModel, method: Method) -> Method | Artifact:
    """The method, or its artifact: real factors of the weights, random codebooks."""
    shape = model_shape(model)
    if not method.needs_artifact(shape):
        return method
    spec = method.calibration(shape)
    if not isinstance(spec, FactorSpec):
        config, tensors = random_parts(method, model)
        return Artifact(config, tensors, Path("nowhere"))
    tensors = {}
    for layer in attention_layers(model):
        factors, _ = factorize(layer, spec.factors(layer.index), shape.torch_dtype)
        tensors |= {f"layers.{layer.index}.{name}": tensor for name, tensor in factors.items()}
    made_for = {"name": "tiny", "fingerprint": fingerprint(model).to_dict()}
    return Artifact({"method": to_config(method), "model": made_for}, tensors, Path("nowhere"))
