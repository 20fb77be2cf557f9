"""Padding and positions of a batch."""

from __future__ import annotations

import pytest
import torch

from kvq_cli.cache.rows import Rows, RowSpan
from kvq_cli.errors import UsageError


def test_without_mask_all_rows_are_one_group():
    forward = Rows().begin(0, 5, 3)
    assert forward.row_spans == (RowSpan(slice(0, 3), pads=0, past=0, tokens=5, offset=0),)


def test_left_padded_rows_count_tokens_without_pads():
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]])
    rows = Rows()
    positions = mask.cumsum(1) - 1
    forward = rows.begin(0, 4, 3, mask, positions.clamp(min=0))
    assert forward.row_spans == (RowSpan(slice(0, 1), 2, 0, 2, 0), RowSpan(slice(1, 3), 0, 0, 4, 0))
    more = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], dim=1)
    forward = rows.begin(4, 1, 3, more, torch.tensor([[2], [4], [4]]))
    assert forward.row_spans == (RowSpan(slice(0, 1), 0, 2, 3, 0), RowSpan(slice(1, 3), 0, 4, 5, 0))


@pytest.mark.parametrize("pads", [(2, 0, 0), (0, 0, 0), (1, 1, 3)])
def test_decode_step_on_a_device_needs_no_host_read(pads, monkeypatch):
    prompt = torch.tensor([[0] * n + [1] * (4 - n) for n in pads])
    positions = (prompt.cumsum(1) - 1).clamp(min=0) + 3
    known, blind = Rows(), Rows()
    for rows in (known, blind):
        rows.begin(0, 4, 3, prompt, positions)
    for step in range(3):
        mask = torch.cat([prompt, torch.ones(3, step + 1, dtype=prompt.dtype)], dim=1)
        expected = known.begin(4 + step, 1, 3, mask, positions[:, -1:] + step + 1)
        with monkeypatch.context() as patch:
            patch.setattr("kvq_cli.cache.rows.would_sync", lambda _, columns: columns == 1)
            forward = blind.begin(4 + step, 1, 3, mask * 0, positions[:, -1:] * 0)
            assert forward == expected
            forward.check_mask(torch.zeros(3, 1, 1, 5 + step, dtype=torch.bool), None)


def test_positions_that_count_pads_give_an_offset():
    mask = torch.tensor([[0, 0, 1, 1]])
    assert Rows().begin(0, 4, 1, mask).row_spans[0] == RowSpan(slice(0, 1), 2, 0, 2, offset=2)


def test_chunk_of_pads_only():
    rows = Rows()
    first = rows.begin(0, 2, 2, torch.tensor([[0, 0], [1, 1]]))
    assert [(group.pads, group.tokens) for group in first.row_spans] == [(2, 0), (0, 2)]
    second = rows.begin(2, 2, 2, torch.tensor([[0, 0, 0, 1], [1, 1, 1, 1]]))
    assert [(group.pads, group.past, group.tokens) for group in second.row_spans] == [(1, 0, 1), (0, 2, 4)]


@pytest.mark.parametrize("mask", [[[1, 1, 0]], [[1, 0, 1]], [[0, 1, 0]]])
def test_pads_not_on_the_left_are_refused(mask):
    with pytest.raises(UsageError, match="left"):
        Rows().begin(0, 3, 1, torch.tensor(mask))


def test_inconsistent_continuations_are_refused():
    rows = Rows()
    with pytest.raises(UsageError, match="empty"):
        rows.begin(0, 0, 1)
    rows.begin(0, 3, 2, torch.tensor([[0, 1, 1], [1, 1, 1]]))
    with pytest.raises(UsageError, match="attention_mask"):
        rows.begin(3, 1, 2)
    with pytest.raises(UsageError, match="disagrees"):
        rows.begin(3, 1, 2, torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1]]))
    with pytest.raises(UsageError, match="shape"):
        rows.begin(3, 1, 2, torch.tensor([[1], [1]]))
    with pytest.raises(UsageError, match="batch of 2"):
        rows.begin(3, 1, 5)
    full = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    with pytest.raises(UsageError, match="count on"):
        rows.begin(3, 1, 2, full, torch.tensor([[7], [3]]))
    with pytest.raises(UsageError, match="count up"):
        Rows().begin(0, 3, 1, None, torch.tensor([[0, 1, 0]]))
    with pytest.raises(UsageError, match="not supported"):
        Rows().begin(0, 3, 1, None, torch.zeros(3, 1, 3, dtype=torch.long))


def _causal(total: int, columns: int) -> torch.Tensor:
    return (torch.arange(total) <= torch.arange(total - columns, total).unsqueeze(1)).view(1, 1, columns, total)


def test_mask_of_the_model_is_checked():
    forward = Rows().begin(0, 4, 1, torch.tensor([[0, 1, 1, 1]]))
    mask = _causal(4, 4) & torch.tensor([False, True, True, True])
    forward.check_mask(mask, None)
    Rows().begin(0, 4, 1, torch.tensor([[0, 1, 1, 1]])).check_mask(None, None)
    window = mask & (torch.arange(4) > torch.arange(4).unsqueeze(1) - 2)
    forward.check_mask(window, 2)
    for wrong in (~mask, _causal(4, 4), torch.ones(1, 1, 4, 4, dtype=torch.bool)):
        with pytest.raises(UsageError, match="masks attention"):
            forward.check_mask(wrong, None)
    with pytest.raises(UsageError, match="2-D"):
        forward.check_mask(torch.zeros(1, 1, 4, 4), None)
