"""Model shapes, random tensors in place of calibrated ones, and calibrated tensors of the built-in model."""

from collections.abc import Callable

import pytest
import torch
from random_joined import random_joined
from random_transforms import random_layer

from kvq_cli.attention.capture_points import attention_layers
from kvq_cli.calibration import capture
from kvq_cli.calibration.captured import CapturedStream, ClusterSettings
from kvq_cli.calibration.codebooks import calibrate_stream
from kvq_cli.codecs.layout import dtype_name
from kvq_cli.data.texts import load_text, token_windows
from kvq_cli.methods.base import LayerPlan, Method, ModelShape
from kvq_cli.methods.joined_spec import JoinedSpec
from kvq_cli.methods.rotation_spec import RotationSpec
from kvq_cli.methods.specs import CalibrationSpec
from kvq_cli.methods.transform_specs import MixedSpec, TransformSpec
from kvq_cli.models import load_model


@pytest.fixture
def shape() -> ModelShape:
    return model_shape()


def model_shape(layers=2, kv_heads=2, head_dim=64, dtype="float16") -> ModelShape:
    return ModelShape(layers, 2 * kv_heads, kv_heads, head_dim, 2 * kv_heads * head_dim, dtype_name(dtype))


def layer_tensors(
    spec: CalibrationSpec | TransformSpec | MixedSpec | RotationSpec | JoinedSpec,
    shape: ModelShape,
    choice: list[int],
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """One layer's tensors under their names in the artifact, without `layers.<i>.`; of a mixed method the first's; of a
    method that joins layers, those of layer `seed`."""
    if isinstance(spec, MixedSpec):
        drawn = {kind: layer_tensors(one, shape, choice, seed) for kind, one in zip("kv", spec.layers[0], strict=True)}
        return {name: x for kind, tensors in drawn.items() for name, x in tensors.items() if name[0] == kind}
    generator = torch.Generator().manual_seed(seed)
    if isinstance(spec, TransformSpec):
        return random_layer(spec, shape, generator)
    if isinstance(spec, JoinedSpec):
        return {name: x for kind in "kv" for name, x in random_joined(spec, kind, shape, seed).items()}

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    tensors = {}
    if isinstance(spec, RotationSpec):
        for kind in "kv":
            tensors[f"{kind}.rotation"] = torch.linalg.qr(draw(1, shape.head_dim, shape.head_dim)).Q
            tensors[f"{kind}.spread"] = torch.ones(1, shape.head_dim)
        return tensors
    for kind, stream in (("k", spec.keys), ("v", spec.values)):
        tensors[f"{kind}.choice"] = torch.tensor(choice, dtype=torch.int8)
        for index in set(choice):
            block, heads = stream.shapes[index], 1 if stream.across_heads else choice.count(index)
            books = draw(heads, shape.head_dim // stream.share, stream.entries, block.size)
            tensors[f"{kind}.centroids.{block.name}"] = books.half()
        if stream.normalize:
            tensors[f"{kind}.mean"] = draw(shape.kv_heads, shape.head_dim)
            tensors[f"{kind}.std"] = draw(shape.kv_heads, shape.head_dim).abs() + 0.5
        if stream.rotation == "opq":
            tensors[f"{kind}.rotation"] = torch.linalg.qr(draw(shape.kv_heads, shape.head_dim, shape.head_dim)).Q
            tensors[f"{kind}.spread"] = torch.ones(shape.kv_heads, shape.head_dim)
        if stream.outliers and not stream.per_token:
            tensors[f"{kind}.lower"] = -draw(shape.kv_heads, shape.head_dim).abs() - 1
            tensors[f"{kind}.upper"] = draw(shape.kv_heads, shape.head_dim).abs() + 1
    return tensors


@pytest.fixture
def tensors_for():
    return layer_tensors


@pytest.fixture
def shape_of():
    return model_shape


@pytest.fixture(scope="session")
def captured() -> dict[str, CapturedStream]:
    """Keys ("k") and values ("v") of a layer of the built-in model on real text, with gradients of the loss."""
    loaded = load_model("reference", device="cpu", dtype="float32")
    windows = token_windows(loaded.tokenizer, load_text("prose", "calibration"), 328, 5, 0)
    actual: dict[str, list] = {}

    def store(layer: int, kind: str, quantity: str, numbers: torch.Tensor) -> None:
        if layer == 3:
            actual.setdefault(kind + quantity, []).append(numbers[8:].bfloat16().clone())

    for window in windows:
        capture.capture(loaded.model, attention_layers(loaded.model), window, store, gradients=True)
    x = {name: torch.stack(samples) for name, samples in actual.items()}
    return {kind: CapturedStream(x[f"{kind}x"], x[f"{kind}g"], held_out=1) for kind in "kv"}


@pytest.fixture(scope="session")
def calibrated(captured) -> Callable[[Method], tuple[LayerPlan, dict]]:
    """`calibrated(method)`: (plan, tensors) of the method for the captured layer."""
    shape, done = model_shape(1, 2, 64, "bfloat16"), {}

    def make(method: Method) -> tuple[LayerPlan, dict]:
        if method not in done:
            spec, tensors = method.calibration(shape), {}
            settings = ClusterSettings(
                spec.fisher, spec.hybrid, points=1 << 20, iterations=50, seed=0, dtype=torch.bfloat16
            )
            for kind, stream in (("k", spec.keys), ("v", spec.values)):
                stream_tensors, _ = calibrate_stream(captured[kind], stream, settings)
                tensors |= {f"{kind}.{name}": tensor for name, tensor in stream_tensors.items()}
            done[method] = (method.plan(0, shape, tensors), tensors)
        return done[method]

    return make


@pytest.fixture(scope="session")
def held_out_error(captured, calibrated) -> Callable[..., float]:
    """`held_out_error(method, "k")`: relative squared error of the codec on held-out samples, weighted by squared
    gradients, outliers included. `seen=True`: on the training samples, whose error Fisher-weighted k-means minimizes
    (gradients of one window are too few to show it). `weighted=False`: without gradients."""

    def measure(method: Method, kind: str, seen: bool = False, weighted: bool = True) -> float:
        plan, _ = calibrated(method)
        codec = (plan.keys if kind == "k" else plan.values).codec
        windows = slice(0, -1) if seen else slice(-1, None)
        x, g = (t[windows].transpose(1, 2).double() for t in (captured[kind].x, captured[kind].g))
        g = g if weighted else torch.ones_like(g)
        lost = g * (codec.decode(codec.encode(x.bfloat16()), torch.float64) - x)
        return (lost.square().sum() / (g * x).square().sum()).item()

    return measure
