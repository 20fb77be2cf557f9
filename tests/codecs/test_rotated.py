"""What rotated codecs hold; test_every_codec.py and test_hadamard.py compare what they decode."""

import torch
from held_tensors import held_tensors

from kvq_cli.codecs.rotated import MatrixRotation, RotatedCodec
from kvq_cli.codecs.uniform import UniformCodec

HEADS, DIM = 3, 16


def test_constants_are_the_tensors_held():
    noise = torch.Generator().manual_seed(0)
    matrix = torch.linalg.qr(torch.randn(HEADS, DIM, DIM, generator=noise)).Q.contiguous()
    codec = RotatedCodec(UniformCodec(2, "token", DIM, DIM), MatrixRotation(matrix, torch.ones(HEADS, DIM)))
    found, counted = held_tensors(codec), codec.constants().values()
    assert sum(found.values()) == sum(x.nbytes for x in counted)
    assert {x.untyped_storage().data_ptr() for x in counted} == set(found)
