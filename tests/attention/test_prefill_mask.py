"""Masks of blocks of queries show the tokens of each query's runs, wherever the block begins."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvq_cli.attention.prefill_mask import HIDDEN, UNLIMITED, Edge, Part, Sight, block_mask
from kvq_cli.methods.window import Window

WINDOWS = st.builds(Window, st.sampled_from([0, 3, 8]), st.sampled_from([0, 5, 31]), st.sampled_from([1, 4, 16]))
EDGES = st.builds(Edge, WINDOWS, st.none() | st.integers(0, 120))


@given(
    keys=EDGES,
    values=EDGES,
    sliding=st.sampled_from([UNLIMITED, 17, 90]),
    begin=st.integers(0, 200),
    queries=st.integers(1, 20),
    cuts=st.lists(st.integers(0, 230), min_size=8, max_size=8),
)
def test_masks_equal_the_runs_of_each_query(keys, values, sliding, begin, queries, cuts):
    sight, end = Sight(keys, values, sliding), begin + queries
    ranges = [sorted(cuts[2 * run : 2 * run + 2]) for run in range(4)]
    parts = [Part(run, False, False, start, stop) for run, (start, stop) in enumerate(ranges) if start < stop]
    if not parts:
        return
    rows = []
    for query in range(begin, end):
        runs = sight.runs(query)
        shown = [runs[part.run].start <= token < runs[part.run].stop for part in parts for token in range(*part[3:])]
        rows.append([0.0 if each else HIDDEN for each in shown])
    assert torch.equal(block_mask(sight, begin, end, parts, torch.device("cpu")), torch.tensor(rows))
