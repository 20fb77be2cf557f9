"""The built-in model: prose splits, prompt lengths, retrieval of a needle."""

import random

import pytest

from kvq_cli import reference
from kvq_cli.reference import prompts


@pytest.mark.parametrize("text", [reference.prose, reference.pydoc])
def test_an_unknown_split_is_refused(text):
    with pytest.raises(ValueError, match="unknown split 'test'.*calibration, evaluation"):
        text("test")


def test_prose_splits_are_long_and_disjoint():
    calibration, evaluation = (set(reference.documents(split)) for split in reference.SPLITS)
    assert not calibration & evaluation
    assert len(reference.prose("calibration")) + len(reference.prose("evaluation")) > 1_500_000


def test_variable_tracking_answer_has_at_most_thirty_tokens():
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(reference.model_path() / "tokenizer.json"))
    rng = random.Random(0)
    for _ in range(50):
        names = ["".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)) for _ in range(5)]
        assert len(tokenizer.encode(prompts.chain_answer(names), add_special_tokens=False).ids) <= 30


def test_model_retrieves_a_needle():
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(reference.model_path())
    model = transformers.AutoModelForCausalLM.from_pretrained(reference.model_path())
    found = 0
    for key in ("rough-sun", "calm-oak", "odd-cup", "shy-river", "green-lamp"):
        rng = random.Random(key)
        value, depth = str(rng.randint(1_000_000, 9_999_999)), rng.randrange(11)
        sentences = [prompts.NOISE] * 10
        sentences.insert(depth, prompts.needle(key, value))
        text = prompts.prompt(prompts.context(sentences), prompts.question("numbers", [key]))
        inputs = tokenizer(text, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=32, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        found += value in tokenizer.decode(output)
    assert found >= 4
