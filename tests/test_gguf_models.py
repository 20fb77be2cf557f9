"""GGUF files of random models: logits against the models that were written into them, the cache folder, errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter
from gguf_files import WORDS, quantized, write_gguf
from transformers import (
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kvq_cli import gguf_models
from kvq_cli.errors import KvqError
from kvq_cli.models import configured_shape, load_model, model_shape, parameters_and_context

F32, F16, BF16, Q8_0 = (getattr(GGMLQuantizationType, name) for name in ("F32", "F16", "BF16", "Q8_0"))
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"num_hidden_layers": 2, "vocab_size": len(WORDS), "max_position_embeddings": 128}
SIZES |= {"rms_norm_eps": float(torch.tensor(1e-6)), "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3["original_max_position_embeddings"] = 8192


def llama(**options) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES | options, tie_word_embeddings=False))


def qwen2(**options) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES | options, tie_word_embeddings=True))


def gemma3(**options) -> PreTrainedModel:
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES | options, head_dim=16, sliding_window=8))


FAMILIES = {MODEL_ARCH.LLAMA: llama, MODEL_ARCH.QWEN2: qwen2, MODEL_ARCH.GEMMA3: gemma3}


def random_model(architecture: MODEL_ARCH, **options) -> PreTrainedModel:
    """Biases and norms, too, are random. Numbers of vectors are exact in bfloat16, norms with 1 added too."""
    torch.manual_seed(0)
    model = FAMILIES[architecture](**options).eval()
    with torch.no_grad():
        for weight in model.parameters():
            vector = torch.randint(-32, 33, weight.shape) / 64
            weight.copy_(torch.randn(weight.shape) / 4 if weight.ndim > 1 else vector)
    return model.requires_grad_(False)


def logits(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.randint(4, len(WORDS), (2, 100), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return model(ids).logits


def assert_tokenizer_of(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """It is the one that transformers reads from the file."""
    read = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in ("ab a<eos>b", " a  abc<bos>"):
        assert tokenizer(text)["input_ids"] == read(text)["input_ids"]
    assert tokenizer.bos_token_id == 2 and tokenizer.decode([8, 9, 1], skip_special_tokens=True) == "ab a"


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """A cache folder of each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvq" / "models"


@pytest.mark.parametrize("kind", (F32, F16, BF16, Q8_0), ids=lambda kind: kind.name)
@pytest.mark.parametrize("architecture", FAMILIES, ids=lambda architecture: architecture.name)
def test_a_file_is_the_model_that_was_written(tmp_path, architecture, kind):
    """In float32, exactly; in the file's own dtype, its weights rounded once."""
    model = random_model(architecture)
    write_gguf(tmp_path / "m.gguf", model, architecture, kind, byte_level=architecture == MODEL_ARCH.QWEN2)
    expected = quantized(model, kind)
    loaded = load_model(str(tmp_path / "m.gguf"), "cpu", "float32")
    assert torch.equal(logits(loaded.model), logits(expected))
    own = {F32: torch.float32, F16: torch.float16}.get(kind, torch.bfloat16)
    loaded = load_model(str(tmp_path / "m.gguf"), "cpu")
    assert loaded.model.dtype == own
    stored = loaded.model.state_dict()
    assert stored.keys() == expected.state_dict().keys()
    assert all(torch.equal(stored[name], weight.to(own)) for name, weight in expected.state_dict().items())
    assert loaded.context == 128 and loaded.model.generation_config.eos_token_id == 1
    assert_tokenizer_of(loaded.tokenizer, tmp_path / "m.gguf")


@pytest.mark.parametrize("architecture", FAMILIES, ids=lambda architecture: architecture.name)
def test_sizes_are_read_without_a_conversion(tmp_path, folders, architecture):
    """Of another dtype, too, a model is then converted once."""
    path = tmp_path / "model.gguf"
    write_gguf(path, random_model(architecture), architecture, BF16)
    shape, (parameters, context) = configured_shape(str(path)), parameters_and_context(str(path))
    assert not folders.exists()
    model = load_model(str(path), "cpu", "float32").model
    assert len([folder for folder in folders.iterdir() if folder.is_dir()]) == 1
    assert (model.num_parameters(), model.config.max_position_embeddings) == (parameters, context)
    assert replace(model_shape(model), dtype="bfloat16") == shape
    assert configured_shape(str(path)) == shape and model_shape(load_model(str(path), "cpu").model) == shape
    assert configured_shape(str(path)) == shape  # of the converted model


