"""Check the tensors and errors of an artifact's streams (keys or values of a layer), by kind of calibration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from kvq_kernels import fields

from kvq_cli.artifact.schema import Form, Many, OneOf, Whole
from kvq_cli.artifact.stored import StoredTensor, check_tensor
from kvq_cli.codecs.component_groups import BITS, SIZES, Group
from kvq_cli.codecs.layout import TensorSpec
from kvq_cli.errors import KvqError
from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.joined_spec import JoinedSpec
from kvq_cli.methods.specs import CalibrationSpec, StreamSpec, Uncalibrated
from kvq_cli.methods.transform_specs import Profile, TransformSpec

#: Stored rotations are orthogonal to this much: they are rounded to 32 bits.
_INVERSE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class StreamCheck(ABC):
    """Check one stream. kind: "k" or "v". tensors: of the layer. prefix: `layers.<i>.`, for messages."""

    spec: Any
    kind: str
    shape: ModelShape
    tensors: Mapping[str, StoredTensor]
    prefix: str

    @abstractmethod
    def choice(self) -> Sequence[Any]:
        """Read what `StreamSpec.tensors` takes, and check it."""

    def check(self, choice: Sequence[Any], *, alone: bool) -> None:  # noqa: B027  # nothing without tensors
        """Check the numbers of tensors of valid shapes. alone: the stream has a calibration of its own."""

    @abstractmethod
    def error_form(self, choice: Sequence[Any]) -> Form:
        """The form of the stream's entry in `errors.layers`; block shapes and bytes are those of the tensors."""

    @property
    def entry(self) -> dict[str, Form]:
        """The form of one measured error."""
        return {"fisher": float, "plain": float, "fisher_per_head": Many(float, self.shape.kv_heads)}

    def get(self, name: str) -> npt.NDArray[np.float64]:
        """The numbers of a tensor."""
        return self.tensors[f"{self.kind}.{name}"].exact

    def read(self, name: str, like: TensorSpec) -> list[Any]:
        """The numbers of a tensor of this shape and dtype."""
        if (tensor := self.tensors.get(f"{self.kind}.{name}")) is None:
            raise KvqError(f"{self.where(name)} is missing")
        check_tensor(tensor, like, self.where(name).removeprefix("tensor "))
        return cast("list[Any]", tensor.numbers.tolist())

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

    def error_form(self, choice: Sequence[Any]) -> Form:
        return {"chosen": {**self.entry, "loss": float}}


class CodebookCheck(StreamCheck):
    """Codebooks, statistics and the block shape of each head."""

    spec: CalibrationSpec

    def choice(self) -> list[int]:
        """Read the index of each kv head's block shape."""
        choice = self.read("choice", TensorSpec((self.shape.kv_heads,), "int8"))
        last, hybrid = len(self.spec.stream(self.kind).shapes) - 1, self.spec.hybrid
        if min(choice) < 0 or max(choice) > last:
            raise KvqError(f"{self.where('choice')} must hold numbers from 0 to {last}")
        if hybrid != "head" and len(set(choice)) > 1:
            raise KvqError(f"{self.where('choice')} must name one block shape for all heads with hybrid={hybrid}")
        if hybrid == "off" and any(choice):
            raise KvqError(f"{self.where('choice')} must be 0 with hybrid=off")
        return choice

    def check(self, choice: Sequence[Any], *, alone: bool) -> None:
        spec, prefix, kind = self.spec.stream(self.kind), self.prefix, self.kind
        if spec.rotation == "opq":
            check_rotation(kind, self.tensors, prefix)
        names = [name for name in ("mean", "std", "lower", "upper") if f"{kind}.{name}" in self.tensors]
        if "std" in names:
            self.check_not_negative("std")
        if "lower" not in names:
            return
        lower, upper = self.get("lower"), self.get("upper")
        if (lower > upper).any():
            raise KvqError(f"{self.where('lower')} exceeds {prefix}{kind}.upper")
        if "std" in names and spec.by_range:
            for name, valid in (("mean", (lower + upper) / 2), ("std", (upper - lower) / 2)):
                if not np.allclose(self.get(name), valid, rtol=1e-5, atol=1e-6 * float(np.abs(valid).max())):
                    raise KvqError(f"{self.where(name)} is not computed from {kind}.lower and {kind}.upper")

    def error_form(self, choice: Sequence[Any]) -> Form:
        shapes = self.spec.stream(self.kind).shapes
        return {
            "choice": OneOf(([shapes[index].name for index in choice],)),
            "chosen": self.entry,
            "shapes": {block.name: self.entry for block in shapes},
            "adjacent_token_correlation": float,
        }


