"""A rank's plan holds exactly what the plan of all heads holds of its heads."""

import pytest
import torch
from random_artifacts import random_parts, tiny_model
from tiers import fast

from kvq_cli.benchmarking.capacity import serving_layout
from kvq_cli.benchmarking.synthetic import artifact_tensors
from kvq_cli.codecs.transform import TransformCodec
from kvq_cli.codecs.wrapped import joins_heads
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.registry import build, build_parsed
from kvq_cli.models import model_shape
from kvq_cli.vllm.layout import cache_layout
from kvq_cli.vllm.shard import Shard

METHODS = (
    "fp16",
    "kivi",
    "kivi:pre_rope=on:rotation=hadamard:sinks=3:recent=5",
    "innerq:norm=off",
    "turboquant",
    "kvquant",
    "kvquant:outliers=0",
    "kvquant:outliers=0.2",
    "channelkv:rotation=opq",
    "channelkv:outliers=0.01",
    "channelkv:entries=65536",
    "temporalkv",
    "temporalkv:outliers=0.01:hybrid=head:shapes=all",
    "klt",
    "kvarn:group=32",
    "oscar:group=16",
    "llama-cpp-4bit",
    "per-token-head-8bit",
    "quanto-2bit",
    "mixed:keys=klt-1bit kivi-2bit:values=temporalkv-2bit kvquant-2bit",
)
TOKENS = 64


@pytest.fixture(scope="module")
def model():
    """A random Llama of 2 layers, 8 query heads, 4 kv heads of 32."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return tiny_model(**heads, head_dim=32, hidden_size=64)


def parts(model, named):
    """(method, tensors of each layer) of a method or its name."""
    method, shape = build_parsed(named, bits=2) if isinstance(named, str) else named, model_shape(model)
    if not method.needs_artifact(shape):
        return method, [{}] * shape.layers
    _, drawn = random_parts(method, model)
    prefixes = [f"layers.{layer}." for layer in range(shape.layers)]
    return method, [
        {name.removeprefix(prefix): x for name, x in drawn.items() if name.startswith(prefix)} for prefix in prefixes
    ]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("text", fast([text for text in METHODS if "entries" not in text], METHODS))
def test_ranks_decode_the_numbers_of_all_heads(model, text, ranks):
    """8 ranks of 4 kv heads: each head is on two of them."""
    (method, tensors), shape = parts(model, text), model_shape(model)
    x = torch.randn(2, shape.kv_heads, TOKENS, shape.head_dim, generator=torch.Generator().manual_seed(0)) * 3
    shards = [Shard(rank, ranks) for rank in range(ranks)]
    ranked = torch.cat([x[:, list(shard.heads(shape.kv_heads))] for shard in shards], dim=1)
    for layer in range(shape.layers):
        whole = method.plan(layer, shape, tensors[layer])
        for shard in shards:
            heads = list(shard.heads(shape.kv_heads))
            gathering = Shard(shard.rank, ranks, lambda own: _check_own(own, ranked))
            plan = gathering.plan(method, layer, shape, tensors[layer])
            for kept, cut in zip(whole.kept, plan.kept, strict=True):
                assert (cut.source, cut.window) == (kept.source, kept.window)
                packed, own = kept.codec.encode(x), cut.codec.encode(x[:, heads])
                cut.codec.check(own)
                expected = kept.codec.decode(packed, torch.float32)[:, heads]
                decoded = cut.codec.decode(own, torch.float32)
                if isinstance(cut.codec, TransformCodec):  # products of other shapes round differently
                    for name, part in own.parts.items():
                        assert torch.equal(part.tensor, packed.parts[name].tensor[:, heads])
                    torch.testing.assert_close(decoded, expected, rtol=1e-5, atol=1e-5)
                else:
                    assert torch.equal(decoded, expected)
                assert own.nbytes < packed.nbytes


def _check_own(own, gathered):
    assert own.shape[1] < gathered.shape[1]
    return gathered


@pytest.mark.parametrize("text", ["kivi", "kvquant", "temporalkv:hybrid=head:shapes=all", "klt"])
def test_pages_of_all_ranks_have_one_size(model, text):
    (method, tensors), shape = parts(model, text), model_shape(model)
    plans = [Shard(rank, 2).plan(method, layer, shape, tensors[layer]) for rank in range(2) for layer in range(2)]
    of_rank = Shard(0, 2).shape(shape)
    both = cache_layout(plans, of_rank)
    for rank in range(2):
        mine = both.of_rank(rank, shape.layers)
        alone = cache_layout(plans[2 * rank : 2 * rank + 2], of_rank, both.block_size)
        assert (mine.layers, mine.exact) == (alone.layers, both.exact)
        assert alone.page_bytes <= mine.page_bytes == both.page_bytes
        assert mine.blocks(1 << 20) == (1 << 20) // (2 * both.page_bytes)


def test_bytes_of_a_rank():
    """Llama-3.1-8B has 8 kv heads of 128: by hand, 2 bits and 32 bits for 32 numbers; outliers of KVQuant's values are
    in the lists of both ranks, 32 bits each."""
    shape = ModelShape(2, 32, 8, 128, 4096, "bfloat16")
    token = 2 * 4 * 128 * 3 // 8
    for text, nbytes in (("kivi", token), ("fp16", 2 * 4 * 128 * 2)):
        one = serving_layout(build_parsed(text, bits=2), shape, ranks=2)
        assert one.page_bytes == one.block_size * nbytes
    assert {_outlier_bytes(shape, ranks) for ranks in (1, 2)} == {32 * 10 * 4}  # a hundredth of 1,024 numbers


def _outlier_bytes(shape, ranks):
    """Bytes of the outliers of 32 of KVQuant's values, without where those of each head begin."""
    method, shard = build_parsed("kvquant", bits=2), Shard(0, ranks)
    plan = shard.plan(method, 0, shape, artifact_tensors(method, shape, 0))
    parts = cache_layout([plan], shard.shape(shape), 32).layers[0].values
    return sum(parts[name].nbytes(32) for name in ("outlier_index", "outlier_value"))


