"""Check the tensors and errors of an artifact's streams (keys or values of a layer), by kind of calibration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from kvq_cli.artifact.schema import Form, Many, OneOf, Whole
from kvq_cli.codecs.chunk_codebooks import CHUNKS
from kvq_cli.errors import KvqError
from kvq_cli.lazy import torch
from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.specs import CalibrationSpec, StreamSpec, TransformSpec, Uncalibrated, kept_components

if TYPE_CHECKING:
    from torch import Tensor

#: The synthesis of stored transforms undoes their analysis to this much: they are rounded to 32 bits.
_INVERSE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class StreamCheck(ABC):
    """Check one stream. kind: "k" or "v". tensors: of the layer. prefix: `layers.<i>.`, for messages."""

    spec: Any
    kind: str
    shape: ModelShape
    tensors: Mapping[str, Tensor]
    prefix: str

    @abstractmethod
    def choice(self) -> list[Any]:
        """Read what `StreamSpec.tensors` takes, and check it."""

    def check(self, choice: list[Any], *, alone: bool) -> None:  # noqa: B027  # nothing without tensors
        """Check the numbers of tensors of valid shapes. alone: the stream has a calibration of its own."""

    @abstractmethod
    def error_form(self, choice: list[Any]) -> Form:
        """The form of the stream's entry in `errors.layers`; block shapes and codes are those of the tensors."""

    @property
    def entry(self) -> dict[str, Form]:
        """The form of one measured error."""
        return {"fisher": float, "plain": float, "fisher_per_head": Many(float, self.shape.kv_heads)}

    def get(self, name: str) -> Tensor:
        return self.tensors[f"{self.kind}.{name}"]

    def read(self, name: str, size: tuple[int, ...], dtype: torch.dtype) -> list[Any]:
        """The numbers of a tensor of this shape and dtype."""
        if f"{self.kind}.{name}" not in self.tensors:
            raise KvqError(f"{self.where(name)} is missing")
        check_tensor(self.get(name), size, dtype, self.where(name).removeprefix("tensor "))
        return cast("list[Any]", self.get(name).tolist())

    def where(self, name: str) -> str:
        return f"tensor {self.prefix}{self.kind}.{name}"

    def check_not_negative(self, name: str) -> None:
        if (self.get(name) < 0).any():
            raise KvqError(f"{self.where(name)} has negative numbers")


class UncalibratedCheck(StreamCheck):
    """A stream without tensors, whose errors alone are measured."""

    spec: Uncalibrated

    def choice(self) -> list[Any]:
        return []

    def error_form(self, choice: list[Any]) -> Form:
        return {"chosen": {**self.entry, "loss": float}}


class CodebookCheck(StreamCheck):
    """Codebooks, statistics and the block shape of each head."""

    spec: CalibrationSpec

    def choice(self) -> list[int]:
        """Read the index of each kv head's block shape."""
        choice = self.read("choice", (self.shape.kv_heads,), torch.int8)
        last, hybrid = len(self.spec.stream(self.kind).shapes) - 1, self.spec.hybrid
        if min(choice) < 0 or max(choice) > last:
            raise KvqError(f"{self.where('choice')} must hold numbers from 0 to {last}")
        if hybrid != "head" and len(set(choice)) > 1:
            raise KvqError(f"{self.where('choice')} must name one block shape for all heads with hybrid={hybrid}")
        if hybrid == "off" and any(choice):
            raise KvqError(f"{self.where('choice')} must be 0 with hybrid=off")
        return choice

    def check(self, choice: list[Any], *, alone: bool) -> None:
        spec, prefix, kind = self.spec.stream(self.kind), self.prefix, self.kind
        if spec.rotation == "opq":
            rotation = self.get("rotation").double()
            identity = torch.eye(rotation.shape[1]).double().expand_as(rotation)
            if not torch.allclose(rotation @ rotation.mT, identity, rtol=0, atol=_INVERSE_TOLERANCE):
                raise KvqError(f"{self.where('rotation')} is not orthogonal")
            self.check_not_negative("spread")
        mean, std, lower, upper = (self.tensors.get(f"{kind}.{name}") for name in ("mean", "std", "lower", "upper"))
        if std is not None:
            self.check_not_negative("std")
        if lower is None or upper is None:
            return
        if (lower > upper).any():
            raise KvqError(f"{self.where('lower')} exceeds {prefix}{kind}.upper")
        if mean is not None and std is not None and spec.by_range:
            for name, actual, valid in (("mean", mean, (lower + upper) / 2), ("std", std, (upper - lower) / 2)):
                if not torch.allclose(actual, valid, rtol=1e-5, atol=1e-6 * float(valid.abs().max())):
                    raise KvqError(f"{self.where(name)} is not computed from {kind}.lower and {kind}.upper")

    def error_form(self, choice: list[Any]) -> Form:
        shapes = self.spec.stream(self.kind).shapes
        return {
            "choice": OneOf(([shapes[index].name for index in choice],)),
            "chosen": self.entry,
            "shapes": {block.name: self.entry for block in shapes},
            "adjacent_token_correlation": float,
        }


