"""Studies of models of which some layers have no cache: the others are counted, and studied, in order."""

import pytest
import torch
from model_matrix import FAMILIES, tiny_model

from kvq_cli.attention.capture_points import attention_layers
from kvq_cli.models import LoadedModel, model_shape
from kvq_cli.papers.studies.activation_hooks import query_hooks, watch_inputs
from kvq_cli.papers.studies.activations import captured
from kvq_cli.papers.studies.study import StudyInput, build

#: Layers 0 and 2 have linear attention.
FAMILY = "qwen3_next"


@pytest.fixture(scope="module")
def data():
    model = tiny_model(FAMILY, **FAMILIES[FAMILY])
    assert model_shape(model).cached_layers == (1,)
    windows = torch.randint(3, 97, (3, 24), generator=torch.Generator().manual_seed(0))
    made = StudyInput(LoadedModel(model, None, FAMILY, None, model_shape(model)), "none", *windows.shape, 0)
    made.__dict__["windows"] = windows
    return made


def quiet(*_):
    """No-op progress."""


def test_captures_count_the_layers_with_a_cache(data):
    model, sites = data.loaded.model, attention_layers(data.loaded.model)
    seen = {}
    watch_inputs(model, sites, data.windows[0], lambda layer, kind, x: seen.__setitem__((layer, kind), x))
    assert set(seen) == {(0, "x"), (0, "k"), (0, "v")}
    with captured(data.loaded, data.windows, quiet) as activations:
        assert activations.layers == [0] and torch.equal(activations.x(0, "k")[0].flatten(1), seen[0, "k"])
    prompts = {}
    with query_hooks(model, pre_rope=True) as run:
        run(data.windows[0], prompts.__setitem__)
    assert list(prompts) == [0]
    torch.testing.assert_close(prompts[0].keys[0].transpose(0, 1).flatten(1), seen[0, "k"])


@pytest.mark.parametrize("name", ["sinks", "rank", "latents", "entropy", "magnitudes"])
def test_studies_have_a_row_for_each_layer_with_a_cache(data, name):
    findings = build(name, {}).run(data, quiet)
    assert {row[0] for row in findings.rows if isinstance(row[0], int)} <= {0} and findings.rows
