"""Kernels read and write vLLM's pages, in Triton's interpreter: what a GPU does."""

import pytest

from kvq_cli.attention import transform_backend
from kvq_cli.vllm.engine import Engine
from kvq_cli.vllm.paged_decode import PagedKernels
from kvq_cli.vllm.paged_layer import PagedLayer


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("method", ["kivi:residual=32", "temporalkv", "klt"])
def test_tokens_equal_generate(method, capturable, case, start, prompts, monkeypatch):
    """Requests of different lengths decode in one launch for each layer. capturable: steps in which all requests decode
    run as a CUDA graph holds them."""
    kernels, launches, attend, together = PagedKernels(1024), [], PagedKernels.attend, PagedLayer.attend_each

    def paged_layer(engine, index, _name):
        return PagedLayer(index, engine.plans[index], engine.shape, engine.layout, engine.rotations[index], kernels)

    def counted(self, query, *args):
        launches.append(len(query))
        return attend(self, query, *args)

    steps = []
    # Models here are float32, in which servers leave klt to PyTorch.
    monkeypatch.setattr(transform_backend, "unfused", lambda *_: None)
    monkeypatch.setattr(Engine, "paged_layer", paged_layer)
    monkeypatch.setattr(Engine, "capturable", capturable)
    monkeypatch.setattr(PagedKernels, "attend", counted)
    monkeypatch.setattr(PagedLayer, "attend_each", lambda *args: steps.append(1) or together(*args))
    asked, new = [0, 3, 4], (6, 6, 6)
    with start(method) as engine:
        outputs = engine.tokens([prompts[i] for i in asked], new)
    assert [list(output.outputs[0].token_ids) for output in outputs] == [case(method).expected[i][:6] for i in asked]
    assert launches.count(3) >= 2 * 4
    # Coarse, fine and fine in float16, shared by all layers.
    assert len(kernels._tables.tensors()) == (0 if method.startswith("kivi") else 3)
    assert len(steps) >= 2 * 4 if capturable else not steps