def test_norms_of_all_heads_are_refused(model):
    with pytest.raises(UsageError, match=r"oscar-omni cannot be served with tensor parallelism: .* one norm of all"):
        Shard(0, 2).plan(build("oscar-omni"), 0, model_shape(model), {})
    plan = Shard(0, 1).plan(build("oscar-omni"), 0, model_shape(model), {})
    assert (joins_heads(plan.keys.codec), joins_heads(plan.values.codec)) == (True, False)


@pytest.mark.parametrize(
    "method",
    [
        build("klt", join_values=True),
        build("klt", join_keys=True),
        build("mixed", keys="kivi", values="klt:join_values=on"),
    ],
)
def test_joined_transforms_are_refused(model, method):
    method, tensors = parts(model, method)
    with pytest.raises(UsageError, match=r"one transform .* covers the (keys|values) of all kv heads"):
        Shard(0, 2).plan(method, 0, model_shape(model), tensors[0])


@pytest.mark.parametrize(("heads", "ranks"), [((6, 3), 2), ((8, 2), 3), ((8, 4), 16), ((12, 6), 4)])
def test_heads_that_cannot_be_shared_out(heads, ranks):
    with pytest.raises(UsageError, match=f"{heads[0]} query heads and {heads[1]} kv heads"):
        Shard(0, ranks).shape(ModelShape(2, *heads, 64, 512, "float32"))


def test_heads_of_vllms_ranks():
    assert [list(Shard(rank, 2).heads(4)) for rank in range(2)] == [[0, 1], [2, 3]]
    assert [list(Shard(rank, 4).heads(2)) for rank in range(4)] == [[0], [0], [1], [1]]
