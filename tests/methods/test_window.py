"""The split sinks | packed | recent depends on the length only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq_cli.errors import UsageError
from kvq_cli.methods.window import Window

windows = st.builds(Window, st.integers(0, 40), st.integers(0, 130), st.integers(1, 128))


@given(windows, st.integers(0, 1000))
def test_unpacked_tokens_are_bounded(window, tokens):
    packed = window.packed(tokens)
    assert packed % window.flush == 0
    exact = tokens - packed
    assert exact >= min(tokens, window.sinks + window.recent)
    assert exact <= max(window.sinks + window.recent, 0) + window.flush - 1


@given(windows)
def test_token_by_token_packs_one_flush_at_a_time(window):
    """Packed tokens stay packed, so the result does not depend on how tokens are fed."""
    counts = [window.packed(tokens) for tokens in range(400)]
    assert {after - before for before, after in zip(counts, counts[1:], strict=False)} <= {0, window.flush}


@pytest.mark.parametrize(
    ("window", "tokens", "packed"),
    [
        (Window(0, 0, 128), 127, 0),  # KIVI keys
        (Window(0, 0, 128), 128, 128),
        (Window(0, 0, 128), 300, 256),
        (Window(0, 128, 1), 300, 172),  # KIVI values
        (Window(32, 96, 32), 159, 0),  # KIVI+sink keys
        (Window(32, 96, 32), 160, 32),
        (Window(8, 0, 4), 11, 0),  # TemporalKV, chunks of 4
        (Window(8, 0, 4), 12, 4),
    ],
)
def test_windows_of_the_papers(window, tokens, packed):
    assert window.packed(tokens) == packed


@pytest.mark.parametrize("sizes", [(-1, 0, 1), (0, -1, 1), (0, 0, 0)])
def test_impossible_windows_are_refused(sizes):
    with pytest.raises(UsageError, match="impossible window"):
        Window(*sizes)
