"""Transform codes against a slow reference in 64 bits, their bits in memory, and sums against decoded numbers."""

import math

import numpy as np
import pytest
import torch
from held_tensors import held_tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from kvq_kernels.fields import fits, parts, places, rate
from random_transforms import random_transform

from kvq_cli.codecs.base import Packed, Part
from kvq_cli.codecs.transform import TransformCodec
from kvq_cli.methods.transform_specs import even_widths

HEADS, DIM = 3, 40
PROFILES = {"one field": (4,), "per head": (8, 5, 2, 1), "joined": (7, 6, 5, 4, 3, 3, 2, 2, 1, 1, 1, 1)}


def made(name: str, values: bool = False, gain: bool = True):
    """A codec and its tensors."""
    groups = 1 if name == "joined" else HEADS
    generator = torch.Generator().manual_seed(0)
    tensors = random_transform(PROFILES[name], groups, HEADS * DIM // groups, generator, gain)
    return TransformCodec(HEADS, tensors, values), tensors


each_codec = pytest.mark.parametrize(
    ("name", "values", "gain"), [(n, v, g) for n in PROFILES for v in (False, True) for g in (True, False)]
)


def numbers(tokens: int, batch: int = 2) -> torch.Tensor:
    """Tokens of very different sizes."""
    generator = torch.Generator().manual_seed(1)
    sizes = 2 ** (2 * torch.randn(batch, 1, tokens, 1, generator=generator))
    return torch.randn(batch, HEADS, tokens, DIM, generator=generator) * sizes


def by_hand(x: np.ndarray, tensors: dict) -> tuple[np.ndarray, list[int], np.ndarray]:
    """One token `[HEADS, DIM]`: its codes `[groups, components]`, gains' indices, and decoded numbers."""
    held = {key: tensor.double().numpy() for key, tensor in tensors.items()}
    codes, gains, out = [], [], []
    largest = 2.0 ** np.repeat(held["widths"][0], 8) - 1
    for group, channels in enumerate(x.reshape(len(held["mean"]), -1)):
        u = held["analysis"][group] @ (channels - held["mean"][group])
        gain = 1.0
        if "deviation" in held:
            z = np.abs(u / held["deviation"][group])
            size = max(math.sqrt(np.mean(z**2)), z[: len(z) // 2].max() / 4)
            gains.append(int(np.clip(round(16 * math.log2(size)) + 128, 0, 255)))
            gain = float(np.float16(2 ** ((gains[-1] - 128) / 16)))
        code = np.clip(np.round(u / gain + held["center"][group]), 0, largest)
        out.append(gain * held["synthesis"][group] @ (code - held["center"][group]) + held["mean"][group])
        codes.append(code)
    return np.stack(codes), gains, np.stack(out).reshape(HEADS, DIM)


def stored_codes(packed: Packed, widths: tuple[int, ...], values: bool) -> np.ndarray:
    """Codes `[B, G, T, components]`, read bit by bit as `kvq_kernels.fields` says."""
    sizes = parts(rate(widths))
    assert set(packed.parts) - {"gain"} == {part.name for part in sizes}
    words = [packed.parts[part.name].tensor.numpy().view(f"uint{part.bits}") for part in sizes]
    batch, groups = words[0].shape[:2]
    codes = np.zeros((batch, groups, packed.tokens, 8 * len(widths)), dtype=int)
    for field, (width, place) in enumerate(zip(widths, places(widths), strict=True)):
        for token in range(packed.tokens):
            for component in range(8):
                if values:
                    lane, half = (token // 16, token % 16 // 2, component), token % 2
                else:
                    lane, half = (token, component // 2), component % 2
                first = half * sizes[place.part].room + place.shift + place.offset
                word = words[place.part][(slice(None), slice(None), *lane, place.word)].astype(int)
                codes[:, :, token, 8 * field + component] = word >> first & (1 << width) - 1
    return codes


@each_codec
def test_codes_and_decoded_numbers_are_those_of_a_reference_in_64_bits(name, values, gain):
    codec, tensors = made(name, values, gain)
    x = numbers(32)
    packed = codec.encode(x)
    assert codec.nominal_bits == 8 * packed.nbytes / x.numel()
    codes, decoded = stored_codes(packed, PROFILES[name], values), codec.decode(packed, torch.float32)
    assert ("gain" in packed.parts) == gain
    same, tokens = 0, 0
    for row in range(2):
        for token in range(32):
            code, gains, expected = by_hand(x[row, :, token].double().numpy(), tensors)
            if gain and packed.parts["gain"].tensor[row, :, token].tolist() != gains:
                continue  # between two gains, either is right
            tokens += 1
            assert np.abs(codes[row, :, token] - code).max() <= 1
            if (codes[row, :, token] == code).all():
                assert np.abs(decoded[row, :, token].numpy() - expected).max() <= 1e-4 * np.abs(expected).max()
                same += 1
    assert tokens > 61 and same > 56


@each_codec
def test_codes_of_a_token_do_not_depend_on_others(name, values, gain):
    """Bit for bit, also for numbers far outside of the calibrated range."""
    codec, _ = made(name, values, gain)
    x = numbers(64)
    x[:, :, 5] *= 1e4
    whole = codec.encode(x)
    runs = [codec.encode(run) for run in x[1:].split(16, dim=2)]
    for key, part in whole.parts.items():
        assert torch.equal(torch.cat([run.parts[key].tensor for run in runs], dim=2), part.tensor[1:])
    alone = codec.encode(x[:1])
    assert all(torch.equal(alone.parts[key].tensor, part.tensor[:1]) for key, part in whole.parts.items())


@each_codec
def test_products_and_sums_are_those_of_decoded_numbers(name, values, gain):
    codec, _ = made(name, values, gain)
    packed = codec.encode(numbers(48))
    x = codec.decode(packed, torch.float64)
    generator = torch.Generator().manual_seed(2)
    weights = torch.rand(2, HEADS, 4, 48, generator=generator)
    queries = torch.randn(2, HEADS, 4, DIM, generator=generator)
    close = {"rtol": 1e-4, "atol": 2e-5 * x.abs().max().item()}
    assert codec.joined == (name == "joined")
    torch.testing.assert_close(codec.weighted_sum(weights, packed).double(), weights.double() @ x, **close)
    torch.testing.assert_close(codec.products(queries, packed).double(), queries.double() @ x.mT, **close)
    torch.testing.assert_close(codec.decode_by_channel(packed).double(), x.mT, **close)


@settings(max_examples=60, deadline=None)
@given(
    lane_bytes=st.integers(1, 20),
    values=st.booleans(),
    gain=st.booleans(),
    widths=st.lists(st.integers(1, 8), min_size=1, max_size=10),
)
def test_any_codes_of_any_profile_decode_to_what_their_bits_say(lane_bytes, values, gain, widths):
    """Random bits, also where no field is, of even profiles of rates 1 to 20 and of any other that fits."""
    profile = tuple(sorted(widths, reverse=True))
    if not fits(profile):
        profile = even_widths(lane_bytes, 80)
    noise = torch.Generator().manual_seed(lane_bytes)
    tensors = random_transform(profile, 2, 80, noise, gain)
    codec, tokens = TransformCodec(2, tensors, values), 16
    drawn = {}
    for key, part in codec.layout(2, 80, "float32").parts.items():
        room = torch.iinfo(getattr(torch, part.dtype))
        shape = (2, part.heads, tokens // part.unit, *part.entry)
        words = torch.randint(room.min, room.max + 1, shape, generator=noise).to(getattr(torch, part.dtype))
        drawn[key] = Part(words % 255 if key == "gain" else words, part.unit)
    packed = Packed(tokens, drawn)
    codes = torch.tensor(stored_codes(packed, profile, values)).double() - tensors["center"].double().unsqueeze(1)
    gains = torch.ones(2, 2, tokens).double()
    if gain:
        gains = (2 ** ((drawn["gain"].tensor.double() - 128) / 16)).half().double()
    expected = gains.unsqueeze(3) * (codes @ tensors["synthesis"].double().mT) + tensors["mean"].double().unsqueeze(1)
    decoded = codec.decode(packed, torch.float64)
    torch.testing.assert_close(decoded, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


def test_each_code_of_a_field_is_reached_and_read_back():
    """Components are codes of 0 to 255: each code decodes to itself."""
    codec, tensors = made("per head", values=True, gain=False)
    largest = 2 ** tensors["widths"][0].int().repeat_interleave(8) - 1
    code = torch.arange(256).view(-1, 1).clamp(max=largest).expand(HEADS, 256, len(largest))
    x = (code - tensors["center"].unsqueeze(1)) @ tensors["synthesis"].mT + tensors["mean"].unsqueeze(1)
    packed = codec.encode(x.unsqueeze(0))
    assert (stored_codes(packed, PROFILES["per head"], True)[0] == code.numpy()).all()


def test_gain_is_the_size_of_a_token():
    """Twice the components: 16 more; tokens of any size have a gain between the least and the greatest."""
    codec, tensors = made("per head")
    x = torch.randn(1, HEADS, 1, DIM, generator=torch.Generator().manual_seed(3))
    mean = tensors["mean"].view(1, HEADS, 1, DIM)
    sizes = torch.tensor([0.0, 2**-20, 0.125, 0.5, 1, 2, 4, 2.0**30]).view(1, 1, -1, 1)
    gain = codec.encode(mean + (x - mean) * sizes.repeat(1, 1, 2, 1)).parts["gain"].tensor[..., :8].int()
    assert (gain[..., 0] == 0).all() and (gain[..., 1] == 0).all()
    assert (gain[..., 3:7].diff(dim=-1) == 16).all() and ((gain[..., 4] - gain[..., 2]) == 48).all()
    assert (gain[..., 7] > gain[..., 6]).all()


@pytest.mark.parametrize(("component", "octaves"), [(0, math.log2(40 / 4)), (-1, None)])
def test_gain_reaches_the_largest_number_of_the_first_half(component, octaves):
    """A component of 40 deviations is not cut off where there are most bits; elsewhere it counts as one of many."""
    codec, tensors = made("per head")
    kept = tensors["deviation"].shape[1]
    z = torch.zeros(1, HEADS, 16, kept)
    z[..., 0, component] = 40
    u = z * tensors["deviation"].unsqueeze(1)
    x = tensors["mean"].unsqueeze(1) + u @ tensors["synthesis"].mT
    gain = codec.encode(x).parts["gain"].tensor[0, :, 0].float()
    expected = 16 * (math.log2(40 / kept**0.5) if octaves is None else max(octaves, math.log2(40 / kept**0.5))) + 128
    assert (gain - expected).abs().max() <= 1


def test_a_head_that_is_always_zero_stays_zero():
    tensors = made("per head")[1]
    for name in ("mean", "std", "analysis", "synthesis", "deviation"):
        tensors[name][1] = 0
    x = numbers(16)
    x[:, 1] = 0
    for values in (False, True):
        codec = TransformCodec(HEADS, tensors, values)
        packed = codec.encode(x)
        decoded = codec.decode(packed, torch.float32)
        assert decoded.isfinite().all() and (decoded[:, 1] == 0).all() and (decoded[:, 0] != 0).all()
        assert codec.encode(x + 1).parts["gain"].tensor[:, 1].eq(0).all()


def test_kernels_get_the_synthesis_of_the_artifact():
    codec, tensors = made("joined")
    assert torch.equal(codec.synthesis, tensors["synthesis"])
    assert codec.widths == PROFILES["joined"] and codec.has_gain


@each_codec
def test_constants_are_the_tensors_held(name, values, gain):
    codec, _ = made(name, values, gain)
    codec.decode(codec.encode(numbers(16)), torch.float32)
    found, counted = held_tensors(codec), codec.constants().values()
    assert sum(found.values()) == sum(x.nbytes for x in counted)
    assert {x.untyped_storage().data_ptr() for x in counted} <= set(found)