class TransformCheck(StreamCheck):
    """Transforms, and the widths of their components."""

    spec: TransformSpec

    def choice(self) -> Profile:
        """Read the widths of the fields, and whether tokens have a gain."""
        groups, width = self.spec.groups(self.kind, self.shape)
        most = width // fields.FIELD
        if (tensor := self.tensors.get(f"{self.kind}.widths")) is None:
            raise KvqError(f"{self.where('widths')} is missing")
        shape = tensor.spec.shape
        rows = tensor.numbers.tolist() if len(shape) == 2 and shape[0] == groups else []
        profile = Profile(tuple(tuple(filter(None, row)) for row in rows), f"{self.kind}.deviation" in self.tensors)
        if not rows or not all(1 <= len(row) <= most and fields.fits(row) for row in profile.widths):
            raise KvqError(
                f"{self.where('widths')} must be bits of 1 to {most} fields that fit into whole bytes, for each of "
                f"{groups} transforms"
            )
        if profile.rows != rows:
            raise KvqError(f"{self.where('widths')} must be descending, with a transform that has all of the fields")
        return profile

    def check(self, choice: Sequence[Any], *, alone: bool) -> None:
        """Check that deviations are not negative, and that the code of 0 is one of its component's codes."""
        profile = Profile(*choice)
        for name in ("std", "deviation") if profile.gain else ("std",):
            self.check_not_negative(name)
        center, largest = self.get("center"), 2.0 ** np.repeat(profile.rows, fields.FIELD, axis=1) - 1
        if (center < 0).any() or (center > largest).any():
            raise KvqError(f"{self.where('center')} has numbers that are not between the codes of its components")
        if alone:
            most = self.spec.stream_bytes(self.kind, self.shape)
            check_bytes(self.nbytes(choice), most, f"{self.prefix}{self.kind}.widths are")

    def nbytes(self, choice: Sequence[Any]) -> int:
        """Bytes of a packed token of all groups."""
        return Profile(*choice).nbytes

    def error_form(self, choice: Sequence[Any]) -> Form:
        nbytes = self.nbytes(choice)
        return {"bytes": Whole(nbytes, nbytes), "effective_tokens": float, "chosen": {**self.entry, "loss": float}}


class JoinedCheck(StreamCheck):
    """A layer's rows of the transform of all layers, and the groups of its components."""

    spec: JoinedSpec

    def choice(self) -> list[Group]:
        """Read the components and bits of each group."""
        if (tensor := self.tensors.get(f"{self.kind}.groups")) is None:
            raise KvqError(f"{self.where('groups')} is missing")
        rows = tensor.numbers.tolist() if len(tensor.spec.shape) == 2 and tensor.spec.shape[1] == 2 else []
        if not rows or not all(size in SIZES and bits in BITS for size, bits in rows):
            raise KvqError(f"{self.where('groups')} must be sizes {SIZES} and bits {BITS} of groups")
        groups = [Group(*row) for row in rows]
        if sum(group.components for group in groups) > (most := self.spec.numbers(self.shape)):
            raise KvqError(f"{self.where('groups')} have more than the {most} components of all layers")
        return groups

    def check(self, choice: Sequence[Any], *, alone: bool) -> None:
        self.check_not_negative("spread")
        most = 4 * self.spec.words(self.shape)
        check_bytes(4 * sum(group.words for group in choice), most, f"{self.prefix}{self.kind}.groups are")

    def error_form(self, choice: Sequence[Any]) -> Form:
        nbytes = 4 * sum(group.words for group in choice)
        return {"bytes": Whole(nbytes, nbytes), "effective_tokens": float, "chosen": {**self.entry, "loss": float}}


#: By the spec of the stream.
STREAMS: dict[type[StreamSpec], type[StreamCheck]] = {
    Uncalibrated: UncalibratedCheck,
    CalibrationSpec: CodebookCheck,
    TransformSpec: TransformCheck,
    JoinedSpec: JoinedCheck,
}


def check_rotation(kind: str, tensors: Mapping[str, StoredTensor], prefix: str) -> None:
    """Raise KvqError unless a stream's `rotation` is orthogonal and no number of its `spread` negative."""
    rotation = tensors[f"{kind}.rotation"].exact
    undone, identity = rotation @ rotation.swapaxes(1, 2), np.eye(rotation.shape[1])
    if not np.allclose(undone, identity, rtol=0, atol=_INVERSE_TOLERANCE):
        raise KvqError(f"tensor {prefix}{kind}.rotation is not orthogonal")
    if (tensors[f"{kind}.spread"].exact < 0).any():
        raise KvqError(f"tensor {prefix}{kind}.spread has negative numbers")


def check_bytes(nbytes: int, most: int, what: str) -> None:
    """Raise KvqError where a packed token has more bytes than the method allows."""
    if nbytes > most:
        raise KvqError(f"{what} {nbytes} bytes for a token, above the {most} of the method")
