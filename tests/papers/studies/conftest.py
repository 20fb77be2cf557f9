"""Subjects of studies that need no text: random models of known shapes and token ids."""

from collections.abc import Callable

import pytest
import torch

from kvq_cli.benchmarking.shapes import random_model
from kvq_cli.models import LoadedModel, model_shape
from kvq_cli.papers.studies.study import Subject


@pytest.fixture(scope="session")
def subject_of() -> Callable[[str, torch.Tensor], Subject]:
    """`subject_of("tiny", windows)`: a random model of that shape and the token ids `[windows, tokens]` to study."""

    def make(shape: str, windows: torch.Tensor) -> Subject:
        model = random_model(shape, torch.device("cpu"), torch.float32, 0)
        subject = Subject(LoadedModel(model, None, shape, None, model_shape(model)), "none", *windows.shape, 0)
        subject.__dict__["windows"] = windows
        return subject

    return make
