"""Plans of InnerQ: groups along the inner dimension, windows, cost; its modes on real keys and values."""

import pytest
import torch
from pairwise import parametrize_pairwise

from kvq_cli.codecs.base import Packed, Prompt, PromptCodec
from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build
from kvq_cli.methods.window import Window

MODES = ("symmetric", "asymmetric", "hybrid", "hybrid_prefill")


def codec_of(stream, x: torch.Tensor):
    """The stream's codec for a prompt of the keys or values `x`."""
    return stream.codec.with_state(stream.codec.fit(Prompt(x, x, x))) if is_fit(stream) else stream.codec


def is_fit(stream) -> bool:
    return isinstance(stream.codec, PromptCodec)


def packed_prompt(stream, x: torch.Tensor) -> Packed:
    return stream.codec.encode_prompt(x, Prompt(x, x, x), 0)[0] if is_fit(stream) else stream.codec.encode(x)


def error(stream, x: torch.Tensor) -> torch.Tensor:
    return codec_of(stream, x).decode(packed_prompt(stream, x), torch.float32) - x.float()


def bits_per_number(stream, x: torch.Tensor) -> float:
    return packed_prompt(stream, x).nbytes * 8 / x.numel()


def test_windows_and_sources(shape):
    plan = build("innerq").plan(0, shape, {})
    assert (plan.keys.source, plan.keys.window) == ("post_rope", Window(32, 96, 1))
    assert (plan.values.source, plan.values.window) == ("value", Window(32, 96, 32))
    plan = build("innerq", sinks=4, recent=0, group=16).plan(0, shape, {})
    assert (plan.keys.window, plan.values.window) == (Window(4, 0, 1), Window(4, 0, 16))


@parametrize_pairwise({"head_dim": [64, 80, 96, 128, 256], "mode": MODES, "bits": [1, 2, 3, 4, 8]})
def test_cost_at_every_head_dim(shape_of, bits, mode, head_dim):
    """Codes, one word of `group` bits for signs or zero-point, a 16-bit scale, whose sign is the choice of mode."""
    shape = shape_of(head_dim=head_dim, dtype=torch.bfloat16)
    group = 16 if head_dim == 80 else 32
    plan, x = build("innerq", bits=bits, mode=mode, group=group).plan(0, shape, {}), torch.randn(1, 2, 64, head_dim)
    padding = {1: 16, 3: 16}.get(bits, 0) / 80 if head_dim == 80 else 0  # 80 numbers do not fill words of 1 bit
    for stream in (plan.keys, plan.values):
        assert bits_per_number(stream, x.bfloat16()) == pytest.approx(bits + 1 + 16 / group + padding)


def test_sign_inside_saves_the_word_of_sign_bits(shape):
    x = torch.randn(1, 2, 64, 64).half()
    for mode, expected in (("symmetric", 2.5), ("asymmetric", 3.0), ("hybrid", 2.5)):
        plan = build("innerq", mode=mode, sign="inside").plan(0, shape, {})
        assert bits_per_number(plan.keys, x) == bits_per_number(plan.values, x) == expected


def test_a_hybrid_with_the_sign_inside_has_a_bit_less_beside_the_word(shape):
    """Asymmetric groups, too: the word holds their zero-point."""
    inside, extra = (build("innerq", bits=b, sign=s).plan(0, shape, {}) for b, s in ((3, "inside"), (2, "extra")))
    x = torch.randn(1, 2, 64, 64).half()
    for one, other in ((inside.keys, extra.keys), (inside.values, extra.values)):
        assert torch.equal(error(one, x), error(other, x))
    assert build("innerq", bits=3, sign="inside").nominal_bits == 3


def test_keys_share_a_scale_over_channels_and_values_over_tokens(shape):
    """A large token does not harm the other tokens' keys; a large channel does not harm the other channels' values."""
    plan = build("innerq", bits=4).plan(0, shape, {})
    x = torch.rand(1, 2, 128, 64) + 0.5
    keys, values = x.clone(), x.clone()
    keys[:, :, 7] *= 10
    values[..., 5] *= 1000
    codec = codec_of(plan.keys, x)
    spoiled = codec.decode(codec.encode(keys), torch.float32) - keys
    assert spoiled[:, :, 8:].abs().max() < 0.1 < spoiled[:, :, 7].abs().max()
    assert error(plan.values, values)[..., 6:].abs().max() < 0.1


@pytest.mark.parametrize("kind", ["k", "v"])
def test_error_by_mode_and_bits_on_real_keys_and_values(shape_of, captured, kind):
    """Hybrid is the best mode in every group; hybrid_prefill equals hybrid in the prompt; more bits lower the error."""
    shape, x = shape_of(dtype=torch.bfloat16), captured[kind].x[0].transpose(0, 1)[None, :, :320]
    actual = {}
    for bits in (1, 2, 3, 4, 8):
        for mode in MODES:
            plan = build("innerq", bits=bits, mode=mode, norm=False).plan(0, shape, {})
            stream = plan.keys if kind == "k" else plan.values
            squares = error(stream, x).double().square()
            groups = squares.unflatten(3, (-1, 32)) if kind == "k" else squares.unflatten(2, (-1, 32))
            actual[bits, mode] = groups.sum(dim=4 if kind == "k" else 3)
        best = torch.minimum(actual[bits, "symmetric"], actual[bits, "asymmetric"])
        assert (actual[bits, "hybrid"] <= best * 1.001 + 1e-12).all()
        assert torch.equal(actual[bits, "hybrid"], actual[bits, "hybrid_prefill"])
    for mode in MODES:
        errors = [actual[bits, mode].sum().item() for bits in (1, 2, 3, 4, 8)]
        assert all(worse > 2 * better for worse, better in zip(errors, errors[1:], strict=False)), (mode, errors)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 1, "sign": "inside"}, "bits=1 in mode=hybrid; use sign=extra, mode=asymmetric or 2 bits"),
        ({"bits": 8, "sign": "inside"}, "7 bits beside the sign at bits=8 in mode=hybrid, which cannot be packed"),
        ({"group": 8}, r"group=8 is not one of 16, 32, 64 \(their sign bits fill one word\)"),
        ({"mode": "both"}, "mode=both is not one of symmetric, hybrid_prefill, hybrid, asymmetric"),
        ({"bits": 5}, "bits=5 is not one of 1, 2, 3, 4, 8"),
        ({"sinks": -1}, "sinks=-1 must be at least 0"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        build("innerq", **options)


def test_group_that_does_not_divide_head_dim_names_valid_groups(shape_of):
    for mode in MODES:
        with pytest.raises(UsageError, match="group=32 does not divide head_dim=80; use 16$"):
            build("innerq", mode=mode).plan(0, shape_of(head_dim=80), {})
