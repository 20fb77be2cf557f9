"""Cache sizes counted without memory, against real caches; `kvq bits`."""

from __future__ import annotations

import json

import pytest
import torch
from pairwise import parametrize_pairwise
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig

from kvq_cli.attention.rotary import Rotation
from kvq_cli.benchmarking.accounting import account, artifact_bytes
from kvq_cli.benchmarking.shapes import SHAPES, random_model
from kvq_cli.benchmarking.synthetic import artifact_tensors
from kvq_cli.cache.cross_layer import CrossLayerSum
from kvq_cli.cache.joined import JoinedLayers
from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.cache.report import report
from kvq_cli.cache.rows import Rows
from kvq_cli.codecs.base import Codec
from kvq_cli.codecs.layout import dtype_name
from kvq_cli.methods.base import Method, ModelShape
from kvq_cli.methods.registry import build_parsed, method_names
from kvq_cli.models import model_shape

GQA = ModelShape(4, 4, 2, 64, 512, "float16")
MHA = ModelShape(4, 4, 4, 64, 256, "float16")
LOCAL = ModelShape(4, 4, 2, 64, 512, "float16", (None, 40, 40, 200))
SPECS = [*method_names(), "temporalkv:outliers=0.01", "kivi-3bit:sinks=8:recent=32", "innerq:sign=inside", "gear-4bit"]
SPECS += [
    "zipcache:ratio=0.002:sinks=5",
    "zipcache-1bit:high=1",
    "squat:shared_svd=on:pre_rope=on",
    "gear:rank=0:outliers=0",
]
SPECS += [
    "xquant-cl:accumulator_bits=4",
    "xquant:first_channel=on:base_layers=2",
    "innerq:mode=hybrid_prefill:norm=off",
    "kivi:local=16bit:sinks=4:recent=8",
    "xquant:local=16bit",
]


@parametrize_pairwise({"spec": SPECS, "shape": [GQA, MHA, LOCAL], "context": [1, 120, 333]})
def test_counted_bytes_equal_those_of_a_real_cache(spec, shape, context):
    method, batch = build_parsed(spec), 2
    real = report(filled_layers(method, shape, context, batch), method.nominal_bits)
    counted = account(method, shape, context, batch)
    assert counted.parts == real.parts
    assert (counted.constants, counted.working) == (real.constants, real.working)
    assert counted.tables == real.tables or not real.compressed  # a cache makes some when it first packs a token
    for name in ("numbers", "tokens", "compressed", "beyond_window", "packed_numbers"):
        assert getattr(counted, name) == getattr(real, name)


@pytest.mark.parametrize("spec", ["kvquant", "channelkv", "channelkv:outliers=0.01", "temporalkv", "temporalkv-1bit"])
def test_counted_constants_and_tables_are_the_tensors_that_codecs_hold(spec):
    method = build_parsed(spec)
    held: dict[int, int] = {}
    for layer in filled_layers(method, GQA, 333, 1):
        for stream in layer.streams:
            held |= storages(stream.codec)
    counted = account(method, GQA, 333)
    assert counted.constant_bytes + counted.table_bytes == sum(held.values())
    sixteen_bits, size = counted.constants["centroids"], {"kvquant": 1, "temporalkv-1bit": 8}.get(spec, 4)
    # float64, and per centroid a constant; of scalar codebooks also midpoints and the order of their points.
    assert counted.tables["ranked"] == 4 * sixteen_bits * (size + 1 if size > 1 else 4) / size


def storages(codec: Codec) -> dict[int, int]:
    """Address -> bytes of all tensors that the codec and the codecs inside it hold."""
    found = {}
    for value in vars(codec).values():
        if isinstance(value, torch.Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, Codec):
            found |= storages(value)
    return found


