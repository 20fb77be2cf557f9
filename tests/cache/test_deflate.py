"""DEFLATE of tensors in files, which may come from anyone."""

import zlib

import pytest
import torch

from kvq_cli.cache.deflate import deflated, inflated
from kvq_cli.codecs.layout import spec_of
from kvq_cli.errors import KvqError

X = torch.randint(0, 4, (2, 1, 50, 3), dtype=torch.int32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.int32, torch.float16, torch.bfloat16])
def test_tensors_come_back(dtype):
    x = X.to(dtype)
    octets = deflated(x)
    assert octets.dtype == torch.uint8 and octets.numel() < x.nbytes / 2  # 2 bits of 16 or 32
    found = inflated(octets, spec_of(x), "codes")
    assert found.dtype == dtype and torch.equal(found, x)


def octets_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("octets", "says"),
    [
        (deflated(X)[:-5], "does not inflate to 1200 bytes"),
        (torch.cat([deflated(X), deflated(X)]), "does not inflate to 1200 bytes"),
        (octets_of(zlib.compress(bytes(1 << 24))), "does not inflate to 1200 bytes"),
        (octets_of(zlib.compress(bytes(1199))), "does not inflate to 1200 bytes"),
        (octets_of(bytes(40)), "is no DEFLATE data"),
    ],
    ids=["cut", "longer", "bomb", "short", "other"],
)
def test_other_bytes_are_refused(octets, says):
    with pytest.raises(KvqError, match=f"tensor codes {says}"):
        inflated(octets, spec_of(X), "codes")
