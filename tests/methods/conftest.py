"""Model shapes, and the tensors that a calibration would have made, drawn at random."""

import pytest
import torch

from kvq_cli.methods.base import CalibrationSpec, ModelShape


@pytest.fixture
def shape() -> ModelShape:
    return model_shape()


def model_shape(layers=2, kv_heads=2, head_dim=64, dtype=torch.float16) -> ModelShape:
    return ModelShape(layers, 2 * kv_heads, kv_heads, head_dim, 2 * kv_heads * head_dim, dtype)


def layer_tensors(
    spec: CalibrationSpec, shape: ModelShape, choice: list[int], seed: int = 0
) -> dict[str, torch.Tensor]:
    """One layer's tensors under their names in the artifact, without `layers.<i>.`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    tensors = {}
    for kind, stream in (("k", spec.keys), ("v", spec.values)):
        tensors[f"{kind}.choice"] = torch.tensor(choice, dtype=torch.int8)
        for index in set(choice):
            block, heads = stream.shapes[index], choice.count(index)
            books = draw(heads, shape.head_dim // stream.share, stream.entries, block.size)
            tensors[f"{kind}.centroids.{block.name}"] = books.half()
        if stream.normalize:
            tensors[f"{kind}.mean"] = draw(shape.kv_heads, shape.head_dim)
            tensors[f"{kind}.std"] = draw(shape.kv_heads, shape.head_dim).abs() + 0.5
        if stream.outliers:
            tensors[f"{kind}.lower"] = -draw(shape.kv_heads, shape.head_dim).abs() - 1
            tensors[f"{kind}.upper"] = draw(shape.kv_heads, shape.head_dim).abs() + 1
    return tensors


@pytest.fixture
def tensors_for():
    return layer_tensors


@pytest.fixture
def shape_of():
    return model_shape
