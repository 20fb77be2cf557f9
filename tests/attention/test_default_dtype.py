"""PyTorch's default dtype (`torch.set_default_dtype`) changes no answer: no floating-point tensor is made without a
dtype."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from model_matrix import ready_method, small_method, tiny_model

from kvq_cli.attention.attach import attach
from kvq_cli.codecs.rotated import random_signs
from kvq_cli.methods.registry import method_names

ROOT = Path(__file__).parents[2]
#: Functions of torch whose result has the default dtype, unless they are told another.
FLOATING = {"zeros", "ones", "empty", "eye", "rand", "randn", "linspace", "logspace"}
PASSES = [slice(0, 20), slice(20, 37), *(slice(i, i + 1) for i in range(37, 40))]


@pytest.fixture
def default_dtype() -> Iterator:
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


def forget_tables() -> None:
    """Let functions that keep their results, such as random signs, compute them again."""
    for module in [module for name, module in sys.modules.items() if name.startswith("kvq_cli.")]:
        for function in vars(module).values():
            if getattr(function, "__module__", None) == module.__name__ and hasattr(function, "cache_clear"):
                function.cache_clear()


@pytest.mark.parametrize("name", method_names())
def test_every_method_answers_alike_with_any_default_dtype(default_dtype, name):
    model, method = tiny_model("llama", num_hidden_layers=2), small_method(name)
    ready, answers = ready_method(model, method), []
    ids = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(1))
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        default_dtype(dtype)
        forget_tables()
        with attach(model, ready) as kv:
            cache = kv.new_cache()
            answers.append(torch.cat([model(ids[:, part], past_key_values=cache).logits for part in PASSES], dim=1))
    assert all(torch.equal(answers[0], other) for other in answers[1:])


def test_tables_computed_from_integers_are_float32(default_dtype):
    default_dtype(torch.float64)
    forget_tables()
    assert random_signs(16, torch.device("cpu")).dtype == torch.float32
    forget_tables()


def test_tensors_of_numbers_are_made_with_a_dtype():
    """An empty placeholder, `torch.empty(0)`, needs none."""
    files = [path for part in ("kvq_cli", "kernels") for path in (ROOT / part).rglob("*.py")]
    found = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in _without_dtype(path.read_text("utf-8"))]
    assert not found


def _without_dtype(source: str) -> Iterator[int]:
    if not any(f"torch.{name}(" in source for name in FLOATING):
        return
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in FLOATING:
            of_torch = isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"
            placeholder = call.func.attr == "empty" and [ast.unparse(x) for x in call.args] == ["0"]
            if of_torch and not placeholder and "dtype" not in {keyword.arg for keyword in call.keywords}:
                yield call.lineno
