"""Check the factors of an artifact against the weights of the model that it is attached to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvq_cli.artifact import Artifact
from kvq_cli.attention.capture_points import AttentionLayer
from kvq_cli.attention.projections import projections
from kvq_cli.errors import KvqError
from kvq_cli.methods.specs import Spec

#: Random vectors in place of a matrix: products with them cost little, and their norm is the matrix's within a few %.
_VECTORS = 16
#: Largest residual of a decomposition of full rank, in any dtype.
_MAX_RESIDUAL = 0.05
#: Weights of equal fingerprints are equal as bfloat16.
_ROUNDING = torch.finfo(torch.bfloat16).eps


def check_factors(artifact: Artifact, spec: Spec | None, layers: Sequence[AttentionLayer]) -> None:
    """Raise KvqError, naming layer and tensors, unless U is orthonormal and U (S B^T) is W, within the residuals that
    the artifact records (one of random numbers, for benchmarks, records none).

    spec: the method's calibration; factors of lower rank are not checked.
    """
    if spec is None or not spec.full_rank or "errors" not in artifact.config:
        return
    for layer, errors in zip(layers, artifact.config["errors"]["layers"], strict=True):
        tensors = artifact.layer(layer.index)
        weights = dict(zip("kv", projections(layer), strict=True)) if spec.factors(layer.index) else {}
        for name in spec.factors(layer.index):
            limit, where = min(errors[name]["residual"], _MAX_RESIDUAL) + _ROUNDING, f"layers.{layer.index}."
            down = tensors[f"{name}.down"]
            if not _difference((torch.eye(down.shape[1], dtype=torch.float32),), (down.T, down)) <= limit:
                raise KvqError(f"artifact {artifact.path}: {where}{name}.down is not orthonormal: calibrate again")
            for kind in "kv" if name == "x" else name:
                if not _difference((weights[kind].weight.T,), (down, tensors[f"{kind}.up"])) <= limit:
                    raise KvqError(
                        f"artifact {artifact.path}: {where}{name}.down times {where}{kind}.up is not the model's "
                        f"W_{kind} of that layer: calibrate again"
                    )


def _difference(expected: Sequence[Tensor], factors: Sequence[Tensor]) -> float:
    """|| A - B || / || A || of two matrices, each given as factors, estimated by products with random vectors."""
    noise = torch.Generator().manual_seed(0)
    vectors = torch.randn(expected[-1].shape[1], _VECTORS, generator=noise, dtype=torch.float32)
    products = []
    for matrices in (expected, factors):
        x = vectors
        for matrix in reversed(matrices):
            x = matrix.detach().float() @ x.to(matrix.device)
        products.append(x.cpu())
    return ((products[0] - products[1]).norm() / products[0].norm().clamp(min=1e-30)).item()
