"""Multimodal models over text: the logits and tokens of the model itself; images are refused."""

from __future__ import annotations

import pytest
import torch
import transformers
from model_matrix import PreRope, ready_method

from kvq_cli.attention.attach import attach
from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build

SIZES = {"vocab_size": 120, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXACT = [build("fp16"), PreRope(), build("xquant", bits=16, group=16)]
IMAGE = 110


def gemma3():
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    text = {**SIZES, "head_dim": 16, "sliding_window": 7, "layer_types": kinds}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, image_token_index=IMAGE)
    return random(transformers.Gemma3ForConditionalGeneration(config))


def qwen():
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**SIZES, "rope_parameters": rope}, vision_config=vision, image_token_id=IMAGE, video_token_id=111
    )
    return random(transformers.Qwen2_5_VLForConditionalGeneration(config))


def random(model):
    noise = torch.Generator().manual_seed(0)
    for weight in model.eval().requires_grad_(False).parameters():
        if weight.ndim > 1:
            weight.normal_(std=1.5 * weight.shape[-1] ** -0.5, generator=noise)
    return model


@pytest.fixture(scope="module", params=[gemma3, qwen])
def model(request):
    return request.param()


def prompt(pads: tuple[int, ...]):
    ids = torch.randint(3, 97, (len(pads), 44), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, count in enumerate(pads):
        mask[row, :count] = 0
    return ids, mask


@pytest.mark.parametrize("method", EXACT, ids=lambda method: method.name)
@pytest.mark.parametrize("pads", [(0,), (5, 0)], ids=str)
def test_text_gives_the_logits_of_the_model(model, method, pads):
    """Of a prompt, a chunk and single tokens."""
    ids, mask = prompt(pads)
    own = model(ids, attention_mask=mask).logits
    cuts = [0, 20, 37, *range(38, 45)]
    with attach(model, ready_method(model, method), prefill="compressed") as kv:
        cache = kv.new_cache()
        parts = [
            model(ids[:, a:b], attention_mask=mask[:, :b], past_key_values=cache).logits
            for a, b in zip(cuts, cuts[1:], strict=False)
        ]
    torch.testing.assert_close(torch.cat(parts, 1)[mask.bool()], own[mask.bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", EXACT[:2], ids=lambda method: method.name)
def test_generate_gives_the_tokens_of_the_model(model, method):
    ids, mask = prompt((5, 0))
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    own = model.generate(ids, **options)
    with attach(model, method) as kv:
        assert torch.equal(model.generate(ids, past_key_values=kv.new_cache(), **options), own)


def test_attention_in_both_directions_within_an_image_is_refused():
    model, (ids, mask) = gemma3(), prompt((0,))
    kinds = torch.zeros_like(ids)
    kinds[0, 3:7] = 1
    with attach(model, build("fp16")) as kv, pytest.raises(UsageError, match="masks attention in a way"):
        model(ids, attention_mask=mask, token_type_ids=kinds, past_key_values=kv.new_cache())


@pytest.mark.parametrize("axes", [3, 4])
def test_positions_within_an_image_are_refused(axes):
    model, (ids, mask) = qwen(), prompt((0,))
    positions = torch.arange(44).expand(axes, 1, 44).clone()
    positions[-1, 0, 20:] += 3
    with attach(model, build("fp16")) as kv, pytest.raises(UsageError, match="positions of images"):
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=kv.new_cache())
