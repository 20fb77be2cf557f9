"""The tensors of a safetensors file as NumPy arrays: to check them without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import deserialize

from kvq_cli.codecs.layout import TensorSpec
from kvq_cli.errors import KvqError

#: Dtypes of the format.
_DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8"},
}


@dataclass(frozen=True)
class StoredTensor:
    """numbers: those of a bfloat16 tensor as uint16, their bits."""

    spec: TensorSpec
    numbers: npt.NDArray[Any]

    @property
    def is_finite(self) -> bool:
        """Whether no number is NaN or infinite."""
        if self.spec.dtype == "bfloat16":
            exponent = self.numbers & 0x7F80
            return bool((exponent != 0x7F80).all())
        return bool(np.isfinite(self.numbers).all())

    @property
    def exact(self) -> npt.NDArray[np.float64]:
        """The numbers in 64 bits."""
        numbers = self.numbers
        if self.spec.dtype == "bfloat16":
            numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
        return numbers.astype(np.float64)


def stored_tensors(data: bytes) -> dict[str, StoredTensor]:
    """The tensors of a file by name. Raises an error of safetensors, NumPy or Python for a damaged one."""
    found = {}
    for name, entry in deserialize(data):
        spec = TensorSpec(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
        kind = np.dtype("uint16" if spec.dtype == "bfloat16" else spec.dtype)
        found[name] = StoredTensor(spec, np.frombuffer(entry["data"], kind).reshape(spec.shape))
    return found


def check_tensor(tensor: StoredTensor, like: TensorSpec, name: str) -> None:
    """Raise KvqError, naming the tensor, for another shape or dtype, or numbers that are not finite."""
    check_spec(tensor.spec, like, name)
    if not tensor.is_finite:
        raise KvqError(f"tensor {name} has infinite numbers or NaN")


def check_spec(found: TensorSpec, like: TensorSpec, name: str) -> None:
    """Raise KvqError, naming the tensor, for another shape or dtype."""
    if found != like:
        actual, valid = (f"{list(spec.shape)} {spec.dtype}" for spec in (found, like))
        raise KvqError(f"tensor {name} is {actual} instead of {valid}")
