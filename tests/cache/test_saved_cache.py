"""Saved and cloned caches of every method continue bit for bit, and share nothing with the cache that they are from."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from method_cases import CASES, DOCUMENT, Run, each_method, held, ready, same
from random_artifacts import tiny_model
from safetensors import safe_open
from safetensors.torch import save_file

from kvq_cli import attach
from kvq_cli.cache.cache import CompressedCache
from kvq_cli.cache.deflate import deflated
from kvq_cli.cache.saved_cache import _checksum, _digest
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.methods.registry import build, method_names


def storages(cache: CompressedCache) -> set[int]:
    tensors = cache.tensors()
    for layer in cache.layers:
        for stream in layer.streams:
            stores = [stream.store, *([stream.prompt_store] if hasattr(stream, "prompt_store") else [])]
            tensors += [part.tensor for store in stores for s in store.segments for part in s.parts.values()]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}


def test_every_method_has_a_case():
    assert {name for name, _ in CASES} == set(method_names())


@each_method
@torch.no_grad()
def test_loaded_and_cloned_caches_continue_bit_for_bit(name, options, tmp_path):
    model = tiny_model(hidden_size=64)
    run, file = Run(model), tmp_path / "document.safetensors"
    with attach(model, ready(name, options, model)) as kv:
        cache = kv.new_cache()
        run.feed(cache, 0, DOCUMENT)
        size = cache.save(file, run.ids[:, :DOCUMENT])
        before, report = held(cache), cache.report()
        copy = cache.clone()
        assert same(before, held(copy)) and not storages(cache) & storages(copy)
        expected = run.continued(copy)
        assert same(before, held(cache))  # what the copy took in is not in the original
        assert torch.equal(expected, run.continued(cache))
        loaded = kv.load_cache(file)
        assert torch.equal(loaded.loaded.ids, run.ids[:, :DOCUMENT])
        assert same(before, held(loaded))
        parts = loaded.report().parts
        assert {**report.parts, "unused": 0} == {**parts, "unused": 0} and report.compressed > 0
        assert loaded.report().bytes == sum(x.untyped_storage().nbytes() for x in unique(loaded))
        assert torch.equal(expected, run.continued(loaded))
        assert same(held(cache), held(loaded))
    header = 8 + struct.unpack("<Q", file.read_bytes()[:8])[0]
    ids = 8 * run.ids[:, :DOCUMENT].numel()
    assert size == file.stat().st_size
    if any(stream.codec.deflates for layer in cache.layers for stream in layer.streams):
        before |= deflated_parts(file)
    assert size == header + ids + sum(x.numel() * x.element_size() for x in before.values())


def deflated_parts(file: Path) -> dict[str, torch.Tensor]:
    """What a file holds in place of the packed parts, by the names of `held`."""
    streams = {"keys": "0", "values": "1"}
    with safe_open(file, "pt") as tensors:
        names = [name.split(".") for name in tensors.keys() if name.endswith(".deflate")]  # noqa: SIM118
        assert names
        return {
            f"{layer}.{streams[stream]}.packed.{part}": tensors.get_tensor(
                ".".join(["layers", layer, stream, "packed", part, "deflate"])
            )
            for _, layer, stream, _, part, _ in names
        }


@torch.no_grad()
def test_compressed_tensors_of_a_method_that_compresses_none_are_refused(tmp_path):
    """Else any tensor of a small file could become a thousand times as large."""
    model, file, other = tiny_model(hidden_size=64), tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    run, method = Run(model), build("fp16")
    with attach(model, method) as kv:
        cache = kv.new_cache()
        run.feed(cache, 0, DOCUMENT)
        cache.save(file, run.ids[:, :DOCUMENT])
        with safe_open(file, "pt") as held:
            tensors = {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118
            about = json.loads(held.metadata()["kvq"])
        name = next(name for name in tensors if name.startswith("layers.0."))
        tensors[f"{name}.deflate"] = deflated(tensors.pop(name))
        about["sha256"] = _digest((name, tensors[name]) for name in sorted(tensors))
        about["checksum"] = _checksum(about)
        save_file(tensors, other, {"kvq": json.dumps(about)})
        with pytest.raises(KvqError, match=f"tensor {name} is missing"):
            kv.load_cache(other)


@torch.no_grad()
def test_a_cache_that_was_cropped_into_its_prompt_is_saved_and_loaded(tmp_path):
    model = tiny_model(hidden_size=64)
    run, file = Run(model), tmp_path / "cropped.safetensors"
    with attach(model, build("fp16")) as kv:
        cache = kv.new_cache()
        run.feed(cache, 0, DOCUMENT)
        cache.crop(-(DOCUMENT - 12))
        cache.save(file, run.ids[:, :12])
        assert torch.equal(run.continued(cache, 12), run.continued(kv.load_cache(file), 12))


@torch.no_grad()
def test_cache_of_a_model_with_other_weights_is_refused(tmp_path):
    """Also if its keys and values are computed by the same weights, as after training of the others."""
    model, file = tiny_model(hidden_size=64), tmp_path / "document.safetensors"
    run, method = Run(model), build("fp16")
    with attach(model, method) as kv:
        cache = kv.new_cache()
        run.feed(cache, 0, DOCUMENT)
        cache.save(file, run.ids[:, :DOCUMENT])
    model.model.layers[0].mlp.down_proj.weight += 0.01
    with attach(model, method) as kv, pytest.raises(UsageError, match="with other weights or another configuration"):
        kv.load_cache(file)


FORGED = [("model", "model_type", "x" * 100_000), ("method", "name", "x" * 100_000), ("method", "y" * 100_000, 1)]


@torch.no_grad()
@pytest.mark.parametrize(("part", "key", "value"), FORGED)
def test_messages_do_not_repeat_what_a_forged_file_holds_at_length(tmp_path, part, key, value):
    file = tmp_path / "document.safetensors"
    with attach(model := tiny_model(hidden_size=64), build("fp16")) as kv:
        save_tokens(model, kv, file)
        forge(file, lambda about: about[part].update({key: value}))
        with pytest.raises(UsageError, match="document.safetensors") as caught:
            kv.load_cache(file)
    assert len(str(caught.value)) < 1000


@torch.no_grad()
def test_an_artifact_is_compared_by_its_whole_digest(tmp_path):
    """Messages name the first digits alone."""
    file, model = tmp_path / "document.safetensors", tiny_model(hidden_size=64)
    with attach(model, build("fp16")) as kv:
        kv._artifact = "1" * 64
        save_tokens(model, kv, file)
        forge(file, lambda about: about.update(artifact="1" * 63 + "2"))
        with pytest.raises(UsageError, match="was saved with artifact="):
            kv.load_cache(file)


def save_tokens(model, kv, file: Path) -> None:
    run, cache = Run(model), kv.new_cache()
    run.feed(cache, 0, DOCUMENT)
    cache.save(file, run.ids[:, :DOCUMENT])


def forge(file: Path, change) -> None:
    """Change the metadata of a saved cache, with their checksum."""
    with safe_open(file, "pt") as opened:
        about = json.loads(opened.metadata()["kvq"])
        tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
    change(about)
    about["checksum"] = _checksum(about)
    save_file(tensors, file, {"kvq": json.dumps(about)})


def unique(cache: CompressedCache) -> list[torch.Tensor]:
    """The tensors of a cache, each storage once."""
    found = {}
    for layer in cache.layers:
        for stream in layer.streams:
            stores = [stream.store, *([stream.prompt_store] if hasattr(stream, "prompt_store") else [])]
            tensors = [part.tensor for store in stores for s in store.segments for part in s.parts.values()]
            for tensor in [stream.sinks, stream.ring, *tensors, *getattr(stream, "state", {}).values()]:
                found[tensor.untyped_storage().data_ptr()] = tensor
    return list(found.values())
