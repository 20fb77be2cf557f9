"""`kvq plan` against the sizes counted by `kvq bits`."""

import json
from dataclasses import replace

import pytest
from transformers import GptOssConfig, Lfm2Config
from typer.testing import CliRunner

from kvq_cli.benchmarking.accounting import account
from kvq_cli.benchmarking.capacity import capacity, serving_capacity, serving_layout
from kvq_cli.benchmarking.shapes import CONTEXT, SHAPES
from kvq_cli.cli.app import app
from kvq_cli.cli.sizes import ModelSize, model_size
from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build
from kvq_cli.models import configured_shape, parameters_and_context
from kvq_cli.units import parse_bytes

SHAPE = SHAPES["llama-3.2-1b"]
METHODS = [("fp16", {}), ("kivi", {"bits": 2}), ("temporalkv", {"bits": 2}), ("xquant", {"bits": 4})]


@pytest.mark.parametrize(("name", "options"), METHODS)
def test_longest_context_fits_and_a_longer_one_does_not(name, options):
    method, shape = build(name, **options), replace(SHAPE.model_shape(), layers=2)
    found = capacity(method, shape, 1000, CONTEXT, context=3000, batch=2, budget=50 * 10**6)
    left = 50 * 10**6 - 1000 - found.artifact
    assert found.cache == account(method, shape, 3000, 2).bytes and found.fits == (found.cache <= left)
    assert account(method, shape, found.context, 2).bytes <= left
    assert account(method, shape, int(found.context * 1.01) + 200, 2).bytes > left
    assert account(method, shape, 3000, found.batch).bytes <= left < account(method, shape, 3000, found.batch + 1).bytes


@pytest.mark.parametrize("plan_of", [capacity, serving_capacity])
def test_nothing_fits_beyond_the_models_context(plan_of):
    method, shape = build("kivi", bits=2), SHAPE.model_shape()
    within, beyond = (plan_of(method, shape, 1000, 4096, tokens, 1, 10**12) for tokens in (4096, 4097))
    assert within.fits and within.batch > 0
    assert (beyond.fits, beyond.context, beyond.batch) == (False, 4096, 0)


def test_known_shapes_have_the_contexts_of_their_models(kvq):
    words = ("plan", "--shapes", "llama-2-7b", "--memory", "80GB", "--compare", "kivi-2bit", "--json")
    for context, fits in ((2048, True), (100_000, False)):
        result = kvq(*words, "--context", context)
        found = json.loads(result.stdout)["methods"][0]
        assert (found["context"], found["fits"]) == (4096, fits)
        note = "note: --context 100,000 is longer than the 4,096 tokens of llama-2-7b"
        assert (note in result.stderr) == (not fits)


def test_without_a_context_a_short_model_is_planned_for_its_own(kvq):
    words = ("plan", "--memory", "80GB", "--compare", "kivi-2bit", "--json")
    for shapes, context in (("llama-2-7b", 4096), ("llama-3.1-8b", 8192)):
        result = kvq(*words, "--shapes", shapes)
        document = json.loads(result.stdout)
        assert document["context"] == context and document["methods"][0]["fits"]
        note = f"note: planned for 4,096 tokens, the whole context of {shapes}"
        assert (note in result.stderr) == (context == 4096)


def test_capacity_limits():
    method, shape = build("kivi", bits=2), SHAPE.model_shape()
    nothing = capacity(method, shape, 1000, CONTEXT, context=512, batch=1, budget=2000)
    assert (nothing.fits, nothing.context, nothing.batch) == (False, 0, 0)
    assert capacity(method, shape, 1000, 700, context=512, batch=1, budget=10**12).context == 700


@pytest.mark.parametrize(("name", "options"), METHODS[:3])
def test_requests_that_fit_into_blocks_of_vllm(name, options):
    method, shape = build(name, **options), replace(SHAPE.model_shape(), layers=2)
    found = serving_capacity(method, shape, 1000, CONTEXT, context=3000, batch=2, budget=50 * 10**6)
    layout = serving_layout(method, shape)
    assert (found.block_tokens, found.blocks) == (layout.block_size, layout.blocks(50 * 10**6 - 1000 - found.artifact))

    def left(requests, tokens):  # of the blocks that requests can have: vLLM keeps one
        return found.blocks - 1 - requests * layout.blocks_of(tokens)

    assert left(found.batch, 3000) >= 0 > left(found.batch + 1, 3000)
    assert left(2, found.context) >= 0 > left(2, int(found.context * 1.01) + layout.block_size)
    assert found.bits == layout.bits(shape)


