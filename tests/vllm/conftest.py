"""Fixtures of steps that CUDA graphs hold."""

from __future__ import annotations

import pytest
from paged_layers import DIM
from random_artifacts import tiny_model


@pytest.fixture
def unread_page_ids(monkeypatch):
    """Do not look at the ids of pages, as on a GPU."""
    monkeypatch.setattr("kvq_kernels.decode_attention.pages._check_ids", lambda *_: None)


@pytest.fixture(scope="session")
def one_layer():
    """A random Llama of 1 layer, 2 kv heads of 32."""
    return tiny_model(head_dim=DIM, hidden_size=64, num_hidden_layers=1)
