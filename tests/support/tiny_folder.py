"""A tiny random model with a tokenizer as a folder, and fixtures of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reference_model.tokenizer import BOS, EOS, PAD, build
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvq_cli.models import LoadedModel, load_model
from kvq_cli.reference import prose


def write_tiny_model(folder: Path, head_dim: int = 8) -> Path:
    """A Llama of 2 layers and 2 kv heads in the Hugging Face format."""
    built = build([prose("calibration")[:50_000]], vocabulary=320)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built, bos_token=BOS, eos_token=EOS, pad_token=PAD)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim, "max_position_embeddings": 256}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=tokenizer.bos_token_id))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=1.5 * weight.shape[1] ** -0.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """The folder of `write_tiny_model`."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def tiny(tiny_folder) -> LoadedModel:
    return load_model(str(tiny_folder), device="cpu")