def test_layers_without_a_cache_are_not_counted(kvq, tmp_path):
    Lfm2Config(hidden_size=2048, num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]).save_pretrained(
        tmp_path
    )
    words = ("plan", "--model", str(tmp_path), "--memory", "40GB", "--compare", "kivi-2bit")
    planned = kvq(*words, "--context", "4096", "--json")
    assert f"note: 1 of 3 layers of {tmp_path} have a cache to compress and are counted" in planned.stderr
    shape = configured_shape(str(tmp_path))
    alone = account(build("kivi", bits=2), replace(shape, layers=1, attention=()), 4096).bytes
    assert json.loads(planned.stdout)["methods"][0]["cache"] == alone
    served = kvq(*words, "--engine", "vllm")
    assert served.exit_code == 2 and "some layers have no cache: leave it out" in served.stderr


def test_a_model_that_is_not_served_has_no_plan(kvq, tmp_path):
    GptOssConfig(num_hidden_layers=2, num_local_experts=2).save_pretrained(tmp_path)
    words = ("plan", "--model", str(tmp_path), "--memory", "40GB", "--compare", "kivi-2bit")
    assert kvq(*words).exit_code == 0
    served = kvq(*words, "--engine", "vllm")
    assert served.exit_code == 2 and "has sink logits, which kvq does not serve" in served.stderr


def test_each_rank_has_its_share_of_weights_heads_and_blocks(kvq):
    words = ("plan", "--engine", "vllm", "--shapes", "llama-3.1-8b", "--bits", "2", "--json")
    # What two ranks have together in twice the memory, one process has.
    given = (("40GB", "2GB", ()), ("20GB", "1GB", ("--tensor-parallel-size", "2")))
    alone, shared = (
        json.loads(
            kvq(*words, "--compare", "fp16,kivi,temporalkv", "--memory", size, "--reserve", kept, *ranks).stdout
        )["methods"]
        for size, kept, ranks in given
    )
    for one, two in zip(alone, shared, strict=True):
        assert two["weights"] == one["weights"] / 2 and two["cache"] == one["cache"] / 2
        assert (two["blocks"], two["batch"], two["context"]) == (one["blocks"], one["batch"], one["context"])
    own = kvq("plan", "--memory", "40GB", "--tensor-parallel-size", "2")
    assert own.exit_code == 2 and "add --engine vllm" in own.stderr
    joined = kvq(*words, "--memory", "40GB", "--compare", "klt:join_values=on", "--tensor-parallel-size", "2")
    assert joined.exit_code == 2 and "calibrate with join_values=off" in joined.stderr


def test_blocks_have_the_bits_of_klt(kvq):
    """Of layers with one byte more or less in four lanes: the mean over the model, not the largest layer's."""
    words = ("plan", "--engine", "vllm", "--shapes", "llama-3.1-8b", "--memory", "40GB", "--json")
    found = json.loads(kvq(*words, "--compare", "fp16,kivi-2bit,klt-2bit,klt-2.25bit").stdout)["methods"]
    assert [one["bits"] for one in found[:2]] == [16, 3]
    for one, bits in zip(found[2:], (2, 2.25), strict=True):
        assert 0.99 * bits < one["bits"] < 1.02 * bits