class TransformCheck(StreamCheck):
    """Transforms, and the codebooks of their components."""

    spec: TransformSpec

    def choice(self) -> list[list[int]]:
        """Read for each group how many chunks have 1, 2, 4 and 8 components."""
        groups, width = self.spec.groups(self.kind, self.shape)
        rows = self.read("allocation", (groups, len(CHUNKS)), torch.int16)
        for row in rows:
            if min(row) < 0 or not 1 <= kept_components(row) <= width:
                raise KvqError(f"{self.where('allocation')} must give out from 1 to {width} components, not as {row}")
        return rows

    def check(self, choice: list[Any], *, alone: bool) -> None:
        """Check that the synthesis of the kept components undoes their analysis, and that there are no others."""
        self.check_not_negative("std")
        analysis, synthesis = (self.get(name).double() for name in ("analysis", "synthesis"))
        for group, row in enumerate(choice):
            kept = kept_components(row)
            unused = analysis[group, kept:].any() or synthesis[group, :, kept:].any()
            undone = analysis[group, :kept] @ synthesis[group, :, :kept]
            identity = torch.eye(kept, dtype=torch.float64)
            if unused or not torch.allclose(undone, identity, rtol=0, atol=_INVERSE_TOLERANCE):
                raise KvqError(f"{self.where('synthesis')} does not undo {self.prefix}{self.kind}.analysis")
        if alone:
            most = self.spec.stream_codes(self.kind, self.shape)
            check_codes(choice, most, f"{self.prefix}{self.kind}.allocation gives")

    def error_form(self, choice: list[Any]) -> Form:
        codes = sum(map(sum, choice))
        return {"codes": Whole(codes, codes), "chosen": {**self.entry, "loss": float}}


#: By the spec of the stream.
STREAMS: dict[type[StreamSpec], type[StreamCheck]] = {
    Uncalibrated: UncalibratedCheck,
    CalibrationSpec: CodebookCheck,
    TransformSpec: TransformCheck,
}


def check_codes(rows: list[list[int]], most: int, what: str) -> None:
    """Raise KvqError where an allocation, a row per group, has more codes than the method allows."""
    if (codes := sum(map(sum, rows))) > most:
        raise KvqError(f"{what} {codes} codes, above the {most} of the method")


def check_tensor(tensor: Tensor, size: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    """Raise KvqError, naming the tensor, for another shape or dtype, or numbers that are not finite."""
    if tuple(tensor.shape) != size or tensor.dtype != dtype:
        actual, valid = (
            f"{list(s)} {str(d).removeprefix('torch.')}" for s, d in ((tensor.shape, tensor.dtype), (size, dtype))
        )
        raise KvqError(f"tensor {name} is {actual} instead of {valid}")
    if dtype.is_floating_point and not tensor.isfinite().all():
        raise KvqError(f"tensor {name} has infinite numbers or NaN")
