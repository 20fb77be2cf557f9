"""A cache that is interrupted, copied, cropped to nothing, or used in other modes of autograd and by other callers."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from transformers.cache_utils import DynamicCache

from kvq_cli.attention import attention_hooks
from kvq_cli.attention.attach import attach
from kvq_cli.attention.shared_prompts import SharedPrompts
from kvq_cli.cache.stream import Stream
from kvq_cli.errors import KvqError, NotFiniteError, UsageError
from kvq_cli.methods.registry import build

KIVI = {"group": 4, "residual": 8}
IDS = torch.arange(3, 43).view(1, 40) % 97


def step(model, cache, ids):
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits[:, -1]


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("llama")


@pytest.fixture
def without_garbage_collection():
    """On a GPU a cache that waits for Python to look for cycles keeps its memory from others."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("layer", [0, -1])
def test_interruption_within_a_layer_is_detected(model, monkeypatch, layer):
    """Also in the first layer, where no layer has counted the pass yet."""
    with attach(model, build("kivi", **KIVI)) as kv:
        cache = kv.new_cache()
        step(model, cache, IDS)

        def interrupted(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(cache.layers[layer].streams[1], "append", interrupted)
            step(model, cache, IDS[:, :1])
        with pytest.raises(KvqError, match="half updated"):
            step(model, cache, IDS[:, :1])
        cache.reset()
        step(model, cache, IDS)


def test_failed_pass_leaves_no_context(model):
    broken = copy.deepcopy(model)
    with attach(broken, build("kivi", **KIVI)) as kv:
        broken.model.layers[1].self_attn.v_proj.weight.data.fill_(torch.nan)
        with pytest.raises(NotFiniteError):
            step(broken, kv.new_cache(), IDS)
        assert not attention_hooks._contexts.get()


@pytest.mark.parametrize(
    ("name", "options"),
    [("fp16", {}), ("kivi", KIVI), ("innerq", {"group": 16, "recent": 8}), ("gear", {"group": 16, "residual": 16})],
)
def test_prompt_in_inference_mode_then_generate(model, name, options):
    with attach(model, build(name, **options)) as kv:
        expected = kv.new_cache()
        model.generate(IDS, past_key_values=expected, max_new_tokens=12, do_sample=False)
        cache = kv.new_cache()
        with torch.inference_mode():
            model(IDS[:, :-1], past_key_values=cache)
        out = model.generate(IDS, past_key_values=cache, max_new_tokens=12, do_sample=False)
        assert out.shape[1] == IDS.shape[1] + 12 and cache.get_seq_length() == expected.get_seq_length()
        cache.reorder_cache(torch.tensor([0, 0]))


def test_deep_copy_goes_on_as_the_original(model):
    with attach(model, build("innerq", group=16, recent=8)) as kv:
        cache = kv.new_cache()
        step(model, cache, IDS)
        other = copy.deepcopy(cache)
        assert torch.equal(step(model, other, IDS[:, :1]), step(model, cache, IDS[:, :1]))
        assert cache.get_seq_length() == other.get_seq_length() == 41


def test_cache_cropped_to_nothing_takes_other_rows(model):
    with attach(model, build("kivi", **KIVI)) as kv:
        cache, fresh = kv.new_cache(), kv.new_cache()
        step(model, cache, IDS[:, :6].view(2, 3))
        cache.crop(-3)
        four = IDS[:, :20].view(4, 5)
        assert torch.equal(step(model, cache, four), step(model, fresh, four))


def test_dropped_cache_of_long_rope_is_refused(tiny):
    """transformers drops the cache where the text passes the original context."""
    factors = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    given = {"rope_parameters": factors, "original_max_position_embeddings": 32}
    model = tiny("phi3", **given)
    for prompt in (20, 40):
        with (
            attach(model, build("kivi", **KIVI)) as kv,
            pytest.raises(UsageError, match="changes its RoPE at 32 tokens"),
        ):
            model.generate(IDS[:, :prompt], past_key_values=kv.new_cache(), max_new_tokens=20, do_sample=False)
    with attach(model, build("kivi", **KIVI)):  # without a compressed cache it is the model's own affair
        model.generate(IDS, past_key_values=DynamicCache(config=model.config), max_new_tokens=2)


def test_clipped_keys_are_refused_where_layer_inputs_are_kept(tiny):
    """Even where no number of the probe is clipped."""
    model = tiny("olmo", clip_qkv=1e9, num_key_value_heads=4)
    with pytest.raises(UsageError, match="clipped"), attach(model, build("xquant", bits=16, group=16)):
        pass
    with attach(model, build("kivi", **KIVI)):
        pass


def test_models_on_several_devices_are_refused(tiny):
    model = tiny("llama")
    model.model.layers[1].to("meta")
    with pytest.raises(UsageError, match="several devices, cpu, meta"), attach(model, build("kivi", **KIVI)):
        pass


def test_tiles_are_rounded_down_to_blocks(model):
    """As long as a table of cosines, a tile that is rounded up would pass its end."""
    with attach(model, build("kivi", group=16, residual=16, pre_rope=True)) as kv:
        cache = kv.new_cache()
        step(model, cache, IDS.repeat(1, 3))
        stream = cache.layers[0].streams[0]
        assert isinstance(stream, Stream)
        for size in (1, 16, 24, 40):
            pieces = list(stream.packed(slice(0, 1), 120, 0, 120, size))
            assert all(last - first <= max(16, size) for first, last, _ in pieces)
            assert pieces[0][0] == 0 and pieces[-1][1] == stream.split(120)[1]


@torch.no_grad()
def test_caches_of_finished_methods_are_freed(model):
    methods = [build("fp16"), build("kivi", **KIVI)]
    with attach(model, methods[0]) as first, attach(model, methods[1]) as second:
        shared = SharedPrompts([first, second])
        with shared.used_by(first):
            cache = first.new_cache()
            model(IDS, past_key_values=cache)
        alive = weakref.ref(cache)
        del cache
        with shared.used_by(second):
            other = second.new_cache()
            assert model(IDS, past_key_values=other).past_key_values is other
            assert alive() is None


@torch.no_grad()
@pytest.mark.usefixtures("without_garbage_collection")
def test_a_new_cache_and_the_blocks_end_free_a_dropped_one(model):
    def used():
        cache = kv.new_cache()
        model(IDS, past_key_values=cache)
        return weakref.ref(cache)

    with attach(model, build("kivi", **KIVI)) as kv:
        first = used()
        assert first() is not None and kv.report().compressed > 0
        second = used()
        assert first() is None
    assert second() is None


def test_bytes_in_16_bits_are_those_of_transformers_cache(tiny):
    """Layers with a sliding window drop what no query sees any more, kvq in whole blocks; what it keeps, it says."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    model = tiny("gemma3", sliding_window=20, layer_types=kinds).to(torch.bfloat16)
    plain = DynamicCache(config=model.config)
    ids = torch.arange(3, 93).view(1, 90)
    with attach(model, build("kivi", group=8, residual=8)) as kv, torch.no_grad():
        cache = kv.new_cache()
        for part in ids.split(30, dim=1):
            model(part, past_key_values=plain)
            model(part, past_key_values=cache)
            report = cache.report()
            held = sum(x.numel() * x.element_size() for layer in plain.layers for x in (layer.keys, layer.values))
            assert report.fp16_bytes == held
    assert report.numbers == (90 + 2 * 19) * 2 * 2 * 16 and report.beyond_window == 2 * 7 * 2 * 2 * 16
    assert "beyond sliding windows" in str(report)
    assert report.measured_bits == 8 * report.bytes / report.numbers
    assert (report + report).beyond_window == 2 * report.beyond_window
