"""`kvq serve`: the command that it prints, and what it refuses before an engine starts."""

import json
import re
import shlex
from importlib.metadata import PackageNotFoundError

import pytest
from random_artifacts import random_parts, tiny_model
from transformers import Gemma3TextConfig, GptOssConfig, Lfm2Config, LlamaConfig, MistralConfig

from kvq_cli.artifact import load_artifact, save_artifact
from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build_parsed
from kvq_cli.vllm import plugin
from kvq_cli.vllm.prefix_store.settings import RAW, StoreSettings
from kvq_cli.vllm.prepare import check_weights
from kvq_cli.vllm.served import ServedMethod, cache_dtypes, shorthands


def gemma(*kinds):
    """Of layers of these kinds."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": len(kinds)}
    return Gemma3TextConfig(**sizes, layer_types=list(kinds), sliding_window=48, dtype="bfloat16")


@pytest.fixture(scope="module")
def model():
    return tiny_model(head_dim=64, hidden_size=128)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


def random_artifact(tmp_path_factory, method, model):
    path = tmp_path_factory.mktemp("artifact") / method.name
    save_artifact(path, *random_parts(method, model), "card")
    return path


@pytest.fixture(scope="module")
def artifact(model, tmp_path_factory):
    return random_artifact(tmp_path_factory, build_parsed("temporalkv", bits=2), model)


def command(result, flag="--additional-config"):
    """The words of the printed command, and the JSON of one of its flags."""
    assert result.exit_code == 0, result.stderr
    words = shlex.split(result.stdout)
    return words, json.loads(words[words.index(flag) + 1])


def test_prints_the_whole_command(kvq, folder):
    result = kvq("serve", "--model", str(folder), "--method", "kivi", "--bits", "2", "--dry-run", "--port", "8123")
    words, config = command(result)
    assert words[:3] == ["vllm", "serve", str(folder)]
    assert words[-2:] == ["--port", "8123"]
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    assert flags["--kv-cache-dtype"] == "kvq" and flags["--attention-backend"] == "CUSTOM"
    assert flags["--dtype"] == "float32" and int(flags["--block-size"]) % 32 == 0
    assert ServedMethod.of_flags("kvq", config).method == build_parsed("kivi", bits=2)


def test_an_artifact_with_other_windows(kvq, folder, artifact):
    result = kvq("serve", "--model", str(folder), "--artifact", str(artifact), "--set", "recent=16", "--dry-run")
    served = ServedMethod.of_flags("kvq", command(result)[1])
    assert served.method == build_parsed("temporalkv", bits=2, recent=16)
    assert served.artifact.path == artifact


@pytest.mark.parametrize(("flags", "seconds"), [((), "30"), (("--shutdown_timeout=0",), "0")])
def test_requests_in_flight_have_time_to_finish(kvq, folder, flags, seconds):
    words, _ = command(kvq("serve", "--model", str(folder), "--method", "kivi", "--dry-run", *flags))
    given = [i for i, word in enumerate(words) if word.replace("_", "-").startswith("--shutdown-timeout")]
    assert len(given) == 1 and words[given[0] + 1] == seconds


def test_innerq_takes_no_norms_from_prompts(kvq, folder):
    result = kvq("serve", "--model", str(folder), "--method", "innerq", "--dry-run")
    assert command(result)[1]["kvq"]["method"]["norm"] is False


def test_own_additional_config_and_block_size_are_kept(kvq, folder):
    flags = ("--additional-config", '{"mine": 1}', "--block-size=64")
    words, config = command(kvq("serve", "--model", str(folder), "--method", "kivi", "--dry-run", *flags))
    assert config["mine"] == 1 and words[words.index("--block-size") + 1] == "64"
    assert sum(word.startswith("--additional-config") for word in words) == 1


@pytest.mark.parametrize(
    "flags", [("-tp=2",), ("--tensor_parallel_size=2",), ("-tp", "4", "--tensor-parallel-size", "2")]
)
def test_two_ranks_have_half_the_heads_each(kvq, folder, flags):
    one, two = (kvq("serve", "--model", str(folder), "--dry-run", *given) for given in ((), flags))
    assert command(two)[0][-len(flags) :] == list(flags)
    assert "each of 2 ranks has 1 kv heads" in two.stderr
    sizes = [int(re.search(r"([\d,]+) bytes a token", x.stderr)[1].replace(",", "")) for x in (one, two)]
    assert sizes[0] == 2 * sizes[1]


@pytest.mark.parametrize(
    "flags",
    [
        ("-q", "awq"),
        ("-dph", "host"),
        ("-cc.cudagraph_mode=NONE",),
        ("-n", "2", "-r", "0"),
        ("-ac.backend", "x"),
        ("--no-enable-sleep-mode",),
    ],
)
def test_vllms_flags_are_passed_on(kvq, folder, flags):
    """Short ones as they are, also with the letters of kvq's -q and -h; kvq's notes are printed."""
    result = kvq("serve", "--model", str(folder), "--method", "kivi", "--dry-run", *flags)
    assert command(result)[0][-len(flags) :] == list(flags)
    assert "bytes a token" in result.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ("--api-key", "mine"),
        ("--api_key=mine",),
        ("--api-key", "mine", "mine2"),
        ("--api-k", "mine"),
        ("--hf-token=mine",),
    ],
)
def test_keys_are_not_printed(kvq, folder, flags):
    result = kvq("serve", "--model", str(folder), "--method", "kivi", "--dry-run", *flags, "--port", "8123")
    words, _ = command(result)
    assert "***" in " ".join(words) and words[-2:] == ["--port", "8123"]
    assert "mine" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("flags", "key", "is_open"),
    [((), "", True), (("--host", "127.0.0.1"), "", False), (("--api-key=k",), "", False), ((), "k", False)],
)
def test_says_that_anyone_may_connect(kvq, folder, monkeypatch, flags, key, is_open):
    monkeypatch.setenv("VLLM_API_KEY", key)
    result = kvq("serve", "--model", str(folder), "--method", "kivi", "--dry-run", *flags)
    assert ("listens on all interfaces" in result.stderr) == is_open


def test_quiet(kvq, folder):
    result = kvq("serve", "--model", str(folder), "--method", "kivi", "--dry-run", "--quiet")
    assert "--quiet" not in command(result)[0] and not result.stderr


@pytest.mark.parametrize(
    ("method", "flags", "message"),
    [
        ("squat", (), "squat cannot be served"),
        ("zipcache", (), "zipcache cannot be served"),
        ("gear", (), "gear cannot be served"),
        ("xquant", (), "xquant"),
        ("innerq", ("--set", "norm=on"), "use --set norm=off"),
        ("temporalkv", (), "kvq calibrate"),
        ("kivi", ("--block-size", "40"), "cuts blocks of 32 tokens"),
        ("kivi", ("--tensor-parallel-size", "3"), "4 query heads and 2 kv heads, which cannot be split evenly"),
        ("kivi", ("-tp=0",), "--tensor-parallel-size 0: give a whole number of at least 1"),
        ("kivi", ("--shutdown-timeout", "-1"), "--shutdown-timeout -1: give a whole number of at least 0"),
        ("kivi", ("-pp", "2"), "all layers must be in one process"),
        ("kivi", ("--decode-context-parallel-size=2",), "a sequence's tokens are packed together"),
        ("kivi", ("-dcp", "2"), "a sequence's tokens are packed together"),
        ("kivi", ("--prefill-context-parallel-size", "2"), "a sequence's tokens are packed together"),
        ("kivi", ("-pcp=2",), "a sequence's tokens are packed together"),
        ("kivi", ("--speculative-config", '{"model": "draft"}'), "kvq does not serve with method draft_model"),
        ("kivi", ("--speculative-config", "{"), "must be a JSON object"),
        ("kivi", ("-sc.method=eagle3", "-sc.model=x"), "kvq does not serve with method eagle3"),
        ("kivi", ("--spec-method", "mtp"), "kvq does not serve with method mtp"),
        ("kivi", ("--spec-tokens", "4"), "kvq does not serve with method draft_model"),
        ("kivi", ("-sc", '{"method": "ngram"}', "-sc.method=mtp"), ".method mtp; give one of them"),
        ("kivi", ("--kv-offloading-size", "1"), "cannot be transferred"),
        ("kivi", ("--kv-cache-dtype-skip-layers", "0"), "the method says how each layer is stored"),
        ("kivi", ("--enable-sleep-mode",), "sleep level 2 discards"),
        ("kivi", ("--enable_sleep_mode", "--port", "1"), "sleep level 2 discards"),
        ("kivi", ("--kv-cache-dtype", "fp8"), "kvq serve sets it"),
        ("kivi", ("--additional-config", "{"), "must be a JSON object"),
        ("kivi", ("--set", "pages=1"), "pages"),
    ],
)
def test_refusals(kvq, folder, method, flags, message):
    result = kvq("serve", "--model", str(folder), "--method", method, "--dry-run", *flags)
    assert result.exit_code in (1, 2)
    assert message in result.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ("--speculative-config", '{"method": "suffix"}'),
        ("--speculative_config.method", "ngram"),
        ("--spec-model=ngram",),
    ],
)
def test_drafts_without_a_model_are_served(kvq, folder, flags):
    result = kvq("serve", "--model", str(folder), "--method", "kivi", "--dry-run", *flags)
    assert tuple(command(result)[0][-len(flags) :]) == flags


def test_artifact_of_another_model(kvq, artifact, tmp_path):
    for name, options in (("sizes", {"num_hidden_layers": 3}), ("weights", {"seed": 1})):
        other = tiny_model(**{"head_dim": 64, "hidden_size": 128, **options})
        other.save_pretrained(tmp_path / name)
        result = kvq("serve", "--model", str(tmp_path / name), "--artifact", str(artifact), "--dry-run")
        assert result.exit_code == 2
        assert "belongs to the model 'mine'" in result.stderr


def test_artifact_of_another_name_where_weights_cannot_be_compared(kvq, artifact, model, tmp_path):
    """As of a model that vLLM downloads later: the same configuration may have other weights."""
    model.config.save_pretrained(tmp_path / "other")
    result = kvq("serve", "--model", str(tmp_path / "other"), "--artifact", str(artifact), "--dry-run")
    assert result.exit_code == 2
    assert "calibrated for 'mine', and the key and value weights" in result.stderr


@pytest.mark.parametrize("flag", ["--revision=v2", "--hf-overrides.rope_theta=1", "--hf_config_path=x"])
def test_flags_that_load_another_model_are_refused_with_an_artifact(kvq, folder, artifact, flag):
    words = ("serve", "--model", str(folder), "--dry-run", flag)
    assert command(kvq(*words, "--method", "kivi"))[0][-1] == flag
    result = kvq(*words, "--artifact", str(artifact))
    assert result.exit_code == 2
    assert "kvq compares the artifact with the model without it" in result.stderr


def test_weights_are_those_of_the_revision(folder, artifact, model, tmp_path, monkeypatch):
    """As an engine checks them, which vLLM may have started without `kvq serve`."""
    tiny_model(seed=1, head_dim=64, hidden_size=128).save_pretrained(tmp_path)
    revisions = {None: folder, "main": folder, "v2": tmp_path}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, revision, **_: str(revisions[revision]))
    held = load_artifact(artifact)
    for revision in (None, "main"):
        check_weights(held, model.config, "some/model", "some/model", False, revision)
    with pytest.raises(UsageError, match="belongs to the model 'mine'"):
        check_weights(held, model.config, "some/model", "some/model", False, "v2")


def test_options_of_vllms_flags_change_those_of_an_artifact(artifact):
    def served(**options):
        method = {"name": "temporalkv", **options}
        return ServedMethod.of_flags("kvq", {"kvq": {"method": method, "artifact": str(artifact)}})

    assert served(recent=16).method == build_parsed("temporalkv", bits=2, recent=16)
    assert served().artifact.method_config == load_artifact(artifact).method_config
    with pytest.raises(UsageError, match="bits=4: the artifact .* was calibrated with bits=2"):
        served(bits=4)
    with pytest.raises(UsageError, match="holds temporalkv, not kivi"):
        served(name="kivi")


def test_a_model_as_vllm_takes_it_is_refused(fails, folder):
    fails("serve", folder, "--method", "kivi", "--dry-run", code=2, says=f"give the model as --model {folder}")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MistralConfig(sliding_window=64, num_hidden_layers=2), "all layers have a sliding window"),
        (gemma("full_attention", "full_attention", "sliding_attention"), "2 layers see all tokens and 1 have"),
        (GptOssConfig(num_hidden_layers=2), "sink logits"),
        (LlamaConfig(num_hidden_layers=2, kv_lora_rank=8), "latent attention"),
        (Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]), "other states than keys and values"),
    ],
)
def test_models_whose_attention_is_not_paged(kvq, tmp_path, config, message):
    config.save_pretrained(tmp_path)
    result = kvq("serve", "--model", str(tmp_path), "--method", "kivi", "--dry-run")
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.fixture
def windowed(tmp_path):
    """The folder of a model of two layers that see all tokens, and four that see 48."""
    gemma(*("sliding_attention", "sliding_attention", "full_attention") * 2).save_pretrained(tmp_path)
    return str(tmp_path)


def test_layers_with_a_sliding_window_stay_in_vllms_cache(kvq, windowed):
    result = kvq("serve", "--model", windowed, "--method", "kivi", "--bits", "2", "--dry-run", "--port", "1")
    words, _ = command(result)
    assert words[words.index("--kv-cache-dtype-skip-layers") + 1] == "sliding_window"
    assert words[words.index("--attention-config.backend_per_kind.full_attention") + 1] == "CUSTOM"
    assert "--attention-backend" not in words
    # 3 bits for each of 2 x 2 x 64 numbers in two layers. A page of 96 tokens has room for 16 in 16 bits, of 512 bytes.
    assert "2 layers see all tokens: a block: 96 tokens in 9,216 bytes a layer; 192 bytes a token" in result.stderr
    assert "4 layers see 48 tokens, in vLLM's own cache, 16 to a block, up to 8 blocks a sequence" in result.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--set", "local=packed"), "local=packed is not served"),
        (("--block-size", "64"), "no room for 16 tokens of a layer with a sliding window in full precision; use 96"),
        (("-ac.backend", "FLASHINFER"), "--attention-config is not supported by kvq: kvq serve sets it"),
        (("--attention-config={}",), "--attention-config is not supported by kvq: kvq serve sets it"),
        (("--disable-sliding-window",), "--disable-sliding-window is not supported by kvq: it changes which layers"),
        (("--hf-overrides.sliding_window=9",), "--hf-overrides is not supported by kvq: it changes which layers"),
        (("--prefix-store", "store", "--prefix-store-artifact", "raw"), "has layers with a sliding window"),
    ],
)
def test_refusals_beside_sliding_windows(kvq, windowed, flags, message):
    result = kvq("serve", "--model", windowed, "--method", "kivi", "--bits", "2", "--dry-run", *flags)
    assert result.exit_code == 2 and message in result.stderr


def test_shorthands_are_methods_without_calibration():
    for name in shorthands():
        method = ServedMethod.of_flags(name, {}).method
        assert not method.calibrates and name in cache_dtypes()
    assert ServedMethod.of_flags("kvq_kivi_2", {}).method == build_parsed("kivi", bits=2)


def test_head_dims_that_do_not_fit(kvq, tmp_path):
    tiny_model(head_dim=24, hidden_size=128).save_pretrained(tmp_path)
    result = kvq("serve", "--model", str(tmp_path), "--method", "kivi", "--dry-run")
    assert result.exit_code == 2 and "head_dim" in result.stderr


@pytest.mark.parametrize("found", ["0.34.1", "1.0.0", None])
def test_another_version_of_vllm_is_left_alone(kvq, folder, monkeypatch, caplog, found):
    """The plugin, which vLLM calls whatever it serves, warns; `kvq serve` refuses, and only prints the command."""

    def version(name):
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(plugin, "version", version)
    plugin.register.__wrapped__()
    (record,) = caplog.records
    assert record.name.startswith("vllm.") and record.levelname == "WARNING"
    assert "--kv-cache-dtype kvq is not available: " in record.getMessage()
    assert (found or "vllm") in record.getMessage()
    words, reason = ("serve", "--model", str(folder), "--method", "kivi"), "vLLM is not installed"
    if found:
        reason = f"kvq serves with vLLM 0.33.x, found {found}"
    result = kvq(*words)
    assert result.exit_code == 1 and not result.stdout
    assert reason in result.stderr
    result = kvq(*words, "--dry-run", "--prot", "1")
    assert command(result)[0][-2:] == ["--prot", "1"]
    assert f"vLLM's flags are not checked: {reason}" in result.stderr


@pytest.fixture(scope="module")
def klt(model, tmp_path_factory):
    return random_artifact(tmp_path_factory, build_parsed("klt", bits=4), model)


def stored(result):
    """The words of the command, and the settings of its prefix store."""
    words, transfer = command(result, "--kv-transfer-config")
    assert (transfer["kv_role"], transfer["kv_load_failure_policy"]) == ("kv_both", "recompute")
    return words, StoreSettings.of_extra_config(transfer["kv_connector_extra_config"])


def test_prefixes_beside_vllms_own_cache(kvq, folder, klt, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    flags = ("--prefix-store", str(tmp_path), "--prefix-store-artifact", str(klt), "--prefix-store-size", "3GiB")
    words, settings = stored(kvq("serve", "--model", str(folder), *flags, "--dry-run", "--port", "8123"))
    assert words[:4] == ["PYTHONHASHSEED=0", "vllm", "serve", str(folder)] and words[-2:] == ["--port", "8123"]
    assert "--kv-cache-dtype" not in words and "--attention-backend" not in words
    assert words[words.index("--block-size") + 1] == "64"
    assert settings == StoreSettings(str(tmp_path), str(klt), "3GiB") and settings.capacity == 3 << 30
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    given = kvq("serve", "--model", str(folder), *flags, "--dry-run", "--block-size", "128")
    words, _ = stored(given)
    assert words[0] == "PYTHONHASHSEED=7" and words.count("--block-size") == 1 and "128" in words


@pytest.mark.parametrize("method", ["fp16", "turboquant"])
def test_prefixes_beside_kvqs_pages(kvq, folder, klt, tmp_path, method):
    flags = ("--method", method, "--prefix-store", str(tmp_path), "--dry-run")
    codes = ("--prefix-store-artifact", str(klt)) if method == "fp16" else ()
    words, settings = stored(kvq("serve", "--model", str(folder), *flags, *codes))
    assert settings.artifact == (str(klt) if codes else RAW) and "CUSTOM" in words


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "no 4-bit artifact of klt for"),
        (("--prefix-store-artifact", "raw", "--method", "kivi"), "keeps tokens in full precision"),
        (("--prefix-store-artifact", "KLT", "--method", "turboquant"), "hold codes already; give raw"),
        (("--prefix-store-artifact", "ARTIFACT"), "has codes of klt"),
        (("--prefix-store-artifact", "KLT", "--block-size", "24"), "packs 16 tokens together"),
        (("--prefix-store-artifact", "raw", "--prefix-store-size", "3"), "has no unit"),
        (("--prefix-store-artifact", "raw", "--enable-lora"), "--enable-lora is not supported by the prefix store"),
        (("--prefix-store-artifact", "raw", "-pp", "2"), "all layers must be in one process"),
        (("--prefix-store-artifact", "raw", "--enable-sleep-mode"), "discards the memory in which codebooks"),
        (("--prefix-store-artifact", "raw", "--kv-cache-dtype", "fp8"), "keys and values of the model's dtype"),
        (("--prefix-store-artifact", "raw", "--speculative-config={}"), "it does not support speculative decoding"),
        (("--prefix-store-artifact", "raw", "-sc.method=ngram"), "it does not support speculative decoding"),
        (("--prefix-store-artifact", "raw", "--spec-method", "ngram"), "it does not support speculative decoding"),
        (("--prefix-store-artifact", "raw", "--spec_model=ngram"), "it does not support speculative decoding"),
        (("--prefix-store-artifact", "raw", "--spec-tokens", "4"), "it does not support speculative decoding"),
    ],
)
def test_prefix_stores_that_are_refused(kvq, folder, klt, artifact, tmp_path, flags, message):
    words = [{"KLT": str(klt), "ARTIFACT": str(artifact)}.get(word, word) for word in flags]
    result = kvq("serve", "--model", str(folder), "--prefix-store", str(tmp_path), "--dry-run", *words)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())


def test_options_of_a_store_need_its_folder(kvq, folder):
    result = kvq("serve", "--model", str(folder), "--prefix-store-size", "3GiB", "--dry-run")
    assert result.exit_code == 2 and "need --prefix-store DIR" in result.stderr


@pytest.mark.parametrize(
    "given", [{"folder": "a"}, {"artifact": "raw"}, {"folder": "a", "artifact": "raw", "sice": "1GiB"}]
)
def test_wrong_settings_of_a_store(given):
    with pytest.raises(UsageError, match="kv_connector_extra_config"):
        StoreSettings.of_extra_config(given)