def test_blocks_of_a_model_with_sliding_windows(kvq):
    """Of Gemma 3's 18 layers, 3 see all tokens, 15 see 512 in 16 bits: 5 lists of blocks for 3 layers each."""
    words = ("plan", "--engine", "vllm", "--shapes", "gemma3-270m", "--memory", "8GB", "--context", "8192", "--json")
    result = json.loads(kvq(*words, "--compare", "fp16,turboquant-2bit", "--set", "local=16bit").stdout)["methods"]
    # A page of fp16 has 16 tokens of 1,024 bytes, one of turboquant 128 of 134: room for 16 in 16 bits.
    for one, tokens, nbytes in zip(result, (16, 128), (16384, 128 * 134), strict=True):
        assert one["block_tokens"] == tokens
        assert one["cache"] == 3 * nbytes * (1 + 8192 // tokens + 5 * (512 // 16 + 1))
    packed = kvq(*words, "--compare", "kivi-2bit:local=packed")
    assert packed.exit_code == 2 and "local=packed is not served" in packed.stderr


def test_methods_that_cannot_be_served_have_no_plan(kvq):
    words = ("plan", "--engine", "vllm", "--shapes", "llama-3.2-1b", "--memory", "8GB", "--bits", "2", "--json")
    result = kvq(*words, "--compare", "kivi")
    assert json.loads(result.stdout)["methods"][0]["block_tokens"] == 96
    assert "its codes depend on the whole prompt" in kvq(*words, "--compare", "kivi,squat").stderr
    assert "it caches layer inputs" in kvq(*words, "--compare", "xquant").stderr


def test_the_command(tmp_path):
    words = [
        "plan",
        "--shapes",
        "llama-3.1-8b",
        "--memory",
        "19GB",
        "--context",
        "2048",
        "--compare",
        "fp16,kivi-2bit",
    ]
    result = CliRunner().invoke(app, [*words, "--json"])
    fp16, kivi = json.loads(result.stdout)["methods"]
    assert "bits" not in fp16
    assert fp16["weights"] == 2 * SHAPES["llama-3.1-8b"].parameters
    assert kivi["context"] > 4 * fp16["context"] and kivi["batch"] > 4 * fp16["batch"] > 0
    small = CliRunner().invoke(app, [*words[:3], "--memory", "12GB"])
    assert small.exit_code == 2 and "--memory 12GB is 11.2 GiB: the weights take 15.0 GiB" in small.stderr


def test_weight_bytes_are_counted_from_the_configuration():
    document = json.loads(CliRunner().invoke(app, ["plan", "--memory", "3GB", "--compare", "fp16", "--json"]).stdout)
    assert document["methods"][0]["weights"] == 2 * SHAPES["reference"].parameters
    shape, (parameters, context) = configured_shape("reference"), parameters_and_context("reference")
    assert model_size(None, "reference") == ModelSize(shape, 2 * parameters, context)


@pytest.mark.parametrize(("name", "memory"), [("rtx4090", 24), ("RTX-4090", 24), ("h100", 80), ("a100-40gb", 40)])
def test_gpu_instead_of_memory(kvq, name, memory):
    words = ("plan", "--compare", "fp16", "--json")
    by_gpu, by_size = (
        json.loads(kvq(*words, *device).stdout) for device in (["--gpu", name], ["--memory", f"{memory}GB"])
    )
    assert by_gpu == by_size


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--memory", "24"], "--memory 24: has no unit; 24GB?"),
        (["--gpu", "h300"], "unknown GPU 'h300'; known: a10, a100-40gb, a100-80gb, b200, h100-pcie,"),
        ([], "give --memory SIZE, like 80GB, or --gpu NAME, like h100"),
        (["--gpu", "h100", "--memory", "80GB"], "or --gpu NAME, like h100, not both"),
    ],
)
def test_memory_is_given_once_and_with_a_unit(fails, words, says):
    fails("plan", *words, code=2, says=says)


def test_parse_bytes():
    assert [parse_bytes(text, "-m") for text in ("80GB", "1.5 GiB", "512MB", "7B")] == [
        80 * 10**9,
        3 << 29,
        512 * 10**6,
        7,
    ]
    for text in ("", "GB", "-1GB", "many", "0", "1XB", "nanGB", "infGB"):
        with pytest.raises(UsageError, match="must be a size"):
            parse_bytes(text, "--memory")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--compare", "kivi,kivi"], "--compare kivi,kivi: names a method twice"),
        (["--compare", ""], "--compare '': must be names"),
        (["--context", 10**20], "--context"),
    ],
)
def test_invalid_sizes_are_refused(fails, words, says):
    fails("bits", *words, code=2, says=says)
