"""Requirements of every method (METHODS x bits x kv heads x head_dim).

Streams of random numbers with random codebooks: what is stored depends on a row's tokens alone, bit for bit, and the
bytes reported are those of the tensors. The model's side of it is at the end, with one head_dim for each case.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from pairwise import parametrize_pairwise
from tiers import first_of_each
from transformers import LlamaConfig, LlamaForCausalLM

from kvq_cli import attach
from kvq_cli.artifact import Artifact, fingerprint
from kvq_cli.cache.prompt_stream import PromptStream, new_stream
from kvq_cli.cache.rows import Rows
from kvq_cli.cache.stream import Stream
from kvq_cli.codecs.base import Prompt
from kvq_cli.methods.base import Method
from kvq_cli.methods.registry import build, has_option, method_class, to_config

METHODS = [
    *(("kivi", {"bits": bits, "group": 16, "sinks": 3, "recent": 5}) for bits in (1, 2, 3, 4, 8)),
    ("kivi", {"bits": 4, "group": 16, "residual": 16, "rotation": "hadamard"}),
    ("kivi", {"group": 16, "recent": 5, "rotation": "hadamard", "key_axis": "token", "pre_rope": True}),
    *(("turboquant", {"bits": bits, "sinks": 3}) for bits in (1, 2, 3, 4)),
    ("turboquant", {"bits": 3, "values": "lloyd_max", "flip": True, "recent": 5, "buffer": 4}),
    *(("kvarn", {"bits": bits, "group": 16, "sinks": 3, "recent": 5}) for bits in (1, 2, 3, 4, 8)),
    ("kvarn", {"bits": 4, "value_bits": 2, "group": 8, "sinks": 0, "iterations": 4}),
    *(("oscar-omni", {"bits": bits, "group": 16, "sinks": 3, "recent": 5}) for bits in (1, 2, 3, 4, 8)),
    ("oscar-omni", {"group": 16, "residual": 16, "pre_rope": True}),
    *(("oscar", {"bits": bits, "sinks": 3, "recent": 5}) for bits in (1, 2, 3, 4, 8)),
    ("oscar", {"group": 16, "key_clip": 1.0, "sinks": 3, "recent": 0, "buffer": 4}),
    *(("llama-cpp", {"bits": bits, "sinks": 3}) for bits in (4, 8)),
    *(("per-token-head", {"bits": bits, "recent": 5, "buffer": 4}) for bits in (4, 8)),
    *(("quanto", {"bits": bits, "group": 16, "sinks": 3, "buffer": 4}) for bits in (2, 4)),
    *(("kvquant", {"bits": bits, "recent": 3}) for bits in (1, 2, 3, 4, 8)),
    ("kvquant", {"outliers": 0.0}),
    *(("channelkv", {"bits": bits, "recent": 3}) for bits in (1, 2, 4)),
    ("channelkv", {"outliers": 0.01}),
    *(("temporalkv", {"bits": bits, "recent": 3}) for bits in (1, 2, 4)),
    ("temporalkv", {"outliers": 0.01}),
    ("channelkv", {"rotation": "hadamard", "outliers": 0.01}),
    ("temporalkv", {"rotation": "opq", "recent": 3}),
    ("channelkv", {"entries": 65536, "recent": 3}),
    ("temporalkv", {"entries": 65536, "bits": 4, "hybrid": "head"}),
    *(("innerq", {"bits": bits, "group": 16, "sinks": 3, "recent": 5}) for bits in (1, 2, 3, 4, 8)),
    *(
        ("innerq", {"mode": mode, "sign": sign, "group": 16, "sinks": 3, "recent": 5})
        for mode, sign in (("symmetric", "extra"), ("asymmetric", "extra"), ("hybrid", "inside"))
    ),
    ("innerq", {"mode": "hybrid_prefill", "norm": False, "group": 16, "sinks": 3, "recent": 5}),
    *(("squat", {"bits": bits, "group": 16, "sinks": 3, "recent": 5}) for bits in (1, 2, 3, 4, 8)),
    ("squat", {"residual": 16, "group": 16, "pre_rope": True}),
    *(("klt", {"bits": bits, "recent": 3}) for bits in (1, 1.5, 4)),
    ("klt", {"bits": 3, "buffer": 32, "join_keys": True, "recent": 0}),
    ("klt", {"join_values": True, "recent": 0}),
    ("mixed", {"bits": 3, "keys": "klt-1.5bit", "values": "temporalkv-4bit", "recent": 3}),
    *(("kvtc", {"bits": bits, "sinks": 3, "recent": 5, "buffer": 4}) for bits in (1, 1.5, 2, 4, 8, 16)),
]
HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1)}
HEAD_DIMS = (64, 80, 96, 128)
TOKENS = 56  # of the shorter row after 8 sinks and 3 recent ones one block of 32 outliers, and a rest
#: Columns of the first pass. Methods to which it matters which tokens were the prompt are compared after the same one.
FIRST, FROZEN = 21, ("innerq", "squat")

IDS = ["-".join([n, *(f"{k}={v}" for k, v in o.items())]) for n, o in METHODS]


def streams(method: Method, shape, tensors_for) -> list[Stream]:
    """New streams for the keys and the values of a layer."""
    tensors = tensors_for(method.calibration(shape), shape, [0] * shape.kv_heads) if method.calibrates else {}
    plan = method.plan(0, shape, tensors)
    return [new_stream(plan.keys), new_stream(plan.values)]


def feed(stream: Stream, x: torch.Tensor, chunks: list[int], pads: tuple[int, ...] | None = None) -> Stream:
    """Append the columns of `x` in chunks; `pads` of each row are padding on the left. The queries are the keys."""
    rows, past, mask = Rows(), 0, None
    if pads is not None:
        mask = torch.tensor([[0] * count + [1] * (x.shape[2] - count) for count in pads])
    for chunk in chunks:
        seen = None if mask is None else mask[:, : past + chunk]
        prompts = {}
        new, groups = x[:, :, past : past + chunk], rows.begin(past, chunk, x.shape[0], seen).row_spans
        for group in groups:
            if isinstance(stream, PromptStream) and group.past == 0 and group.tokens:
                prompts[group.rows.start] = Prompt(*[new[group.rows, :, group.pads :]] * 3)
        if prompts:
            stream.announce(groups, prompts, {})
        stream.append(new, groups)
        past += chunk
    return stream


def state(stream: Stream, row: int) -> list[torch.Tensor]:
    """The tensors of a row: full-precision tokens, then packed parts."""
    rows, tokens = slice(row, row + 1), stream.lengths[row]
    held = [x for _, _, x in stream.exact(rows, tokens, 0, tokens, size=1)]
    for _, _, packed in stream.packed(rows, tokens, 0, tokens, 1 << 30):
        held += [packed.parts[name].tensor for name in sorted(packed.parts)]
    return held


def assert_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert len(a) == len(b)
    assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@parametrize_pairwise({"head_dim": HEAD_DIMS, "heads": HEADS, "name, options": METHODS})
def test_stored_bits_depend_only_on_the_tokens_of_a_row(name, options, heads, head_dim, shape_of, tensors_for):
    shape = shape_of(kv_heads=HEADS[heads][1], head_dim=head_dim)
    x = torch.randn(2, shape.kv_heads, TOKENS, head_dim, generator=torch.Generator().manual_seed(0)).half()
    method, pads = build(name, **options), (11, 0)
    made = zip(*(streams(method, shape, tensors_for) for _ in range(3)), strict=True)
    for whole, streamed, alone in made:
        feed(whole, x, [FIRST, TOKENS - FIRST] if name in FROZEN else [TOKENS], pads)
        feed(streamed, x, [*([FIRST] if name in FROZEN else [1, FIRST - 1]), 1, 1, TOKENS - FIRST - 2], pads)
        feed(alone, x[:1, :, pads[0] :], [FIRST - pads[0], TOKENS - FIRST])
        assert whole.packed_tokens > 0
        for row in range(2):
            assert_same(state(whole, row), state(streamed, row))
        assert_same(state(whole, 0), state(alone, 0))
        own = [
            *(whole.state.values() if isinstance(whole, PromptStream) else ()),
            *(t for row in range(2) for t in state(whole, row)),
        ]
        parts = whole.bytes_by_part()
        assert sum(parts.values()) - parts["unused"] == sum(t.numel() * t.element_size() for t in own)
        for row, count in enumerate(pads):
            read = whole.read(row)
            assert read.shape == (1, shape.kv_heads, TOKENS - count, head_dim) and read.isfinite().all()
            assert torch.equal(read[:, :, 0], x[row : row + 1, :, count].float()) == (whole.window.sinks > 0)


def model_of(heads: str, head_dim: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    query_heads, kv_heads = HEADS[heads]
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=query_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
    return model


def ready(method: Method, model, shape, tensors_for) -> Method | Artifact:
    """The method, or an artifact with random codebooks, for `attach`."""
    if not method.calibrates:
        return method
    spec, layers = method.calibration(shape), range(shape.layers)
    tensors = {
        f"layers.{i}.{key}": tensor
        for i in layers
        for key, tensor in tensors_for(spec, shape, [0] * shape.kv_heads, seed=i).items()
    }
    made_for = {"name": "tiny", "fingerprint": fingerprint(model).to_dict()}
    return Artifact({"method": to_config(method), "model": made_for}, tensors, Path("nowhere"))


def first_moved_tokens(first, second) -> int:
    """Tokens of row 0 that differ in the first stream that differs; later streams follow from it."""
    for one, other in zip(first.layers, second.layers, strict=True):
        for a, b in zip(one.streams, other.streams, strict=True):
            moved = ((a.read(0) - b.read(0)).abs() > 1e-4).movedim(-2, 0).flatten(1).any(1)
            if moved.any():
                return int(moved.sum())
    return 0


def first_moved_alone(first, second, error: torch.Tensor) -> bool:
    """Whether row 0's logits are alike up to the first token that differs, and that one by no more than a code: one of
    all layers together moves the inputs of all, so that codes of later tokens follow."""
    pairs = [(a.read(0), b.read(0)) for one, other in zip(first.layers, second.layers, strict=True)
             for a, b in zip(one.streams, other.streams, strict=True)]  # fmt: skip
    moved = torch.stack([(a - b).abs().movedim(-2, 0).flatten(1).amax(1) / a.abs().max() for a, b in pairs]).amax(0)
    token = int((moved > 1e-5).nonzero()[0])
    return bool(moved[token] < 0.01) and bool((error[:, : token + 1] < 1e-4).all())


CASES = list(zip(METHODS, itertools.cycle(itertools.product(HEADS, HEAD_DIMS)), strict=False))


@pytest.mark.parametrize(
    ("method", "kind"),
    # At model level one case of each method; codecs and streams have them all.
    first_of_each(CASES, [f"{m[0]}-{i}-{k[0]}-{k[1]}" for i, (m, k) in enumerate(CASES)]),
)
def test_padded_batch_equals_single_rows_token_by_token(method, kind, shape_of, tensors_for):
    model, built = model_of(*kind), build(method[0], **method[1])
    shape = shape_of(2, HEADS[kind[0]][1], kind[1], torch.float32)
    ids = torch.randint(3, 97, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    with attach(model, ready(built, model, shape, tensors_for), prefill="compressed") as kv:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache, singles, both = kv.new_cache(), [], []
        for begin, end in ((0, FIRST), (FIRST, TOKENS)):
            own = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
            both.append(model(ids[:, begin:end], past_key_values=cache, **own).logits)
        padded, cache, batch = cache, kv.new_cache(), torch.cat(both, dim=1)
        for begin, end in ((11, FIRST), (FIRST, 40), (40, 41), (41, TOKENS)):
            singles.append(model(ids[:1, begin:end], past_key_values=cache).logits)
        assert cache.report().compressed > 0
    error = (batch[:1, 11:] - torch.cat(singles, dim=1)).abs()
    # Where rounding of the activations flips a code, one number moves: rare, and small. A code of klt is that of a
    # component, which moves all numbers of one token.
    if error.quantile(0.9) >= 1e-3:
        joined = method[0] == "kvtc"
        assert first_moved_alone(padded, cache, error) if joined else first_moved_tokens(padded, cache) == 1
    assert error.max() < 0.1 * batch.abs().max()
    lossless = model(ids, attention_mask=mask, position_ids=positions).logits
    assert (batch - lossless)[mask.bool()].abs().max() > (0.01 if built.nominal_bits < 8 else 1e-4)


@pytest.mark.parametrize(("name", "options"), first_of_each(METHODS, IDS))
def test_prompts_of_one_token(name, options, shape_of, tensors_for):
    model, built = model_of("GQA", 64), build(name, **options)
    method = ready(built, model, shape_of(2, 2, 64, torch.float32), tensors_for)
    ids = torch.tensor([[5], [9]])
    with attach(model, method) as kv:
        mask, length = torch.ones_like(ids), {"min_new_tokens": TOKENS, "max_new_tokens": TOKENS, "do_sample": False}
        out = model.generate(ids, attention_mask=mask, past_key_values=kv.new_cache(), **length)
        assert out.shape == (2, 1 + TOKENS) and kv.report().compressed > 0


UNCALIBRATED = sorted({n for n, options in METHODS if options.get("bits") == 3 and not build(n).calibrates})


@pytest.mark.parametrize("name", UNCALIBRATED)
def test_errors_fall_as_bits_rise(name):
    """Of methods without calibration: random codebooks have no meaningful error."""
    model, ids = model_of("GQA", 64), torch.randint(3, 97, (1, 60), generator=torch.Generator().manual_seed(1))
    own, errors, group = model(ids).logits, [], {"group": 16} if has_option(name, "group") else {}
    choices = {field.name: field.metadata["choices"] for field in dataclasses.fields(method_class(name))}["bits"]
    for bits in sorted({2, 3, 4, 8} & set(choices)):
        with attach(model, build(name, bits=bits, sinks=2, recent=2, **group), prefill="compressed") as kv:
            errors.append((model(ids, past_key_values=kv.new_cache()).logits - own).square().mean().item())
    assert all(worse > 1.5 * better for worse, better in zip(errors, errors[1:], strict=False)), errors
