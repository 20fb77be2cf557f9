"""Inputs of studies that need no text: random models of known shapes, and token ids."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from kvq_cli.benchmarking.shapes import random_model
from kvq_cli.models import LoadedModel, model_shape
from kvq_cli.papers.studies.study import StudyInput

#: What studies ask of a tokenizer; token 121 stands for what the text leaves out.
TOKENIZER = SimpleNamespace(unk_token_id=121, bos_token_id=1, eos_token_id=2)


@pytest.fixture(scope="session")
def study_input() -> Callable[[str, torch.Tensor], StudyInput]:
    """`study_input("tiny", windows)`: a random model of that shape and the token ids `[windows, tokens]` to study."""

    def make(shape: str, windows: torch.Tensor) -> StudyInput:
        model = random_model(shape, torch.device("cpu"), torch.float32, 0)
        data = StudyInput(LoadedModel(model, TOKENIZER, shape, None, model_shape(model)), "none", *windows.shape, 0)
        data.__dict__["windows"] = windows
        return data

    return make
