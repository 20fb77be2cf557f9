"""Plans of KLT: sources, windows, cost, sizes, refusals; its options."""

import pytest
import torch
from kvq_kernels.fields import fits, rate
from random_transforms import random_transform

from kvq_cli.errors import KvqError, UsageError
from kvq_cli.methods.registry import build, parse
from kvq_cli.methods.transform_specs import Profile, even_widths
from kvq_cli.methods.window import Window
from kvq_cli.paths import artifact_folder


@pytest.mark.parametrize("bits", [1, 1.5, 2, 2.5, 3, 4])
@pytest.mark.parametrize("joined", [True, False])
def test_sources_windows_and_cost(bits, joined, shape, tensors_for):
    method = build("klt", bits=bits, join_keys=joined, join_values=joined, recent=16)
    spec = method.calibration(shape)
    plan = method.plan(0, shape, tensors_for(spec, shape, []))
    assert (plan.keys.source, plan.values.source) == ("pre_rope", "value")
    assert plan.keys.window == plan.values.window == Window(8, 16, 16)
    assert plan.keys.codec.joined == plan.values.codec.joined == joined
    x = torch.randn(2, shape.kv_heads, 32, shape.head_dim)
    for kind, stream in (("k", plan.keys), ("v", plan.values)):
        packed = stream.codec.encode(x)
        assert 8 * packed.nbytes / x.numel() == stream.codec.nominal_bits <= bits
        assert packed.nbytes == 2 * 32 * spec.first_choice(kind, shape).nbytes
        assert stream.codec.encode(x[..., :16, :]).parts["gain"].tensor.shape[1] == spec.groups(kind, shape)[0]
    assert method.nominal_bits == bits


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("bits", [1, 1.5, 2, 2.5, 3, 4])
def test_even_widths_stay_within_the_budget_and_waste_less_than_a_byte_a_lane_per_group(bits, head_dim, shape_of):
    """Of all layers together, for each of keys and values."""
    shape = shape_of(3, 2, head_dim)
    spec = build("klt", bits=bits, join_values=True).calibration(shape)
    used = {"k": 0, "v": 0}
    for layer in range(shape.layers):
        for kind, profile in spec.first_choices(shape, layer).items():
            assert all(map(fits, profile.widths)) and profile.components <= spec.groups(kind, shape)[1]
            used[kind] += profile.nbytes
    for kind, nbytes in used.items():
        assert spec.byte_budget(shape) / 2 - 4 * spec.groups(kind, shape)[0] < nbytes <= spec.byte_budget(shape) / 2
    assert spec.byte_budget(shape) == int(bits * 3 * 2 * 2 * head_dim / 8)


