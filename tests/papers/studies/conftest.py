"""Inputs of studies that need no text: random models of known shapes, and token ids."""

from collections.abc import Callable

import pytest
import torch

from kvq_cli.benchmarking.shapes import random_model
from kvq_cli.models import LoadedModel, model_shape
from kvq_cli.papers.studies.study import StudyInput


@pytest.fixture(scope="session")
def study_input() -> Callable[[str, torch.Tensor], StudyInput]:
    """`study_input("tiny", windows)`: a random model of that shape and the token ids `[windows, tokens]` to study."""

    def make(shape: str, windows: torch.Tensor) -> StudyInput:
        model = random_model(shape, torch.device("cpu"), torch.float32, 0)
        data = StudyInput(LoadedModel(model, None, shape, None, model_shape(model)), "none", *windows.shape, 0)
        data.__dict__["windows"] = windows
        return data

    return make
