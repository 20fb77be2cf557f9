"""OSCAR's clipped groups against the equations of its kernels."""

import numpy as np
import pytest
import torch

from kvq_cli.codecs.clipped import ClippedCodec
from kvq_cli.codecs.uniform import UniformCodec

DIM, GROUP = 64, 32


@pytest.mark.parametrize(("ratio", "place"), [(0.96, 61), (0.92, 58), (0.5, 32), (1.0, 63)])
def test_decoded_numbers_are_those_of_the_equations(ratio, place):
    x = torch.randn(2, 3, 20, DIM, generator=torch.Generator().manual_seed(0))
    codec = ClippedCodec(UniformCodec(2, "token", GROUP, DIM), ratio)
    wide = x.double().numpy()
    limit = np.sort(np.abs(wide), axis=-1)[..., place : place + 1]
    groups = np.clip(wide, -limit, limit).reshape(2, 3, 20, -1, GROUP)
    least, most = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    zero, scale = (np.float16(side).astype(np.float64) for side in (least, (most - least) / 3))
    codes = np.clip(np.floor((groups - zero) / scale + 0.5), 0, 3)
    wanted = (codes * scale + zero).reshape(wide.shape)
    own = codec.decode(codec.encode(x), torch.float64).numpy()
    assert (np.abs(own - wanted) < 1e-5).mean() > 0.999  # codes halfway between two
    assert codec.encode(x).nbytes == UniformCodec(2, "token", GROUP, DIM).encode(x).nbytes


def test_all_magnitudes_are_kept_at_ratio_1():
    x = torch.randn(1, 2, 9, DIM, generator=torch.Generator().manual_seed(1))
    plain = UniformCodec(3, "token", DIM, DIM)
    packed, own = plain.encode(x), ClippedCodec(plain, 1.0).encode(x)
    assert all(torch.equal(part.tensor, own.parts[name].tensor) for name, part in packed.parts.items())
