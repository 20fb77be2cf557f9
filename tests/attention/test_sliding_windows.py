"""Layers with a sliding window drop the tokens before it: results as of a cache that keeps them, in bounded memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from codec_methods import DEVICE
from tiers import slow

from kvq_cli.attention.attach import attach
from kvq_cli.benchmarking.accounting import account
from kvq_cli.cache import layer as cache_layer
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.methods import base
from kvq_cli.methods.registry import build, build_parsed, to_config
from kvq_cli.methods.window import Window
from kvq_cli.models import model_shape

LOCAL = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES = {
    "gemma3": {"sliding_window": 20, "layer_types": LOCAL},
    "gptoss": {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 12},
    "mistral": {"sliding_window": 16},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "layer_types": LOCAL},
    "phi3": {"sliding_window": 1},
}
COLUMNS = 150


def logits(model, ids, mask, cache, ends) -> torch.Tensor:
    """Logits of the columns after those that the cache holds, fed in passes that end at `ends`."""
    positions, outs, begin = (mask.cumsum(1) - 1).clamp(min=0), [], cache.get_seq_length()
    for end in ends:
        given = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
        outs.append(model(ids[:, begin:end], past_key_values=cache, **given).logits)
        begin = end
    return torch.cat(outs, dim=1)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=5e-5, rtol=2e-4)


@pytest.fixture
def keep_all(monkeypatch):
    """`keep_all()`: caches that are made from now on drop nothing."""
    return lambda: monkeypatch.setattr(cache_layer.Sliding, "of", lambda *_: None)


@pytest.mark.parametrize("windows", [(Window(), None), (Window(3, 2, 4), Window(1, 0, 2)), (Window(5, 30, 8), None)])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_lossless_cache_are_those_of_the_model(tiny, probe, prompt, family, windows):
    """In one pass, in chunks, and token by token, of rows with pads."""
    model, (ids, mask) = tiny(family, **FAMILIES[family]), prompt(COLUMNS, pads=(0, 37))
    real, method = mask.bool(), probe(codec="identity", window=windows[0], value_window=windows[1])
    own = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits[real]
    for prefill, ends in (
        ("exact", [70, *range(71, COLUMNS + 1)]),
        ("exact", [60, 64, 65, 120, COLUMNS]),
        ("compressed", [COLUMNS]),
        ("compressed", [100, 101, 110, COLUMNS]),
    ):
        with attach(model, method, prefill=prefill) as kv:
            cache = kv.new_cache()
            close(logits(model, ids, mask, cache, ends)[real], own)
            local = [layer for layer in cache.layers if layer.sliding_window is not None]
            assert min(layer.dropped for layer in local) > 40
            assert all(layer.dropped == 0 for layer in cache.layers if layer not in local)


@pytest.mark.parametrize("method", ["fp16", "kivi:group=8:residual=16", "kivi:group=8:pre_rope=on:sinks=4:recent=6"])
def test_memory_is_bounded(tiny, prompt, method):
    model, (ids, mask) = tiny("mistral", sliding_window=16), prompt(160, pads=(0, 9))
    held = []
    with attach(model, build_parsed(method)) as kv:
        cache = kv.new_cache()
        for end in range(1, 161):
            logits(model, ids, mask, cache, [end])
            held.append(cache.report().bytes)
        report = cache.report()
    assert max(held[60:110]) == max(held[110:]) <= max(held[:60])
    assert report.tokens == 311 and report.numbers == 2 * 15 * 3 * 2 * 2 * 16 and report.beyond_window > 0


METHODS = slow("turboquant", "xquant:group=16", "squat:group=8")


@pytest.mark.parametrize("method", ["kivi:group=8:residual=16", "innerq:sinks=4:recent=8", *METHODS])
def test_dropping_changes_no_number(tiny, prompt, keep_all, method):
    """Against caches that keep all tokens, with pads, and rows that are chosen and reordered."""
    model, (ids, mask) = tiny("gemma3", head_dim=32, **FAMILIES["gemma3"]), prompt(COLUMNS, pads=(11, 0, 2))
    found = []
    for _ in range(2):
        with attach(model, build_parsed(method)) as kv:
            cache = kv.new_cache()
            first = logits(model, ids[:, :90], mask[:, :90], cache, [50, 51, 60, 61, 62, 75, 90])
            dropped = cache.layers[0].dropped
            cache.reorder_cache(torch.tensor([2, 0, 0]))
            rows, ends = ids[[2, 0, 0]], mask[[2, 0, 0]]
            later = logits(model, rows, ends, cache, [*range(91, 116), 130, COLUMNS])
            found.append((first[mask[:, :90].bool()], later, dropped))
        keep_all()
    assert found[0][2] > 0 == found[1][2]
    for actual, expected in zip(found[0][:2], found[1][:2], strict=True):
        close(actual, expected)


@pytest.mark.parametrize(
    "method", ["gear:group=8:residual=16", "zipcache:residual=16", "xquant-cl:group=16:base_layers=1"]
)
def test_methods_that_need_all_tokens_keep_them(tiny, prompt, method):
    """In the layers that do: the first one of xquant-cl is none."""
    model, (ids, mask) = tiny("mistral", sliding_window=16, num_key_value_heads=4), prompt(80)
    with attach(model, build_parsed(method)) as kv:
        cache = kv.new_cache()
        logits(model, ids, mask, cache, [60, *range(61, 81)])
        layers = cache.layers[1:] if "xquant" in method else cache.layers
        assert all(layer.dropped == 0 for layer in layers)
        assert cache.report().beyond_window >= len(layers) * (80 - 15) * 2 * 4 * 16


def test_crop_to_what_windows_still_hold(tiny, prompt):
    """Of 60 tokens, those from 40 on are held: 16 before the next one are."""
    model, (ids, mask) = tiny("mistral", sliding_window=16), prompt(80)
    own = model(ids).logits
    with attach(model, build("fp16")) as kv:
        cache = kv.new_cache()
        logits(model, ids, mask, cache, [30, *range(31, 61)])
        left = cache.layers[0].dropped + 15
        assert 45 < left < 60
        with pytest.raises(UsageError, match="have dropped tokens that the next one would see"):
            cache.crop(left - 1 - 60)
        assert cache.get_seq_length() == 60
        cache.crop(left - 60)
        close(model(ids[:, left:], past_key_values=cache).logits, own[:, left:])
        cache.crop(-80)
        close(model(ids, past_key_values=cache).logits, own)


@pytest.mark.parametrize("windows", [None, (Window(3, 2, 4), Window(1, 0, 2))])
def test_tokens_within_the_rollback_can_be_taken_back(tiny, probe, prompt, tmp_path, windows):
    """Also in a copy, and after the cache was saved, which leaves out of the file what no query sees now."""
    model, (ids, mask) = tiny("mistral", sliding_window=16), prompt(120)
    own = model(ids).logits
    method = probe(codec="identity", window=windows[0], value_window=windows[1]) if windows else build("fp16")
    with attach(model, method) as kv:
        cache = kv.new_cache(rollback=45)
        for _ in range(2):
            logits(model, ids, mask, cache, [50, 51, 100])
            assert 20 < cache.layers[0].dropped <= 55 + 1 - 16
            with pytest.raises(UsageError, match=r"new_cache\(rollback=60\)"):
                cache.crop(-60)
            if windows is None:
                cache.save(tmp_path / "cache", ids[:, :100])
                loaded = kv.load_cache(tmp_path / "cache")
                assert loaded.layers[0].dropped > cache.layers[0].dropped
                close(model(ids[:, 100:], past_key_values=loaded).logits, own[:, 100:])
            for held in (cache.clone(), cache):
                held.crop(-45)
                close(model(ids[:, 55:100], past_key_values=held).logits, own[:, 55:100])
                close(logits(model, ids, mask, held, range(101, 121)), own[:, 100:])
                assert held.layers[0].dropped > 50
            cache.reset()
            assert cache.layers[0].dropped == 0


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 5}, {"num_beams": 3}, {}])
def test_generate(tiny, prompt, options):
    model, (ids, mask) = tiny("gemma3", **FAMILIES["gemma3"]), prompt(60, pads=(0,) if options else (0, 13))
    ids = ids.repeat(1, 2) if "prompt_lookup_num_tokens" in options else ids
    mask = mask.repeat(1, ids.shape[1] // mask.shape[1])
    settings = {"attention_mask": mask, "max_new_tokens": 60, "min_new_tokens": 60, "do_sample": False, **options}
    expected = model.generate(ids, **settings)
    with attach(model, build("fp16")) as kv:
        cache = kv.new_cache()
        assert torch.equal(model.generate(ids, past_key_values=cache, **settings), expected)
        assert cache.layers[0].dropped > 60 and cache.layers[1].dropped == 0


@pytest.mark.parametrize(
    "method", ["fp16", "kivi:group=8:sinks=4:recent=6", "innerq:sinks=4:recent=8", "squat:group=8"]
)
def test_saved_caches_continue_bit_for_bit(tiny, prompt, tmp_path, method):
    model = tiny("gemma3", head_dim=32, **FAMILIES["gemma3"])
    ids, mask = prompt(COLUMNS, pads=(0, 7))
    with attach(model, build_parsed(method)) as kv:
        cache = kv.new_cache()
        logits(model, ids, mask, cache, [70, 71, 72, 100])
        size = cache.save(tmp_path / "cache", ids[:, :100])
        assert size == (tmp_path / "cache").stat().st_size
        loaded = kv.load_cache(tmp_path / "cache")
        assert [a.dropped for a in loaded.layers] == [a.dropped for a in cache.layers]
        assert loaded.layers[0].dropped > 20
        for at in range(100, 125):
            one, other = (logits(model, ids, mask, held, [at + 1]) for held in (cache, loaded))
            assert torch.equal(one, other)
        assert loaded.layers[0].dropped > 60


def test_caches_saved_with_all_tokens_are_still_read(tiny, prompt, tmp_path, keep_all, monkeypatch):
    """Those of format 2."""
    model = tiny("gemma3", **FAMILIES["gemma3"])
    ids, mask = prompt(80)
    own = model(ids).logits
    with attach(model, build("fp16")) as kv:
        with monkeypatch.context() as patch:
            patch.setattr("kvq_cli.cache.saved_cache.FORMAT", 2)
            patch.setattr(cache_layer.Sliding, "of", lambda *_: None)
            old = kv.new_cache()
            model(ids[:, :60], past_key_values=old)
            old.save(tmp_path / "old", ids[:, :60])
        cache = kv.load_cache(tmp_path / "old")
        assert cache.layers[0].dropped == 0
        close(logits(model, ids, mask, cache, [61])[:, 0], own[:, 60])
        assert cache.layers[0].dropped > 20
        close(model(ids[:, 61:], past_key_values=cache).logits, own[:, 61:])


@pytest.mark.parametrize("method", ["kivi:group=8:sinks=4:recent=6", "xquant:group=16"])
def test_local_layers_in_16_bits(tiny, prompt, tmp_path, method):
    """They hold what fp16 does and drop as it does, between layers that are packed; so does a cache that was saved."""
    model, (ids, mask) = tiny("gemma3", head_dim=32, **FAMILIES["gemma3"]), prompt(COLUMNS)
    caches = {}
    for text in ("fp16", method, f"{method}:local=16bit"):
        with attach(model, build_parsed(text)) as kv:
            cache = caches[text] = kv.new_cache()
            logits(model, ids, mask, cache, [90, 91, 92, 110])
            cache.save(tmp_path / "cache", ids[:, :110])
            if text.endswith("16bit"):
                loaded = kv.load_cache(tmp_path / "cache")
                given = (ids[:, :120], mask[:, :120])
                assert torch.equal(*(logits(model, *given, held, [115, 120]) for held in (cache, loaded)))
            else:
                logits(model, ids[:, :120], mask[:, :120], cache, [115, 120])
            report = kv.report(cache)
        assert account(kv.method, model_shape(model), 120).packed_bits == report.packed_bits
    exact, packed, kept = caches.values()
    for index, layer in enumerate(kept.layers):
        like = exact if layer.sliding_window else packed
        assert [type(stream.codec) for stream in layer.streams] == [type(s.codec) for s in like.layers[index].streams]
        assert layer.dropped == (exact.layers[index].dropped if layer.sliding_window else 0)
    first = zip(kept.layers[0].streams, exact.layers[0].streams, strict=True)  # its input depends on no other layer
    assert all(torch.equal(one.read(0), other.read(0)) for one, other in first)
    says = "was saved with local=16bit, not local=default: pass the same"
    with attach(model, build_parsed(method)) as kv, pytest.raises(UsageError, match=says):
        kv.load_cache(tmp_path / "cache")


@torch.no_grad()
def test_a_cache_whose_local_layers_were_stored_otherwise_names_the_option(tiny, prompt, tmp_path, monkeypatch):
    """Versions before `local` packed all layers, and said nothing of it in the file."""
    model, (ids, mask) = tiny("gemma3", head_dim=32, **FAMILIES["gemma3"]), prompt(COLUMNS)
    with monkeypatch.context() as before, attach(model, build("kivi", group=8, local="packed")) as kv:
        before.setattr(kv, "_origin_of", lambda cache: replace(kv.origin, method=to_config(build("kivi", group=8))))
        cache = kv.new_cache()
        logits(model, ids, mask, cache, [110])
        cache.save(tmp_path / "cache", ids[:, :110])
        expected = logits(model, ids, mask, cache, [115])
    monkeypatch.setattr(base, "MIN_LOCAL_SAVING", 100.0)  # as for a model of which `auto` keeps these layers in 16 bits
    says = "if an earlier version saved it, pass --set local=packed, else save it again"
    with attach(model, build("kivi", group=8)) as kv, pytest.raises(KvqError, match=says):
        kv.load_cache(tmp_path / "cache")
    with attach(model, build("kivi", group=8, local="packed")) as kv:
        assert torch.equal(logits(model, ids, mask, kv.load_cache(tmp_path / "cache"), [115]), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["kivi:group=16:pre_rope=on:sinks=4:recent=6", *slow("fp16", "xquant:group=16")])
def test_kernels_read_what_is_left(tiny, prompt, method):
    """Rows with pads, before and behind a drop, against PyTorch."""
    heads = {"num_hidden_layers": 2, "num_key_value_heads": 4 if "xquant" in method else 2, "head_dim": 16}
    layers = {"sliding_window": 17, "layer_types": LOCAL[:2]}
    model = tiny("gemma3", **heads, **layers).to(DEVICE)
    ids, mask = (x.to(DEVICE) for x in prompt(64, pads=(5, 0)))
    found, dropped = [], []
    for backend in ("torch", "triton"):
        with attach(model, build_parsed(method), backend=backend) as kv:
            cache = kv.new_cache(64)
            for end in (30, 31, 44, 45, 60, 61, 62, 63):
                found.append(logits(model, ids, mask, cache, [end])[1])
                dropped.append(cache.layers[0].dropped)
    assert len(set(dropped)) > 2 and dropped[:8] == dropped[8:]
    for expected, actual in zip(found[:8], found[8:], strict=True):
        assert (actual - expected).abs().max() < 3e-4 * expected.abs().max()
