"""A cache with a rollback of k tokens is, after `crop`, bit for bit one that never had them.

Both have a rollback: its size decides where the ring of recent tokens wraps around, and so the order of sums.
"""

from __future__ import annotations

import pytest
import torch
from method_cases import ALL, DOCUMENT, Run, each_method, held, ready, same
from random_artifacts import tiny_model

from kvq_cli import attach
from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build, build_parsed

#: Enough tokens that some have packed others, of every method of the cases.
ROLLBACK = 24


def decoded(run: Run, cache, start: int, stop: int) -> torch.Tensor:
    return torch.cat([run.feed(cache, at, at + 1) for at in range(start, stop)], dim=1)


def packed_tokens(cache) -> int:
    return sum(stream.packed_tokens for layer in cache.layers for stream in layer.streams)


@each_method
@torch.no_grad()
def test_crop_within_the_rollback_is_exact(name, options, tmp_path):
    """In the cache, its clone and its rows in another order; a saved cache has no rollback."""
    model = tiny_model(hidden_size=64)
    run, left = Run(model), ALL - ROLLBACK
    with attach(model, ready(name, options, model)) as kv:
        fresh, cache = kv.new_cache(rollback=ROLLBACK), kv.new_cache(rollback=ROLLBACK)
        for each in (fresh, cache):
            run.feed(each, 0, DOCUMENT)
        decoded(run, fresh, DOCUMENT, left)
        before = held(fresh)
        decoded(run, cache, DOCUMENT, ALL)
        packed = packed_tokens(cache)
        cache.save(tmp_path / "cache", run.ids)
        assert same(held(kv.load_cache(tmp_path / "cache")), held(cache))

        copy, turned = cache.clone(), cache.clone()
        turned.batch_select_indices(torch.tensor([1, 0]))
        for each in (copy, turned, cache):
            each.crop(-ROLLBACK)
        assert packed_tokens(cache) < packed
        assert same(before, held(cache)) and same(before, held(copy))
        expected = decoded(run, fresh, left, ALL)
        assert torch.equal(decoded(run, cache, left, ALL), expected)
        assert torch.equal(decoded(run, copy, left, ALL), expected)
        assert same(held(fresh), held(cache))
        fresh.batch_select_indices(torch.tensor([1, 0]))
        turned.batch_select_indices(torch.tensor([1, 0]))
        assert torch.equal(decoded(run, turned, left, ALL), expected)


@pytest.mark.parametrize(
    "method", ["kivi:group=8:residual=16", "squat:group=8:residual=16", "zipcache:residual=15:sinks=3:recent=5"]
)
@torch.no_grad()
def test_crop_beyond_the_rollback_is_refused(method):
    """And changes nothing. Blocks of a prompt to which a method is fit stay packed, too."""
    model = tiny_model(hidden_size=64)
    run = Run(model)
    with attach(model, build_parsed(method)) as kv:
        cache = kv.new_cache(rollback=9)
        run.feed(cache, 0, DOCUMENT)
        if "kivi" not in method:
            with pytest.raises(UsageError, match="fit to it"):
                cache.crop(-9)
        decoded(run, cache, DOCUMENT, ALL)
        before = held(cache)
        with pytest.raises(UsageError, match=r"crop\(-60\).*new_cache\(rollback=60\)"):
            cache.crop(-60)
        assert cache.get_seq_length() == ALL and same(before, held(cache))
        cache.crop(-9)
        with pytest.raises(UsageError, match=r"crop\(-50\)"):
            cache.crop(-50)


@torch.no_grad()
def test_kept_tokens_are_counted_and_do_not_grow_with_the_text():
    model = tiny_model(hidden_size=64)
    run, rings, kept = Run(model, rows=1), set(), set()
    with attach(model, build("kivi", group=8, residual=16, sinks=3)) as kv:
        plain, cache = kv.new_cache(), kv.new_cache(rollback=11)
        windows = [stream.window for layer in cache.layers for stream in layer.streams]
        for at in range(ALL):
            for each in (plain, cache):
                run.feed(each, at, at + 1)
            if at > 50:
                parts = cache.report().parts
                assert {**parts, "rollback": 0, "unused": 0} == {**plain.report().parts, "rollback": 0, "unused": 0}
                count = sum(window.packed(at + 1) - window.packed(at - 10) for window in windows)
                assert parts["rollback"] == count * 2 * 16 * 4  # kv_heads, head_dim, bytes
                kept.add(count)
                rings.add(sum(stream.ring.nbytes for layer in cache.layers for stream in layer.streams))
                assert cache.report().packed_bits == plain.report().packed_bits
    assert max(kept) <= len(windows) * (11 + 16) and min(kept) > 0 and len(rings) == 1


@torch.no_grad()
def test_a_rollback_may_grow_while_the_cache_is_used():
    """What was packed before stays packed."""
    model = tiny_model(hidden_size=64)
    run = Run(model)
    with attach(model, ready("kivi", {"group": 4, "residual": 4}, model), prefill="compressed") as kv:
        cache, fresh = kv.new_cache(rollback=2), kv.new_cache(rollback=2)
        for each in (cache, fresh):
            run.feed(each, 0, DOCUMENT)
            decoded(run, each, DOCUMENT, 80)
        for each in (cache, fresh):
            each.allow_rollback(13)
        with pytest.raises(UsageError, match="have packed others"):
            cache.crop(-13)
        decoded(run, cache, 80, 93)
        cache.crop(-13)
        assert same(held(fresh), held(cache))
        assert torch.equal(decoded(run, cache, 80, ALL), decoded(run, fresh, 80, ALL))
