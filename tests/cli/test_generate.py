"""`kvq generate` on the built-in model: prompt sources, decoding options, reports, errors."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from random_artifacts import random_parts
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvq_cli.artifact import save_artifact
from kvq_cli.cli.character_streamer import CharacterStreamer
from kvq_cli.cli.text_generator import Decoding
from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build
from kvq_cli.models import load_model
from kvq_cli.reference import model_path
from kvq_cli.reference.prompts import NOISE

ROOT = Path(__file__).parents[2]
PROMPT = " The history of the town begins in the year"


@pytest.fixture
def generate(kvq):
    """Generate 12 tokens and return the JSON document."""

    def run(*arguments, input=""):
        result = kvq("generate", "--json", "-n", 12, *arguments, input=input)
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    return run


def test_fp16_equals_transformers(generate):
    loaded = load_model("reference", dtype="float32")
    ids = loaded.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    out = loaded.model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    found = generate(PROMPT, "--method", "fp16", "--dtype", "float32")
    assert found["text"] == loaded.tokenizer.decode(out, skip_special_tokens=True)
    assert (found["prompt_tokens"], found["new_tokens"]) == (ids.shape[1], len(out))
    assert found["cache"]["tokens"] == ids.shape[1] + len(out) - 1  # the last token is never fed back


def test_prompt_from_argument_file_and_stdin(generate, tmp_path):
    """As it is, with its final line break, without a byte order mark."""
    prompt = f"{PROMPT}\n"
    (tmp_path / "prompt.txt").write_text(f"\ufeff{prompt}", encoding="utf-8")
    found = [
        generate(prompt),
        generate("--file", "prompt.txt"),
        generate(input=prompt),
        generate(input=f"\ufeff{prompt}"),
        generate("-", input=prompt),
    ]
    tokens = len(AutoTokenizer.from_pretrained(model_path())(prompt)["input_ids"])
    assert {(each["text"], each["prompt_tokens"]) for each in found} == {(found[0]["text"], tokens)}


def test_text_goes_to_stdout_and_summary_to_stderr(kvq, generate):
    result = kvq("generate", PROMPT, "-n", 12)
    assert result.stdout == generate(PROMPT)["text"] + "\n"
    method, limit, speed, cache = result.stderr.strip().splitlines()
    assert limit == "the answer ends at the limit of 12 tokens; raise --max-new-tokens for a longer one"
    assert method.startswith(
        "method: kivi, 2 bits (default: no 2-bit artifact in artifacts/reference); uncompressed: --method fp16"
    )
    assert re.fullmatch(r"\d+ tokens in [\d.]+ s, [\d.]+ tokens/s after [\d.]+ s of prefill; prompt \d+ tokens", speed)
    assert "in 16 bit" in cache and "bits per number (nominal 2)" in cache
    assert kvq("generate", PROMPT, "-n", 2, "--quiet").stderr == ""


def test_prompt_is_a_message_where_the_tokenizer_has_a_chat_template(generate, kvq, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    folder = tmp_path / "instruct"
    shutil.copytree(model_path(), folder)
    tokenizer.save_pretrained(folder)
    exact = ["--model", folder, "--method", "fp16", "--dtype", "float32"]
    found = generate("The town", *exact)
    assert found["chat_template"] is True
    assert found["prompt_tokens"] == len(tokenizer("[user]The town[assistant]", add_special_tokens=False)["input_ids"])
    system = generate("The town", *exact, "--system", "Be brief.")
    prompt = "[system]Be brief.[user]The town[assistant]"
    assert system["prompt_tokens"] == len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    raw = generate("The town", *exact, "--raw")
    assert raw["chat_template"] is False and raw["prompt_tokens"] == len(tokenizer("The town")["input_ids"])
    assert "--raw continues it as it is" in kvq("generate", "The town", "-n", 2, *exact).stderr
    assert generate("The town")["chat_template"] is False  # the built-in model has no chat template


def test_end_token_at_once_is_said(kvq):
    """Behind a complete answer, the model has only its stop token left."""
    needle = "One of the special magic numbers for calm-oak is: 7654321."
    question = "\nQuestion: What is the special magic number for calm-oak?\nAnswer:"
    result = kvq("generate", f" {needle} {NOISE}{question} calm-oak is: 7654321.", "--method", "fp16")
    assert (result.exit_code, result.stdout) == (0, "\n")
    assert "the answer is empty: the model's first token was a stop token\n1 tokens in" in result.stderr


def test_default_is_the_best_artifact(kvq, tmp_path):
    for name in ("kvquant-2bit", "channelkv-2bit", "temporalkv-1bit"):
        shutil.copytree(ROOT / "artifacts" / "reference" / name, tmp_path / "artifacts" / "reference" / name)
    best = "method: channelkv, 2 bits, artifacts/reference/channelkv-2bit (default: lowest calibration error)"
    assert best in kvq("generate", PROMPT, "-n", 2).stderr
    one_bit = kvq("generate", PROMPT, "-n", 2, "--bits", 1).stderr
    assert "method: temporalkv, 1 bit, artifacts/reference/temporalkv-1bit (default" in one_bit
    assert (
        "method: kivi, 2 bits; uncompressed: --method fp16\n"
        in kvq("generate", PROMPT, "-n", 2, "--set", "sinks=8").stderr
    )
    assert "method: fp16, no compression\n" in kvq("generate", PROMPT, "-n", 2, "--method", "fp16").stderr


def test_default_is_an_artifact_of_bits_that_other_methods_lack(kvq, fails, tiny_folder, tmp_path):
    loaded = load_model(str(tiny_folder), device="cpu")
    config, tensors = random_parts(build("klt", bits=5.5), loaded.model)
    folder = tmp_path / "artifacts" / "tiny" / "klt-5.5bit"
    words = [PROMPT, "-n", 2, "--model", tiny_folder, "--bits", 5.5]
    says = "--bits 5.5: no 5.5-bit artifact in artifacts/tiny, and without one: method kivi: bits=5.5 is not"
    fails("generate", *words, code=2, says=says)
    save_artifact(folder, config, tensors, "card")
    result = kvq("generate", *words)
    assert result.exit_code == 0, result.stderr
    assert "method: klt, 5.5 bits, artifacts/tiny/klt-5.5bit (default: calibrated)" in result.stderr


def test_sampling_is_repeatable_and_not_greedy(generate):
    hot = ["--temperature", 1.5, "--top-k", 50, "--top-p", 0.95]
    first, again = generate(PROMPT, *hot), generate(PROMPT, *hot)
    assert first["text"] == again["text"] != generate(PROMPT)["text"]
    assert generate(PROMPT, *hot, "--seed", 1)["text"] != first["text"]


def test_beam_search_and_chunked_prefill(generate):
    exact = ["--method", "fp16", "--dtype", "float32"]  # in 16 bit the order of sums may decide between two tokens
    plain = generate(PROMPT, *exact)
    assert generate(PROMPT, *exact, "--prefill-chunk", 3)["text"] == plain["text"]
    beams = generate(PROMPT, *exact, "--num-beams", 2)
    assert beams["new_tokens"] > 0 and beams["tokens_per_second"] is None


def test_prompt_lookup_gives_the_same_text(generate):
    exact = ["--method", "kivi", "--bits", 2, "--set", "group=16", "--set", "residual=16", "--dtype", "float32"]
    text = f"{PROMPT} 1850.{PROMPT} 1850.{PROMPT}"
    plain, drafted = generate(text, *exact), generate(text, *exact, "--prompt-lookup", 4)
    assert drafted["text"] == plain["text"] and drafted["cache"]["parts"]["rollback"] > 0


def test_long_prompt_is_cached_in_fewer_bytes(generate):
    found = generate(PROMPT * 40, "--method", "kivi", "--bits", 2, "--prefill", "compressed")
    cache = found["cache"]
    assert cache["bytes"] == sum(cache["parts"].values()) < 0.6 * cache["fp16_bytes"]
    assert cache["measured_bits"] == pytest.approx(16 * cache["bytes"] / cache["fp16_bytes"])
    assert found["prefill"] == "compressed" and found["method"]["bits"] == 2


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([""], 2, "the prompt is empty"),
        (["  \n"], 2, "the prompt is empty"),
        ([], 2, "the prompt is empty"),  # stdin holds nothing
        (["x", "--file", "y"], 2, "not both"),
        (["--file", "gone.txt"], 1, "--file gone.txt: No such file"),
        (["--file", "."], 1, "--file .: Is a directory"),
        (["x", "--top-p", "0.5"], 2, "add --temperature"),
        (["x", "--num-beams", "2", "--temperature", "1"], 2, "use one of them"),
        (["x", "--prompt-lookup", "3", "--num-beams", "2"], 2, "--prompt-lookup with --num-beams"),
        (["x", "--temperature", "inf"], 2, "--temperature inf"),
        (["x", "--seed", 2**32], 2, "--seed"),
        (["\udcff\udcfe"], 2, "the prompt is not UTF-8 text"),  # bytes on the command line, as Python hands them on
        (["x", "--method", "nonsense"], 2, "unknown method 'nonsense'"),
        (["x", "--method", "kivi", "--bits", "7"], 2, "bits=7 is not one of 1, 2, 3, 4, 8"),
        (["x", "--set", "nonsense=1"], 2, "has no option 'nonsense'"),
        (["x", "--method", "temporalkv"], 1, "run `kvq calibrate --method temporalkv --bits 2`"),
        (["x", "--artifact", "gone"], 1, "no artifact at gone"),
        (["x", "--model", "./gone"], 1, "--model ./gone: no such folder"),
        (["x", "--model", "./smolm2"], 1, "--model ./smolm2: no such folder; did you mean 'smollm2'?"),
        (["x", "--model", "Smolm2"], 1, "; did you mean 'smollm2'?"),
        (["x", "--model", "nobody/nothing"], 1, "--model nobody/nothing: no such folder"),
        (["x", "--system", "Be brief."], 2, "the tokenizer of reference has no chat template"),
        (["x", "--system", "Be brief.", "--raw"], 2, "--raw with --system"),
        (["x", "--device", "cuda:77"], 2, "--device cuda:77"),
        (["x", "--set", "group=48"], 2, "group=48"),  # head_dim is 64
        ([" word" * 5000], 2, "the prompt has"),
    ],
)
def test_bad_input_is_one_line(fails, arguments, code, says):
    fails("generate", *arguments, code=code, says=says)


def test_binary_prompt_file_is_an_error(fails, tmp_path):
    (tmp_path / "prompt.bin").write_bytes(b"\xff\xfe\x00")
    fails("generate", "--file", "prompt.bin", code=2, says="not UTF-8")


def test_decoding_arguments():
    assert Decoding().arguments(5, {"top_k": 9}) == {"max_new_tokens": 5, "do_sample": False}
    sampled = Decoding(temperature=0.5, top_p=0.9, top_k=3).arguments(5, {})
    assert sampled["do_sample"] and (sampled["temperature"], sampled["top_p"], sampled["top_k"]) == (0.5, 0.9, 3)
    with pytest.raises(UsageError, match="--top-k"):
        Decoding(top_k=3)


def test_streamer_writes_whole_characters():
    """A byte-level tokenizer cuts characters into tokens; the pieces join to the text and none holds a broken one."""
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    text = " naïve café 日本語\n second line 🙂 end"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces: list[str] = []
    stream = CharacterStreamer(tokenizer, pieces.append)
    stream.put(torch.tensor([[1, 2, 3]]))  # the prompt
    for token in ids:
        stream.put(torch.tensor([token]))
    stream.finish()
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)
    assert len(pieces) > 5


#: Of Llama 2, and of Mistral and T5: both strip the space at the beginning of the text.
STRIPPING = {
    "strip": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
}


@pytest.mark.parametrize("decoder", STRIPPING)
def test_streamer_keeps_the_indent_of_each_line(decoder):
    words = ["▁def", "▁f", ":", "<0x0A>", "▁▁▁", "▁return", "▁1", "</s>"]
    built = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=":"))
    built.decoder = STRIPPING[decoder]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built, eos_token="</s>")
    pieces: list[str] = []
    stream = CharacterStreamer(tokenizer, pieces.append)
    stream.put(torch.tensor([[0]]))  # the prompt
    ids = [0, 1, 2, 3, 4, 5, 6, 3, 3, 5, 3, 7, 5]  # a special token may stand between the line break and the indent
    for token in ids:
        stream.put(torch.tensor([token]))
    stream.finish()
    assert (
        "".join(pieces) == "def f:\n    return 1\n\n return\n return" == tokenizer.decode(ids, skip_special_tokens=True)
    )


@pytest.mark.parametrize("locale", ["strict", "surrogateescape"])
def test_binary_stdin_is_refused(kvq_process, monkeypatch, locale):
    """What Python does with such bytes depends on the locale."""
    monkeypatch.setenv("PYTHONIOENCODING", f"utf-8:{locale}")
    process = kvq_process("generate", "-n", 2)
    process.stdin.buffer.write(b"\xff\xfe")
    assert process.communicate(timeout=60)[1] == "kvq: error: the prompt is not UTF-8 text\n"
    assert process.returncode == 2


def test_no_bits_are_not_the_default(fails):
    fails("generate", PROMPT, "--bits", 0, code=2, says="--bits 0: no 0-bit artifact in artifacts/reference")


@pytest.mark.parametrize(("method", "says"), [("innerq", True), ("kivi", False)])
def test_methods_fit_to_a_part_of_the_prompt_are_named(kvq, method, says):
    result = kvq("generate", PROMPT, "-n", 1, "--method", method, "--bits", 2, "--prefill-chunk", 3)
    assert result.exit_code == 0
    assert ("innerq is fit to the first 3 tokens of the prompt alone" in " ".join(result.stderr.split())) == says
