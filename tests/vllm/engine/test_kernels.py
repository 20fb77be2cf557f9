"""Kernels read and write vLLM's pages, in Triton's interpreter: what a GPU does."""

import pytest

from kvq_cli.vllm.engine import Engine
from kvq_cli.vllm.paged_decode import PagedKernels
from kvq_cli.vllm.paged_layer import PagedLayer


@pytest.mark.parametrize("method", ["kivi:residual=32", "temporalkv"])
def test_tokens_equal_generate(method, case, start, prompts, monkeypatch):
    """Requests of different lengths decode in one launch for each layer."""
    kernels, launches, attend = PagedKernels(1024), [], PagedKernels.attend

    def paged_layer(engine, index, _name):
        return PagedLayer(index, engine.plans[index], engine.shape, engine.layout, engine.rotations[index], kernels)

    def counted(self, query, *args):
        launches.append(len(query))
        return attend(self, query, *args)

    monkeypatch.setattr(Engine, "paged_layer", paged_layer)
    monkeypatch.setattr(PagedKernels, "attend", counted)
    asked, new = [0, 3, 4], (6, 6, 6)
    with start(method) as engine:
        outputs = engine.tokens([prompts[i] for i in asked], new)
    assert [list(output.outputs[0].token_ids) for output in outputs] == [case(method).expected[i][:6] for i in asked]
    assert launches.count(3) >= 2 * 4
