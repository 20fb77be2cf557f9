"""Plans of SQuat: KIVI's with another codec for keys; errors on real keys."""

import pytest
import torch

from kvq_cli.codecs.base import Prompt
from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build
from kvq_cli.methods.window import Window


@pytest.mark.parametrize("pre_rope", [False, True])
def test_windows_and_values_equal_those_of_kivi(shape, pre_rope):
    for options in ({}, {"residual": 64, "sinks": 4}, {"sinks": 32, "recent": 96, "group": 16}):
        own = build("squat", pre_rope=pre_rope, **options).plan(0, shape, {})
        kivi = build("kivi", pre_rope=pre_rope, **{"residual": 32, **options}).plan(0, shape, {})
        assert (own.keys.source, own.keys.window) == (kivi.keys.source, kivi.keys.window)
        assert (own.values.window, type(own.values.codec)) == (kivi.values.window, type(kivi.values.codec))
    assert build("squat").plan(0, shape, {}).keys.window == Window(0, 0, 32)


@pytest.mark.parametrize(("head_dim", "block"), [(64, 32), (80, 40), (96, 48), (128, 64), (256, 64)])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_strength_0_equals_kivi_bit_for_bit(shape_of, bits, head_dim, block):
    shape, x = shape_of(head_dim=head_dim, dtype=torch.bfloat16), torch.randn(2, 2, 64, head_dim).bfloat16()
    plans = [
        build(name, bits=bits, group=16, **o).plan(0, shape, {})
        for name, o in (("squat", {"strength": 0}), ("kivi", {}))
    ]
    squat, kivi = (plan.keys.codec for plan in plans)
    state = squat.fit(Prompt(x, x, torch.randn(2, 4, 64, head_dim).bfloat16()))
    assert state["gain"].shape == (2, 2, head_dim // block - 1, 5, 5)
    packed = squat.with_state(state).encode(x)
    for name, part in kivi.encode(x).parts.items():
        assert torch.equal(packed.parts[name].tensor, part.tensor), name


@pytest.mark.parametrize("seed", [0, 1])
def test_score_errors_are_smaller_than_those_of_kivi(shape_of, captured, seed):
    """For later queries in the subspace of the prompt's queries, on real keys."""
    keys = captured["k"].x[seed].transpose(0, 1)[None, :, :320]
    noise = torch.Generator().manual_seed(seed)
    basis = torch.randn(5, 64, generator=noise)
    prompt, later = (torch.randn(1, 4, 320, 5, generator=noise) @ basis for _ in range(2))
    shape, errors = shape_of(dtype=torch.bfloat16), {}
    for strength in (0.0, 1e-5, 1e-3):
        codec = build("squat", strength=strength).plan(0, shape, {}).keys.codec
        codec = codec.with_state(codec.fit(Prompt(keys, keys, prompt.bfloat16())))
        lost = codec.decode(codec.encode(keys), torch.float32) - keys.float()
        errors[strength] = (later.unflatten(1, (2, 2)).flatten(2, 3) @ lost.mT).square().mean().item()
    assert errors[1e-3] < 0.7 * errors[0.0] and errors[1e-5] < errors[0.0], errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"residual": 48}, "squat: residual=48 is not a multiple of group=32"),
        ({"group": 2}, "squat: group=2 takes 18 bits"),
        ({"rank": 0}, "squat: rank=0 must be at least 1"),
        ({"strength": -1.0}, "strength=-1.0 must be at least 0"),
        ({"bits": 6}, "bits=6 is not one of 1, 2, 3, 4, 8"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        build("squat", **options)


def test_block_without_later_channels_is_refused(shape):
    with pytest.raises(UsageError, match="block=64: at head_dim=64 no channels are left"):
        build("squat", block=64).plan(0, shape, {})
