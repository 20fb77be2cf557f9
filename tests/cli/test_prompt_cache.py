"""`kvq generate --save-cache` and `--load-cache` on the built-in model."""

import json
import shutil

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from kvq_cli.reference import model_path, prompts

SENTENCES = [prompts.NOISE] * 8 + [prompts.needle("rough-sun", "7412")] + [prompts.NOISE] * 8
DOCUMENT = " " + prompts.context(SENTENCES)
QUESTION = prompts.question("numbers", ["rough-sun"]).removeprefix("\n")


@pytest.fixture
def run(kvq):
    """Generate and return the JSON document."""

    def run(*arguments):
        result = kvq("generate", "--json", "-n", 12, *arguments)
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    return run


def test_questions_about_a_saved_document(run, kvq, fails, tmp_path):
    (tmp_path / "document.txt").write_text(DOCUMENT + "\n")
    exact = ["--method", "fp16", "--dtype", "float32"]
    saved = run("--file", "document.txt", "--save-cache", "sub/cache", *exact)
    assert saved["file_bytes"] == (tmp_path / "sub/cache").stat().st_size
    assert saved["cache"]["tokens"] == saved["prompt_tokens"]
    whole = run(f"{DOCUMENT}\n{QUESTION}", *exact)
    for beams in (1, 2):
        asked = run(QUESTION, "--load-cache", "sub/cache", *exact, "--num-beams", beams)
        assert (asked["text"], asked["prompt_tokens"]) == (whole["text"], whole["prompt_tokens"])
    assert "7412" in whole["text"]
    loaded = ["generate", QUESTION, "--load-cache", "sub/cache"]
    fails(*loaded, *exact, "--system", "Be brief.", code=2, says="--system with --load-cache")
    fails(*loaded, code=2, says="sub/cache holds a cache of fp16, not of kivi")
    fails(*loaded, "--method", "fp16", code=2, says="saved with dtype=float32, not dtype=bfloat16")
    fails(*loaded, *exact, "--prefill", "compressed", code=2, says="saved with prefill=exact, not prefill=compressed")
    data = bytearray((tmp_path / "sub/cache").read_bytes())
    data[-5] ^= 1
    (tmp_path / "altered").write_bytes(data)
    (tmp_path / "cut").write_bytes(data[:-100])
    for name, says in (("altered", "altered was altered"), ("cut", "cut is not a readable safetensors file")):
        fails("generate", "x", "--load-cache", name, *exact, code=1, says=says)


def test_a_tokenizer_that_appends_eos_continues_a_document_as_one_prompt(run, tiny_folder, tmp_path):
    folder, tokenizer = tmp_path / "model", AutoTokenizer.from_pretrained(tiny_folder)
    shutil.copytree(tiny_folder, folder)
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (tokenizer.bos_token, tokenizer.eos_token)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{tokenizer.bos_token} $A {tokenizer.eos_token}", special_tokens=special
    )
    tokenizer.save_pretrained(folder)
    exact = ["--method", "fp16", "--model", folder]
    for document in ("The town", "The town\n"):
        run(document, "--save-cache", "cache", *exact)
        asked, whole = run("is old", "--load-cache", "cache", *exact), run("The town\nis old", *exact)
        assert (asked["text"], asked["prompt_tokens"]) == (whole["text"], whole["prompt_tokens"])
        assert whole["prompt_tokens"] == len(tokenizer("The town\nis old").input_ids) - 1


def test_a_packed_document_in_a_chat_template(run, kvq, fails, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    end = "{% if add_generation_prompt %}[assistant]{% endif %}"
    tokenizer.chat_template = "[user]{{ messages[-1]['content'] | trim }}" + end
    folder = tmp_path / "instruct"
    shutil.copytree(model_path(), folder)
    tokenizer.save_pretrained(folder)
    own = ["--model", folder, "--method", "kivi", "--set", "residual=32"]
    saved = run(f"{DOCUMENT}  ", "--save-cache", "cache", *own)
    report = saved["cache"]
    assert saved["chat_template"] and report["compressed_tokens"] > 0.8 * report["tokens"]
    # The file holds what the report counts, but for room for later tokens.
    overhead = 8 * saved["prompt_tokens"] + len(DOCUMENT) + 16384
    assert 0 < saved["file_bytes"] - (report["bytes"] - report["parts"]["unused"]) < overhead
    asked = run(QUESTION, "--load-cache", "cache", *own)
    whole = run(f"{DOCUMENT.strip()}\n{QUESTION}", *own)
    assert asked["prompt_tokens"] == whole["prompt_tokens"] and asked["chat_template"]
    loaded = ["generate", QUESTION, "--load-cache", "cache", *own]
    fails(*loaded, "--raw", code=2, says="the document was saved in a chat template")
    tokenizer.chat_template += " "
    tokenizer.save_pretrained(folder)
    fails(*loaded, code=2, says="was saved in another chat template")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["x", "--save-cache", "a", "--load-cache", "b"], 2, "--save-cache with --load-cache"),
        (["x", "--load-cache", "gone"], 1, "--load-cache gone: no such file"),
        (["x", "--load-cache", "."], 1, "--load-cache .: Is a directory"),
        (["x", "--load-cache", "/dev/null"], 1, "--load-cache /dev/null: Not a regular file"),
        (["x", "--save-cache", "."], 2, "--save-cache .: is a folder"),
        (["x", "--save-cache", "/proc/none"], 1, "choose another --save-cache"),
    ],
)
def test_bad_files_are_refused_before_the_model_is_loaded(fails, arguments, code, says):
    fails("generate", *arguments, "--model", "./gone", code=code, says=says)
