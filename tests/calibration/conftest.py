"""A tiny random model with a tokenizer, loaded or as a folder."""

from __future__ import annotations

import pytest
from tiny_folder import write_tiny_model

from kvq_cli.calibration.settings import CalibrationOptions
from kvq_cli.models import LoadedModel, load_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """The folder of `write_tiny_model`."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def tiny(tiny_folder) -> LoadedModel:
    return load_model(str(tiny_folder), device="cpu")


@pytest.fixture(scope="session")
def quick() -> CalibrationOptions:
    """Options of a calibration of the tiny model that takes a second."""
    return CalibrationOptions(samples=6, seqlen=100, gradients=4, points=300, iterations=5)
