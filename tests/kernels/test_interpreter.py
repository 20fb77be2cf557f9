"""Omitting the work that Triton's interpreter drops changes no bit of what kernels compute (see `interpreter`)."""

from dataclasses import replace

import pytest
import torch
from kernel_cases import HALF, TEMPORAL, Case
from triton import knobs


@pytest.mark.skipif(not knobs.runtime.interpret, reason="kernels are compiled")
def test_results_are_those_of_the_unchanged_interpreter(monkeypatch):
    from triton.language import core
    from triton.runtime import interpreter

    case, builder = Case(*TEMPORAL, [40], **HALF, unpacked=(8, 8), sinks=4), interpreter.interpreter_builder
    actual = case.run()
    monkeypatch.setattr(interpreter, "_patch_lang", interpreter._patch_lang.__wrapped__)
    for kind in (core.block_type, core.tensor):
        monkeypatch.setattr(kind, "__init__", kind.__init__.__wrapped__)
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=True))
    assert torch.equal(case.run(), actual)