def test_a_byte_level_vocabulary_is_kept(tmp_path):
    """As Llama 3 has, in files of the same architecture as those with SentencePiece's."""
    path = tmp_path / "m.gguf"
    write_gguf(path, random_model(MODEL_ARCH.LLAMA), MODEL_ARCH.LLAMA, byte_level=True)
    loaded = load_model(str(path), "cpu")
    assert_tokenizer_of(loaded.tokenizer, path)
    assert loaded.tokenizer("ab a", add_special_tokens=False)["input_ids"] == [8, 9]


def progress(capsys) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("kvq: ")]


def test_it_is_converted_once_and_again_when_it_changes(tmp_path, folders, capsys):
    path = tmp_path / "my model.gguf"
    write_gguf(path, random_model(MODEL_ARCH.LLAMA), MODEL_ARCH.LLAMA)
    load_model(str(path), "cpu")
    first, said = gguf_models.gguf_folder(str(path)), progress(capsys)
    assert said[0].startswith("kvq: converting my model.gguf, once (0.00 GB, to float32)")
    assert said[-1].startswith(f"kvq: converting my model.gguf, 2/2: written to {first}, ")
    load_model(str(path), "cpu", "float32")
    assert not progress(capsys)
    assert sorted(each.name for each in folders.iterdir()) == [first.name, f"{first.name}.lock"]
    assert gguf_models.gguf_folder(str(path), "float16").name == f"{first.name}-float16"
    changed = random_model(MODEL_ARCH.LLAMA, rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    write_gguf(path, changed, MODEL_ARCH.LLAMA)
    assert torch.equal(logits(load_model(str(path), "cpu").model), logits(changed))
    assert gguf_models.gguf_folder(str(path)) != first


@pytest.mark.parametrize(
    ("architecture", "written", "read"),
    [
        (MODEL_ARCH.QWEN2, {"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            MODEL_ARCH.QWEN2,
            {"type": "yarn", "factor": 4.0, "original_context_length": 32},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        (MODEL_ARCH.GEMMA3, {"type": "linear", "factor": 8.0}, {"rope_type": "linear", "factor": 8.0}),
    ],
    ids=["linear", "yarn", "gemma3"],
)
def test_a_scaled_rope_is_read(tmp_path, architecture, written, read):
    rope = {"rope_theta": 1e6, **read}
    if architecture == MODEL_ARCH.GEMMA3:
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    model = random_model(architecture, rope_parameters=rope, num_hidden_layers=6)  # of Gemma's, the last is global
    write_gguf(tmp_path / "m.gguf", model, architecture, rope=written)
    assert torch.equal(logits(load_model(str(tmp_path / "m.gguf"), "cpu").model), logits(model))


def divisors(factor: float = 8.0, dims: int = 16) -> torch.Tensor:
    """What llama.cpp's converter computes of Llama 3's RoPE."""
    wavelengths = 2 * torch.pi * 5e5 ** (torch.arange(0, dims, 2) / dims)
    smooth = (8192 / wavelengths - 1) / (4 - 1)
    between = 1 / ((1 - smooth) / factor + smooth)
    return torch.where(wavelengths < 8192 / 4, 1.0, torch.where(wavelengths > 8192, factor, between))


def test_the_rope_of_llama_3_is_read(tmp_path):
    model = random_model(MODEL_ARCH.LLAMA, rope_parameters=LLAMA_3)
    path = tmp_path / "m.gguf"
    write_gguf(path, model, MODEL_ARCH.LLAMA, more={"rope_freqs.weight": divisors().numpy()})
    loaded = load_model(str(path), "cpu")
    assert torch.equal(logits(loaded.model), logits(model))
    assert loaded.model.config.rope_parameters == LLAMA_3
    write_gguf(path, model, MODEL_ARCH.LLAMA, more={"rope_freqs.weight": divisors().sqrt().numpy()})
    with pytest.raises(KvqError, match=r"divisors \(rope_freqs.weight\) that are not Llama 3's"):
        load_model(str(path), "cpu")


def refused(path: Path, folders: Path) -> str:
    """The error of loading; nothing is left but the lock."""
    with pytest.raises(KvqError) as caught:
        load_model(str(path), "cpu")
    assert {each.suffix for each in folders.iterdir()} <= {".lock"} if folders.is_dir() else True
    message = str(caught.value)
    assert message.startswith(f"--model {path}: ") and "\n" not in message
    return message


def test_files_that_are_no_models_are_refused_in_one_line(tmp_path, folders):
    path = tmp_path / "m.gguf"
    assert "no such file" in refused(path, folders)
    for content in (b"", b"GGUF", b"no gguf file at all" * 9, b"GGUF" + bytes(100)):
        path.write_bytes(content)
        assert "damaged, truncated or no GGUF file" in refused(path, folders)
    write_gguf(path, random_model(MODEL_ARCH.LLAMA), MODEL_ARCH.LLAMA)
    whole = path.read_bytes()
    for size in (30, 200, 900, len(whole) // 2, len(whole) - 64):
        path.write_bytes(whole[:size])
        assert "damaged, truncated or no GGUF file" in refused(path, folders)
    other = tmp_path / "other.bin"
    other.write_bytes(whole)
    assert "neither a folder nor a .gguf file" in refused(other, folders)


def test_a_model_of_which_transformers_would_read_a_part_is_refused(tmp_path, folders):
    path, model = tmp_path / "m.gguf", random_model(MODEL_ARCH.LLAMA)
    write_gguf(path, model, MODEL_ARCH.LLAMA, more={"blk.0.attn_q.bias": torch.ones(64).numpy()})
    assert "LlamaForCausalLM has 63,040 of its 63,104 weights" in refused(path, folders)
    write_gguf(path, model, MODEL_ARCH.LLAMA, rope={"type": "longrope", "factor": 4.0})
    assert "RoPE is scaled by longrope with factor, which transformers does not have" in refused(path, folders)
    model.config.num_hidden_layers = 3
    write_gguf(path, model, MODEL_ARCH.LLAMA)
    assert "lacks the weights model.layers.2.input_layernorm.weight and 8 more" in refused(path, folders)


def test_an_unknown_architecture_and_a_part_are_named(tmp_path, folders):
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "rwkv7")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "does not read GGUF files of architecture 'rwkv7'; it reads bloom, " in refused(path, folders)
    writer = GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "one of 3 parts: join them with llama.cpp's `llama-gguf-split --merge`" in refused(path, folders)


def test_without_gguf_the_error_says_how_to_install_it(tmp_path, folders, monkeypatch):
    path = tmp_path / "m.gguf"
    write_gguf(path, random_model(MODEL_ARCH.LLAMA), MODEL_ARCH.LLAMA)
    monkeypatch.setattr(gguf_models, "find_spec", lambda name: None)
    assert "reading it needs accelerate and gguf: pip install accelerate gguf" in refused(path, folders)


def test_an_interrupted_conversion_leaves_nothing(tmp_path, folders, monkeypatch):
    path = tmp_path / "m.gguf"
    write_gguf(path, random_model(MODEL_ARCH.LLAMA), MODEL_ARCH.LLAMA)

    def interrupt(self, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "save_pretrained", interrupt)
        with pytest.raises(KeyboardInterrupt):
            load_model(str(path), "cpu")
    assert [each.suffix for each in folders.iterdir()] == [".lock"]
    assert load_model(str(path), "cpu").name == str(path)


def test_commands_take_a_file(tmp_path, monkeypatch, kvq):
    monkeypatch.chdir(tmp_path)
    write_gguf(tmp_path / "m.gguf", random_model(MODEL_ARCH.QWEN2), MODEL_ARCH.QWEN2, Q8_0)
    result = kvq("bits", "--model", "m.gguf", "--compare", "fp16", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)
    result = kvq(
        "calibrate", "--model", "m.gguf", "--method", "kvquant", "--bits", "2", "--samples", "2", "--seqlen", "64"
    )
    assert result.exit_code == 0, result.stderr
    made = next((tmp_path / "artifacts" / "m.gguf").iterdir())
    options = ["-n", "4", "--artifact", str(made), "--trust-remote-code"]
    result = kvq("generate", "ab a", "--model", "m.gguf", *options)
    assert result.exit_code == 0, result.stderr
    assert "--trust-remote-code has no effect" in result.stderr
    result = kvq("generate", "ab a", "--model", "m.gguf", "--dtype", "float16", "-n", "1", "--method", "fp16")
    assert result.exit_code == 0, result.stderr
