"""A store with reserved room is one segment that never moves."""

from __future__ import annotations

import pytest
import torch

from kvq_cli.cache.store import PackedStore
from kvq_cli.codecs.base import Packed, Part


def run(first: int, tokens: int) -> Packed:
    """Tokens whose numbers are their indices: one entry per token, and one per 4."""
    numbers = torch.arange(first, first + tokens).view(1, 1, tokens, 1).expand(2, 3, tokens, 5)
    return Packed(tokens, {"codes": Part(numbers.clone(), 1), "scale": Part(numbers[:, :, ::4].clone(), 4)})


def written(store: PackedStore, sizes: list[int]) -> list[int]:
    """Data pointers of the codes after each write."""
    places, at = [], 0
    for size in sizes:
        store.write(slice(0, 2), 2, at, run(at, size))
        places.append(store.whole().parts["codes"].tensor.data_ptr())
        at += size
    return places


@pytest.mark.parametrize("sizes", [[4] * 50, [100, 4, 4, 92], [200]])
def test_store_with_room_does_not_move(sizes):
    store = PackedStore(4, room=200)
    assert len(set(written(store, sizes))) == 1
    assert store.capacity == 200 and store.joined == 0
    for name, part in run(0, 200).parts.items():
        assert torch.equal(store.whole().parts[name].tensor, part.tensor)


def test_store_grows_beyond_its_room():
    store = PackedStore(4, room=40)
    written(store, [40, 4, 4])
    assert store.joined > 0
    assert torch.equal(store.read(slice(0, 2), 0, 48).parts["codes"].tensor, run(0, 48).parts["codes"].tensor)
