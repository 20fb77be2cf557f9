"""Saved and cloned caches of every method continue bit for bit, and share nothing with the cache that they are from."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from random_artifacts import random_parts, tiny_model
from safetensors import safe_open
from safetensors.torch import save_file

from kvq_cli import attach
from kvq_cli.artifact import Artifact
from kvq_cli.cache.cache import CompressedCache
from kvq_cli.cache.saved_cache import _checksum
from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build, method_names

KIVI = {"group": 8, "residual": 16, "sinks": 3}
CASES = [
    ("fp16", {}),
    ("kivi", KIVI),
    ("kivi", {"bits": 3, "group": 4, "residual": 8, "pre_rope": True}),
    ("kivi", {**KIVI, "rotation": "hadamard"}),
    ("turboquant", {"sinks": 3, "recent": 5}),
    ("turboquant", {"bits": 3, "values": "lloyd_max", "value_bits": 4, "flip": True, "buffer": 4}),
    ("gear", {"bits": 2, "group": 8, "residual": 16, "sinks": 3, "recent": 5, "outliers": 0.05}),
    ("gear", {"bits": 4, "group": 8, "residual": 8, "rank": 0, "chunk_rank": 2, "outliers": 0.05}),
    ("zipcache", {"residual": 15, "sinks": 3, "recent": 5}),
    ("zipcache", {"residual": 10, "ratio": 0.0}),
    ("squat", {**KIVI, "block": 4}),
    ("squat", {**KIVI, "block": 4, "shared_svd": True, "pre_rope": True}),
    ("innerq", {"group": 16, "sinks": 3, "recent": 5}),
    ("innerq", {"group": 16, "sinks": 3, "recent": 5, "mode": "hybrid_prefill", "buffer": 3}),
    ("innerq", {"group": 16, "sinks": 3, "recent": 5, "mode": "symmetric", "sign": "inside", "norm": False}),
    ("kvquant", {"bits": 2, "sinks": 3, "recent": 4, "outliers": 0.05}),
    ("channelkv", {"bits": 4, "sinks": 3}),
    ("channelkv", {"bits": 4, "sinks": 3, "rotation": "opq"}),
    ("channelkv", {"bits": 4, "sinks": 3, "entries": 65536}),
    ("temporalkv", {"bits": 4, "sinks": 3, "hybrid": "head", "outliers": 0.05}),
    ("temporalkv", {"bits": 2, "sinks": 3, "recent": 6}),
    ("klt", {"bits": 2, "sinks": 3, "recent": 5, "join_keys": True}),
    (
        "mixed",
        {"bits": 9, "keys": "kivi-2bit:group=16 klt-2bit", "values": "temporalkv-4bit fp16", "sinks": 3, "recent": 5},
    ),
    ("xquant", {"bits": 4, "group": 8, "sinks": 3, "first_channel": True}),
    ("palu", {"bits": 4, "sinks": 3, "recent": 5, "heads": 1}),
    ("palu", {"bits": 16, "share": 1.0, "buffer": 4}),
    ("xquant-cl", {"bits": 4, "group": 8, "base_layers": 1}),
    ("xquant-cl", {"bits": 4, "group": 8, "base_layers": 2, "recent": 3, "accumulator_bits": 4}),
]
#: Tokens of the document, of the question and in all, of the longer row; neither fills a block.
DOCUMENT, QUESTION, ALL = 75, 7, 101

each_method = pytest.mark.parametrize(
    ("name", "options"), CASES, ids=[f"{name}-{index}" for index, (name, _) in enumerate(CASES)]
)


def ready(name: str, options: dict, model):
    """The method, or an artifact of random numbers."""
    method = build(name, **{"sinks": 3, **options} if name == "kivi" else options)
    if not method.calibrates:
        return method
    config, tensors = random_parts(method, model)
    return Artifact({**config, "checksum": "of " + name}, tensors, Path("nowhere"))


class Run:
    """A left-padded batch of two rows that is given to a cache in passes; the tokens are the same for all caches."""

    def __init__(self, model, rows: int = 2) -> None:
        self.model = model
        self.ids = torch.randint(3, 40, (rows, ALL), generator=torch.Generator().manual_seed(1))
        self.mask = torch.ones_like(self.ids)
        self.mask[0, :11] = rows == 1

    def feed(self, cache: CompressedCache, start: int, stop: int) -> torch.Tensor:
        seen = self.mask[:, :stop]
        positions = (seen.cumsum(1) - 1).clamp(min=0)[:, start:]
        ids = self.ids[:, start:stop]
        return self.model(ids, attention_mask=seen, position_ids=positions, past_key_values=cache).logits

    def continued(self, cache: CompressedCache, start: int = DOCUMENT) -> torch.Tensor:
        """The logits of a question of several tokens, and of tokens decoded after it one by one."""
        logits = [self.feed(cache, start, start + QUESTION)]
        logits += [self.feed(cache, at, at + 1) for at in range(start + QUESTION, ALL)]
        return torch.cat(logits, dim=1)


def held(cache: CompressedCache) -> dict[str, torch.Tensor]:
    """All numbers that a cache holds, by name."""
    return {
        f"{layer.index}.{number}.{name}": tensor.clone()
        for layer in cache.layers
        for number, stream in enumerate(layer.streams)
        for name, tensor in stream.snapshot().tensors().items()
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


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
    assert size == file.stat().st_size == header + ids + sum(x.numel() * x.element_size() for x in before.values())


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
