"""Write random models of transformers as GGUF files, as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map, quants
from transformers import PreTrainedModel

WORDS = ["<pad>", "<eos>", "<bos>", "<unk>", "▁", "a", "b", "c", "ab", "▁a"]


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    architecture: MODEL_ARCH,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    rope: Mapping[str, Any] | None = None,
    byte_level: bool = False,
    more: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write the model, with the vocabulary `WORDS`.

    kind: of matrices; norms and biases are float32. rope: keys of the metadata below rope.scaling. byte_level: the
    vocabulary is BPE's, as of Llama 3, not SentencePiece's. more: tensors.
    """
    from gguf import MODEL_ARCH_NAMES

    config, writer = model.config, GGUFWriter(path, MODEL_ARCH_NAMES[architecture])
    _write_sizes(writer, config)
    for key, value in (rope or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        (writer.add_uint32 if isinstance(value, int) else add)(f"{writer.arch}.rope.scaling.{key}", value)
    _write_vocabulary(writer, byte_level)
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, weight in model.named_parameters():
        stored = _as_stored(name, weight.detach().float().numpy(), architecture, config)
        renamed = names.get_name(name, try_suffixes=[".weight", ".bias"])
        if weight.ndim > 1:
            writer.add_tensor(renamed, quants.quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(renamed, stored)
    for name, tensor in (more or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantized(model: PreTrainedModel, kind: GGMLQuantizationType) -> PreTrainedModel:
    """The model with the matrices that a GGUF file of `kind` holds, in float32.

    llama.cpp's order of a Llama's keys and queries permutes rows, each quantized by itself.
    """
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.copy_(torch.from_numpy(quants.dequantize(quants.quantize(weight.numpy(), kind), kind)))
    return model


def _write_sizes(writer: GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters  # of models whose layers differ, llama.cpp stores the global layers'
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)


def _write_vocabulary(writer: GGUFWriter, byte_level: bool) -> None:
    if byte_level:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("llama-bpe")
        writer.add_token_list([word.replace("▁", "Ġ") for word in WORDS])  # how it spells a space
        writer.add_token_merges(["a b", "Ġ a"])
    else:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(WORDS)
        writer.add_token_scores([0.0] * 4 + [-float(index) for index in range(4, len(WORDS))])
    writer.add_token_types([TokenType.CONTROL] * 4 + [TokenType.NORMAL] * (len(WORDS) - 4))
    for name, token in (("pad", 0), ("eos", 1), ("bos", 2), ("unk", 3)):
        getattr(writer, f"add_{name}_token_id")(token)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


def _as_stored(name: str, weight: np.ndarray, architecture: MODEL_ARCH, config: Any) -> np.ndarray:
    """A Gemma's norms have 1 added; of a Llama's keys and queries, the two halves of RoPE's pairs are interleaved."""
    if architecture == MODEL_ARCH.GEMMA3 and "norm" in name:
        return weight + 1
    if architecture == MODEL_ARCH.LLAMA and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)
    return weight
