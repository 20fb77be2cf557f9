"""DEFLATE (RFC 1951, in zlib's form) of tensors in files."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from kvq_cli.codecs.layout import TensorSpec
from kvq_cli.errors import KvqError

#: What the names of compressed tensors end in.
SUFFIX = ".deflate"
LEVEL = 6


def deflated(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor on the CPU, compressed, uint8 `[bytes]`."""
    octets = bytearray(zlib.compress(tensor.flatten().view(torch.uint8).numpy().data, LEVEL))
    return torch.frombuffer(octets, dtype=torch.uint8)


def inflated(octets: Tensor, like: TensorSpec, name: str) -> Tensor:
    """The tensor of this shape and dtype of which `deflated` made `octets`. KvqError, naming it, for other bytes; at
    most the bytes of the tensor are inflated."""
    inflate = zlib.decompressobj()
    try:
        found = inflate.decompress(octets.numpy().tobytes(), like.nbytes + 1)
    except zlib.error as error:
        raise KvqError(f"tensor {name} is no DEFLATE data ({error})") from error
    if len(found) != like.nbytes or not inflate.eof or inflate.unused_data:
        raise KvqError(f"tensor {name} does not inflate to {like.nbytes} bytes")
    return torch.frombuffer(bytearray(found), dtype=getattr(torch, like.dtype)).view(like.shape)