def test_bytes_of_profiles():
    assert Profile(((4, 4, 3, 3, 3, 2, 2, 2, 2, 2, 2, 1),), gain=True).nbytes == 33
    profile = Profile(((1,), (4, 3, 2)), gain=False)
    assert (profile.nbytes, profile.components, profile.rows) == (4 + 12, 24, [[1, 0, 0], [4, 3, 2]])
    assert even_widths(4, 64) == (2,) * 8
    for width in (8, 40, 96, 192):
        for lane_bytes in range(1, width // 4 + 1):
            widths = even_widths(lane_bytes, width)
            assert fits(widths) and rate(widths) == lane_bytes and 8 * len(widths) <= width
        assert even_widths(width, width) == (8,) * (width // 8)


def test_heads_have_a_codec_for_each_pair_of_widths(shape_of):
    """Keys and values have the same lists of heads, since a kernel is launched for each; a common transform has one."""
    shape, noise = shape_of(1, 4, 16), torch.Generator().manual_seed(0)
    rows = {"k": ((4, 2), (3,), (4, 2), (3,)), "v": ((2, 2), (2, 2), (2, 2), (5, 1))}
    streams = {kind: random_transform(widths, 4, 16, noise) for kind, widths in rows.items()}
    tensors = {f"{kind}.{name}": x for kind, stream in streams.items() for name, x in stream.items()}
    plan = build("klt").plan(0, shape, tensors)
    for kind, stream in (("k", plan.keys), ("v", plan.values)):
        members = stream.codec.members.values()
        assert [heads for _, heads in members] == [(0, 2), (1,), (3,)]
        assert [codec.widths for codec, _ in members] == [rows[kind][heads[0]] for _, heads in members]
    alone = build("klt").stream_plan("v", 0, shape, tensors).codec
    assert [heads for _, heads in alone.members.values()] == [(0, 1, 2), (3,)]
    x = torch.randn(2, 4, 48, 16, generator=noise)
    for codec in (plan.keys.codec, alone):
        packed = codec.encode(x)
        assert 8 * packed.nbytes / x.numel() == pytest.approx(codec.nominal_bits)
        decoded = codec.decode(packed, torch.float64)
        for index, (member, heads) in enumerate(codec.members.values()):
            own = member.encode(x[:, list(heads)])
            assert all(torch.equal(packed.parts[f"{index}.{name}"].tensor, y.tensor) for name, y in own.parts.items())
            assert torch.equal(decoded[:, list(heads)], member.decode(own, torch.float64))
        q, weights = torch.randn(2, 4, 3, 16, generator=noise), torch.rand(2, 4, 3, 48, generator=noise)
        close = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(codec.products(q, packed).double(), q.double() @ decoded.mT, **close)
        torch.testing.assert_close(codec.weighted_sum(weights, packed).double(), weights.double() @ decoded, **close)
        torch.testing.assert_close(codec.decode_by_channel(packed).double(), decoded.mT, **close)
    common = random_transform((4, 2), 1, 64, noise)
    tensors |= {f"k.{name}": x for name, x in common.items()}
    plan = build("klt", join_keys=True).plan(0, shape, tensors)
    assert plan.keys.codec.joined and len(plan.values.codec.members) == 2


def test_heads_and_bits_that_are_too_small_are_refused(shape_of):
    build("klt", bits=5).calibration(shape_of(2, 2, 8)).check(shape_of(2, 2, 8))
    with pytest.raises(UsageError, match=r"bits=2 are 8 bytes .* need 20: set bits=5 or more, or have fewer"):
        build("klt", bits=2).calibration(shape_of(1, 2, 8)).check(shape_of(1, 2, 8))
    build("klt", bits=2.5, join_keys=True, join_values=True).calibration(shape_of(1, 2, 8)).check(shape_of(1, 2, 8))
    with pytest.raises(UsageError, match="head_dim=4 is below 8"):
        build("klt", bits=8).calibration(shape_of(2, 2, 4)).check(shape_of(2, 2, 4))


def test_tokens_are_packed_in_multiples_of_16(shape, tensors_for):
    with pytest.raises(UsageError, match="klt: buffer=8 must be at least 16"):
        build("klt", buffer=8)
    method = build("klt", buffer=24)
    with pytest.raises(UsageError, match="packing 24 tokens at a time cuts the codec's blocks of 16"):
        method.plan(0, shape, tensors_for(method.calibration(shape), shape, []))


def test_fractions_of_bits_are_parsed_and_name_folders():
    name, options = parse("klt-1.5bit:join_keys=on")
    assert (name, options) == ("klt", {"bits": 1.5, "join_keys": "on"})
    assert artifact_folder("reference", build(name, **options)).name == "klt-1.5bit-join-keys-on"
    assert artifact_folder("reference", build("klt", bits=2)).name == "klt-2bit"
    with pytest.raises(UsageError, match=r"klt: bits=8.5 must be at most 8"):
        build("klt", bits=8.5)
    with pytest.raises(UsageError, match=r"kivi: bits=1.5 is not a whole number"):
        build("kivi", bits=parse("kivi-1.5bit")[1]["bits"])


def test_missing_tensors_are_named(shape, tensors_for):
    method = build("klt")
    with pytest.raises(UsageError, match="klt needs an artifact"):
        method.plan(0, shape, {})
    tensors = tensors_for(method.calibration(shape), shape, [])
    del tensors["v.synthesis"]
    with pytest.raises(KvqError, match=r"no tensor layers.5.v.synthesis"):
        method.plan(5, shape, tensors)