def filled_layers(method: Method, shape: ModelShape, context: int, batch: int) -> list[CompressedLayer]:
    """Real layers with random numbers in them, which were read once."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*size):
        return torch.randn(*size, generator=generator).half()

    sums, joined, layers = CrossLayerSum(), (JoinedLayers(), JoinedLayers()), []
    for index in range(shape.layers):
        tensors = {name: x.clone() for name, x in artifact_tensors(method, shape, index).items()}
        plan = method.layer_plan(index, shape, tensors)
        rotation = Rotation("none", torch.empty(0), 64)
        shared = {"cross_layer": sums, "joined": joined}
        layers.append(CompressedLayer(index, plan, rotation, shape.window(index), **shared))
    forward = Rows().begin(0, context, batch)
    for layer in layers:
        keys, values = (numbers(batch, shape.kv_heads, context, 64) for _ in range(2))
        layer.begin(forward)
        layer.capture_key(keys)
        layer.capture_input(numbers(batch, context, shape.hidden_size))
        layer.update(keys, values)
        layer.absorb(numbers(batch, shape.query_heads, context, 64))
        layer.release()
    for stream in (stream for layer in layers for stream in layer.streams):
        stream.read(0)
    return layers


def test_centroid_bytes_equal_the_thesis():
    sizes = {
        name: artifact_bytes(build_parsed("temporalkv"), SHAPES[name].model_shape())["centroids"]
        for name in ("llama-3.1-8b", "llama-3.2-1b", "llama-3.2-3b")
    }
    assert [round(size / 1e6, 1) for size in sizes.values()] == [33.6, 8.4, 29.4]


def test_shapes_count_the_parameters_of_their_models():
    model = random_model("tiny", torch.device("cpu"), torch.float32, 0)
    assert SHAPES["tiny"].parameters == sum(p.numel() for p in model.parameters())
    assert round(SHAPES["llama-3.1-8b"].parameters / 1e9, 2) == 8.03
    assert round(SHAPES["llama-2-7b"].parameters / 1e9, 2) == 6.74


def test_gemma_3_270m_has_the_sizes_of_its_model():
    config = Gemma3TextConfig(
        hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4, num_key_value_heads=1,
        head_dim=256, vocab_size=262144, sliding_window=512, max_position_embeddings=32768,
    )  # fmt: skip
    with torch.device("meta"):
        model = Gemma3ForCausalLM(config)
    shape = SHAPES["gemma3-270m"]
    assert shape.parameters == sum(p.numel() for p in model.parameters()) == 268_098_176
    assert shape.model_shape(dtype_name(model.dtype)) == model_shape(model)
    random = random_model("gemma3-270m", torch.device("meta"), torch.float32, 0, layers=1)
    keys = random.model.layers[0].self_attn.k_proj.weight
    assert keys.shape == model.model.layers[0].self_attn.k_proj.weight.shape == (256, 640)


@pytest.mark.parametrize("context", [1, 511, 512, 1500])
def test_16_bits_are_what_transformers_cache_holds(context):
    """Counted for the shape, with the layers of Gemma 3 that see a window alone."""
    shape = SHAPES["gemma3-270m"].model_shape("bfloat16")
    config = Gemma3TextConfig(
        hidden_size=640, num_hidden_layers=18, num_attention_heads=4, num_key_value_heads=1, head_dim=256,
        vocab_size=64, sliding_window=512,
    )  # fmt: skip
    cache = DynamicCache(config=config)
    for layer in range(18):
        keys, values = torch.empty(2, 2, 1, context, 256, dtype=torch.bfloat16)
        cache.update(keys, values, layer)
    held = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    assert account(build_parsed("kivi"), shape, context, 2).fp16_bytes == held


def test_a_long_text_takes_less_than_in_transformers_cache():
    """Where most layers see a window alone, and transformers' cache holds no more: of Gemma 3 270M, 103.5 MiB."""
    shape = SHAPES["gemma3-270m"].model_shape()
    counted = account(build_parsed("kivi-2bit"), shape, 32768)
    assert counted.fp16_bytes == (3 * 32768 + 15 * 511) * 2 * 256 * 2
    assert counted.bytes < counted.fp16_bytes / 4.5


def test_bits_command(kvq):
    result = kvq("bits", "--compare", "kivi-4bit,temporalkv:recent=32", "--shapes", "llama-3.1-8b", "--json")
    assert result.exit_code == 0, result.stderr
    kivi, temporal = json.loads(result.stdout)["methods"]
    assert kivi["method"] == "kivi-4bit" and kivi["packed_bits"] == 5.0 and kivi["artifact_bytes"] == 0
    assert kivi["table_bytes"] == 0 and temporal["table_bytes"] == sum(temporal["tables"].values())
    assert 4.9 < temporal["table_bytes"] / temporal["constant_bytes"] < 5  # float64: 4 x 5/4
    assert temporal["measured_bits_with_constants"] < 6
    assert temporal["method"] == "temporalkv-2bit:recent=32" and 0.002 < temporal["artifact_share_of_weights"] < 0.003
    assert kvq("bits", "--json").exit_code == 0
    result = kvq("bits", "--shapes", "nonsense")
    assert result.exit_code == 2 and "valid: tiny, reference" in result.stderr
    result = kvq("bits", "--method", "kivi", "--set", "chunk=2")
    assert result.exit_code == 2 and "none of the methods kivi has this option" in result.stderr


def test_papers_sizes_by_part_are_also_in_json(kvq):
    """The parts of a whole cache add up to the share of 16 bits that is counted."""
    rows = json.loads(kvq("bits", "--papers", "--json").stdout)
    assert all(row["bits_by_part"] and "report" not in row for row in rows)
    whole = [row for row in rows if row["figure"] == "ratio %"]
    assert whole
    for row in whole:
        assert sum(row["bits_by_part"].values()) == pytest.approx(16 * row["counted"] / 100)
