"""Attaching by name, `generate` without a cache, and `close`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from random_artifacts import random_parts, tiny_model
from transformers import DynamicCache, GenerationConfig, TextGenerationPipeline, TextIteratorStreamer

from kvq_cli import attach
from kvq_cli.artifact import is_artifact, save_artifact
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.methods.registry import build
from kvq_cli.models import load_model, model_name
from kvq_cli.resolve import resolve_compared

KIVI = "kivi-2bit:group=8:residual=16"
OPTIONS = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def same(kv, name: str, **options) -> bool:
    return kv.method == build(name, **options)


def test_methods_are_named_as_for_compare(tiny):
    model = tiny("llama")
    with attach(model, KIVI) as kv:
        assert same(kv, "kivi", bits=2, group=8, residual=16)
    for wrong, says in (
        ("nosuch", "unknown method 'nosuch'"),
        ("kivi-77bit", "bits=77"),
        ("kivi:x=1", "no option 'x'"),
    ):
        with pytest.raises(UsageError, match=says):
            attach(model, wrong)
    assert model.config._attn_implementation != "kvq" and "generate" not in model.__dict__


def test_artifacts_are_named_by_folder_or_by_the_models_own():
    model = tiny_model()
    method = build("temporalkv", bits=2)
    with pytest.raises(KvqError, match=r"temporalkv-2bit needs calibration: calibrate the model, or pass the artifact"):
        attach(model, "temporalkv-2bit")
    model.config._name_or_path = "some/Model"
    says = (
        "run `kvq calibrate --method temporalkv --model some/Model --bits 2`, or pass the artifact of kvq_cli.calibrate"
    )
    with pytest.raises(KvqError, match=re.escape(says)):
        attach(model, "temporalkv-2bit")
    own = save_artifact("artifacts/Model/temporalkv-2bit", *random_parts(method, model), "card")
    Path("mine").symlink_to("artifacts/Model/temporalkv-2bit")
    for name in ("temporalkv-2bit", "temporalkv", "mine", Path("mine"), "./mine", own.path.resolve(), own):
        with attach(model, name) as kv:
            assert same(kv, "temporalkv", bits=2) and kv.origin.artifact == own.digest, name
    for name in ("temporalkv-2bit:sinks=3", "./mine:sinks=3"):
        with attach(model, name) as kv:
            assert same(kv, "temporalkv", bits=2, sinks=3)
    with pytest.raises(KvqError, match="temporalkv-4bit needs calibration"):
        attach(model, "temporalkv-4bit")


@pytest.mark.parametrize("folder", ["kivi", "kivi-2bit"])
def test_a_methods_name_is_not_that_of_a_folder(folder):
    model = tiny_model()
    save_artifact(folder, *random_parts(build("temporalkv", bits=2), model), "card")
    for name in (f"./{folder}", f"./{folder}:sinks=3", Path(folder)):
        with attach(model, name) as kv:
            assert kv.method.name == "temporalkv" and kv.method.bits == 2, name
    with attach(model, f"{folder}:group=8:residual=16") as kv:
        assert same(kv, "kivi", bits=2, group=8, residual=16)
    assert not is_artifact(folder) and is_artifact(f"./{folder}")
    assert [method.name for method in resolve_compared("reference", [folder])] == ["kivi"]
    Path("config.json").write_text("{}")
    for name in ("", ":sinks=3"):
        with pytest.raises(UsageError, match="names nothing: give a method, or the folder"):
            attach(model, name)


def test_the_built_in_model_has_its_name(monkeypatch):
    loaded = load_model("reference")
    assert model_name(loaded.model) == "reference"
    assert model_name(tiny_model()) == ""


@pytest.mark.parametrize("way", ["model", "attached", "config", "beams", "prompt lookup", "chunked"])
def test_generate_takes_a_compressed_cache(tiny, prompt, way):
    model, (ids, mask) = tiny("llama"), prompt(40, pads=(3, 0))
    more = {"beams": {"num_beams": 3}, "chunked": {"prefill_chunk_size": 7}}.get(way, {})
    if way == "prompt lookup":
        ids, mask, more = ids[1:], mask[1:], {"prompt_lookup_num_tokens": 3}
    options = {**OPTIONS, **more}
    plain = model.generate(ids, attention_mask=mask, **options)
    with attach(model, KIVI) as kv:
        expected = model.generate(ids, attention_mask=mask, past_key_values=kv.new_cache(), **options)
        before = kv.report()
        kv.forget_cache()
        if way == "config":
            config = {"generation_config": GenerationConfig(**options)}
            found = model.generate(ids, attention_mask=mask, **config)
        else:
            found = (kv.generate if way == "attached" else model.generate)(ids, attention_mask=mask, **options)
        assert torch.equal(found, expected) and not torch.equal(found, plain)
        assert kv.report().to_dict() == before.to_dict() and before.compressed > 0
        assert torch.equal(kv.generate(ids, attention_mask=mask, **options), expected)  # in a fresh one
    assert torch.equal(model.generate(ids, attention_mask=mask, **options), plain)


def test_other_caches_are_those_that_are_asked_for(tiny, prompt):
    model, (ids, mask) = tiny("llama"), prompt(40)
    plain = model.generate(ids, attention_mask=mask, **OPTIONS)
    with attach(model, KIVI) as kv:
        for other in ({"past_key_values": DynamicCache(config=model.config)}, {"use_cache": False}):
            assert torch.equal(kv.generate(ids, attention_mask=mask, **other, **OPTIONS), plain)
        with pytest.raises(UsageError, match="there is no cache to report on"):
            kv.report()
        with pytest.raises(UsageError, match="cache_implementation='static': an attached model"):
            model.generate(ids, attention_mask=mask, cache_implementation="static", **OPTIONS)


def test_an_attached_assistant_keeps_its_own_cache(tiny, prompt):
    model, assistant, (ids, mask) = tiny("llama"), tiny("llama", num_hidden_layers=2), prompt(20)
    with attach(model, KIVI) as kv:
        expected = kv.generate(ids, attention_mask=mask, **OPTIONS)
        with attach(assistant, KIVI) as other:
            found = kv.generate(ids, attention_mask=mask, assistant_model=assistant, **OPTIONS)
            with pytest.raises(UsageError, match="no cache to report on"):
                other.report()
    assert torch.equal(found, expected)


def test_close_takes_the_method_off(tiny, prompt):
    model, (ids, mask) = tiny("llama"), prompt(40)
    plain, before = model.generate(ids, attention_mask=mask, **OPTIONS), model.config._attn_implementation
    kv = attach(model, KIVI)
    assert not torch.equal(model.generate(ids, attention_mask=mask, **OPTIONS), plain)
    kv.close()
    kv.close()
    assert torch.equal(model.generate(ids, attention_mask=mask, **OPTIONS), plain)
    assert model.config._attn_implementation == before and "generate" not in model.__dict__
    assert not model._forward_hooks and not model._forward_pre_hooks and "kvq_attached" not in model.model.__dict__
    with pytest.raises(UsageError, match="this attach.. is closed: attach again"):
        kv.generate(ids)


def test_the_newest_attach_is_closed_first(tiny, prompt):
    model, (ids, mask) = tiny("llama"), prompt(40)
    plain = model.generate(ids, attention_mask=mask, **OPTIONS)
    outer = attach(model, "fp16")
    inner = attach(model, KIVI)
    with pytest.raises(UsageError, match="another method was attached to this model later: close that one first"):
        outer.close()
    compressed = model.generate(ids, attention_mask=mask, **OPTIONS)
    assert not torch.equal(compressed, plain) and inner.report().compressed > 0
    inner.close()
    assert torch.equal(model.generate(ids, attention_mask=mask, **OPTIONS), plain) and outer.report().tokens
    outer.close()
    assert torch.equal(model.generate(ids, attention_mask=mask, **OPTIONS), plain)


def test_an_error_is_not_replaced_where_a_later_attach_is_open(tiny):
    model = tiny("llama")
    before = model.config._attn_implementation
    with pytest.raises(ZeroDivisionError), attach(model, "fp16"):
        inner, innermost = attach(model, KIVI), attach(model, "fp16")
        raise ZeroDivisionError
    assert model.config._attn_implementation == before and "generate" not in model.__dict__
    assert not model._forward_hooks and "kvq_attached" not in model.model.__dict__
    for each in (innermost, inner):
        each.close()
    with attach(model, KIVI):
        pass


def test_pipelines_and_streamers_generate_in_a_compressed_cache():
    loaded = load_model("reference")
    text = "The harbour was quiet that morning, and the boats lay still while " * 8
    inputs = loaded.tokenizer(text, return_tensors="pt")
    with attach(loaded.model, "kivi-2bit") as kv:
        ids = kv.generate(**inputs, max_new_tokens=12, do_sample=False)
        expected = loaded.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        streamer = TextIteratorStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
        kv.generate(**inputs, max_new_tokens=12, do_sample=False, streamer=streamer)
        assert "".join(streamer) == expected
        kv.forget_cache()
        pipe = TextGenerationPipeline(model=loaded.model, tokenizer=loaded.tokenizer)
        [found] = pipe(text, max_new_tokens=12, do_sample=False, return_full_text=False)
        assert found["generated_text"] == expected and kv.report().compressed > 0
