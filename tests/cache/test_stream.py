"""The stored bits of a row depend on its tokens only."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvq_cli.cache.rows import Rows
from kvq_cli.cache.stream import Stream
from kvq_cli.codecs.base import Packed
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import StreamPlan
from kvq_cli.methods.window import Window

HEADS, DIM = 2, 16
CODECS = ("identity", "channel", "token", "temporal", "adjacent", "outliers")


def make(codecs: dict, name: str, sinks: int, recent: int, flushes: int) -> Stream:
    codec = codecs[name]
    return Stream(StreamPlan("value", codec, Window(sinks, recent, codec.block_tokens * flushes)))


def numbers(batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, HEADS, tokens, DIM, generator=torch.Generator().manual_seed(seed)).half()


def append(stream: Stream, rows: Rows, x: torch.Tensor, past: int, mask: torch.Tensor | None = None) -> None:
    stream.append(x, rows.begin(past, x.shape[2], x.shape[0], mask).row_spans)


def one_shot(stream: Stream, x: torch.Tensor) -> Stream:
    append(stream, Rows(), x, 0)
    return stream


def state(stream: Stream, row: int) -> dict[str, torch.Tensor]:
    """Everything a row holds, as bits: its packed parts and its full-precision tokens by index."""
    rows, tokens = slice(row, row + 1), stream.lengths[row]
    actual = {}
    for first, last, x in stream.exact(rows, tokens, 0, tokens):
        for token in range(first, last):
            actual[f"token {token}"] = x[:, :, token - first].clone()
    for _, _, packed in stream.packed(rows, tokens, 0, tokens, 1 << 30):
        actual.update({name: part.tensor.clone() for name, part in packed.parts.items()})
    return actual


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert torch.equal(a[name], b[name]), name


windows = st.tuples(st.integers(0, 9), st.integers(0, 20), st.integers(1, 3))


@pytest.mark.parametrize("name", CODECS)
@given(window=windows, chunks=st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_chunks_equal_one_pass(codecs, name, window, chunks):
    x = numbers(2, sum(chunks))
    streamed, rows, past = make(codecs, name, *window), Rows(), 0
    for chunk in chunks:
        append(streamed, rows, x[:, :, past : past + chunk], past)
        past += chunk
    whole = one_shot(make(codecs, name, *window), x)
    for row in range(2):
        assert_same(state(streamed, row), state(whole, row))


@pytest.mark.parametrize("name", CODECS)
def test_token_by_token_equals_one_pass(codecs, name):
    """Long enough for several segments."""
    x = numbers(1, 700)
    streamed, rows = make(codecs, name, 5, 7, 2), Rows()
    for token in range(700):
        append(streamed, rows, x[:, :, token : token + 1], token)
    assert len(streamed.store.segments) > 2
    assert_same(state(streamed, 0), state(one_shot(make(codecs, name, 5, 7, 2), x), 0))


@pytest.mark.parametrize("name", CODECS)
def test_joined_store_has_the_same_contents_and_bytes(codecs, name):
    """Joined repeatedly while it grows."""
    x = numbers(2, 300)
    joined, apart = (make(codecs, name, 5, 7, 1) for _ in range(2))
    rows, copies = [Rows(), Rows()], 0
    assert joined.store.whole() is None
    for token in range(300):
        for stream, own in zip((joined, apart), rows, strict=True):
            append(stream, own, x[:, :, token : token + 1], token)
        copies += len(joined.store.segments) > 1
        joined.store.whole()
        assert len(joined.store.segments) < 2
    assert len(apart.store.segments) > 2 and joined.store.nbytes == apart.store.nbytes == joined.store.whole().nbytes
    assert 0 < copies < 9 and joined.store.joined == joined.store.nbytes and apart.store.joined == 0
    for row in range(2):
        assert_same(state(joined, row), state(apart, row))


@pytest.mark.parametrize("name", CODECS)
@given(window=windows, pads=st.lists(st.integers(0, 30), min_size=2, max_size=4), chunk=st.integers(1, 50))
def test_left_padded_batch_equals_single_rows(codecs, name, window, pads, chunk):
    columns = 50
    x, mask = numbers(len(pads), columns), torch.ones(len(pads), columns)
    for row, count in enumerate(pads):
        mask[row, :count] = 0
        x[row, :, :count] = torch.nan  # would be seen anywhere
    batch, rows = make(codecs, name, *window), Rows()
    for past in range(0, columns, chunk):
        stop = min(columns, past + chunk)
        append(batch, rows, x[:, :, past:stop], past, mask[:, :stop])
    for row, count in enumerate(pads):
        alone = one_shot(make(codecs, name, *window), x[row : row + 1, :, count:])
        assert_same(state(batch, row), state(alone, 0))


@pytest.mark.parametrize("name", CODECS)
@given(tokens=st.integers(1, 90), window=windows)
def test_tokens_are_split_as_the_window_says(codecs, name, tokens, window):
    x = numbers(1, tokens)
    stream = one_shot(make(codecs, name, *window), x)
    first, last = min(tokens, window[0]), min(tokens, window[0]) + stream.window.packed(tokens)
    decoded = stream.read(0)
    assert decoded.shape == x.shape
    assert torch.equal(decoded[:, :, :first], x[:, :, :first].float())
    assert torch.equal(decoded[:, :, last:], x[:, :, last:].float())
    if last > first:
        packed = stream.codec.decode(stream.codec.encode(x[:, :, first:last]), torch.float32)
        assert torch.equal(decoded[:, :, first:last], packed)


@pytest.mark.parametrize("name", CODECS)
@given(tokens=st.integers(1, 60), start=st.integers(0, 60), size=st.integers(1, 20))
def test_any_range_can_be_read_in_tiles(codecs, name, tokens, start, size):
    stream = one_shot(make(codecs, name, 3, 4, 2), numbers(1, tokens))
    start, whole, seen = min(start, tokens), stream.read(0), []
    rows = slice(0, 1)
    for first, last, x in stream.exact(rows, tokens, start, tokens):
        assert torch.equal(x.float(), whole[:, :, first:last])
        seen += range(first, last)
    block = stream.codec.block_tokens
    for first, last, packed in stream.packed(rows, tokens, start, tokens, size):
        assert isinstance(packed, Packed) and last - first <= size + block
        assert torch.equal(stream.codec.decode(packed, torch.float32), whole[:, :, first:last])
        seen += range(max(first, start), last)
    assert sorted(seen) == list(range(start, tokens))


def test_growth_does_not_move_segments(codecs):
    stream, rows, x = make(codecs, "channel", 0, 0, 1), Rows(), numbers(1, 2000)
    append(stream, rows, x[:, :, :500], 0)
    places = {}
    for token in range(500, 2000):
        append(stream, rows, x[:, :, token : token + 1], token)
        for segment in stream.store.segments:
            now = [part.tensor.data_ptr() for part in segment.parts.values()]
            assert places.setdefault(segment.start, now) == now
    assert stream.store.capacity < 2000 * 1.2
    assert len(stream.store.segments) < 14


@pytest.mark.parametrize("name", CODECS)
def test_first_segment_has_the_size_of_the_prompt(codecs, name):
    stream = one_shot(make(codecs, name, 4, 0, 1), numbers(2, 500))
    assert [segment.tokens for segment in stream.store.segments] == [stream.window.packed(500)]
    # What is adopted owns its memory: no hidden rest of the prompt behind a view.
    for part in stream.store.segments[0].parts.values():
        assert part.tensor.untyped_storage().nbytes() == part.tensor.numel() * part.tensor.element_size()


@given(
    ends=st.lists(st.integers(1, 80), min_size=1, max_size=5, unique=True).map(sorted),
    allowed=st.integers(0, 4),
    rollback=st.integers(0, 40),
    remove=st.integers(1, 80),
    window=windows,
)
def test_crop_undoes_append_or_is_refused(codecs, ends, allowed, rollback, remove, window):
    """In passes up to `ends`, of which `allowed` come before the rollback is allowed."""
    tokens, x, stream, rows, past = ends[-1], numbers(1, 80 + 30), make(codecs, "temporal", *window), Rows(), 0
    remove, packed, final = min(remove, tokens), stream.window.packed, 0
    for number, end in enumerate(ends):
        if number == allowed:
            final = packed(past)
            stream.allow_rollback(rollback)
        append(stream, rows, x[:, :, past:end], past)
        past = end
    left = tokens - remove
    kept = rollback if allowed < len(ends) else 0
    assert stream.croppable(remove) == (packed(left) >= max(final, packed(tokens - kept)))
    size = HEADS * DIM * 2 * (stream.ring.shape[2] + stream.sinks.shape[2]) + stream.store.nbytes
    assert sum(stream.bytes_by_part().values()) == size and min(stream.bytes_by_part().values()) >= 0
    if stream.croppable(remove):
        stream.crop(remove)
        if left:
            assert_same(state(stream, 0), state(one_shot(make(codecs, "temporal", *window), x[:, :, :left]), 0))
        append(stream, rows, x[:, :, left : left + 30], left)
        fresh = one_shot(make(codecs, "temporal", *window), x[:, :, : left + 30])
        assert_same(state(stream, 0), state(fresh, 0))


def test_rows_can_be_selected(codecs):
    pads, x = [0, 13, 2], numbers(3, 60)
    mask = torch.tensor([[0] * n + [1] * (60 - n) for n in pads])
    stream = make(codecs, "channel", 2, 3, 1)
    append(stream, Rows(), x, 0, mask)
    before = [state(stream, row) for row in range(3)]
    stream.select(torch.tensor([2, 2, 0, 1]))
    for row, old in enumerate([2, 2, 0, 1]):
        assert_same(state(stream, row), before[old])


def test_flush_that_splits_blocks_is_refused(codecs):
    with pytest.raises(UsageError, match="blocks of 8"):
        Stream(StreamPlan("value", codecs["channel"], Window(0, 0, 4)))
