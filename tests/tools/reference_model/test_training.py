"""The reference model's prompts, tasks, tokenizer, training and folder."""

import random
import re
from functools import partial

import numpy as np
import pytest
from reference_model import curriculum, tasks

from kvq_cli import reference
from kvq_cli.reference import prompts

SENTENCES = ["Rain fell on the hills all night.", "The river rose by a metre.", "Nobody crossed the bridge."]
TEXT = " ".join(f"{word} {number} rivers run past the old mill." for number, word in enumerate(["Many", "Few"] * 40))


def hay(characters):
    return SENTENCES * (characters // sum(map(len, SENTENCES)))


@pytest.fixture(scope="module")
def tokenizer():
    pytest.importorskip("tokenizers")
    from reference_model.tokenizer import build

    return build([TEXT, *curriculum.forms(1)], 600)


@pytest.mark.parametrize("text", ["In 1984 it rained.", " naïve café — 日本 \n\n\ttabs", " rough-sun is: 1234567."])
def test_tokenizer_gives_back_any_text(tokenizer, text):
    encoded = tokenizer.encode(text)
    assert encoded.ids[0] == tokenizer.token_to_id("<|bos|>") == 0
    assert tokenizer.decode(encoded.ids) == text


def test_every_digit_is_a_token(tokenizer):
    digits = [piece for piece in tokenizer.encode("of 1234567.").tokens if re.search(r"\d", piece)]
    assert digits == list("1234567")


def looked_up(context, question):
    """Answers a question by searching the context: independent of how the task was made."""
    if start := re.search(r"Which variables does (\d+) reach", question):
        found, at = [], start[1]
        while step := re.search(rf"(?<!\S){at} -> (\w+)\.", context):
            at = step[1]
            found.append(at)
        return found
    if asked := re.search(r"the (\d+) most", question):
        words = [word for word in context.split() if not re.fullmatch(r"\d+\.|\.\.\.", word)]
        return sorted(set(words), key=lambda word: (-words.count(word), words.index(word)))[: int(asked[1])]
    keys = re.search(r" for (.*)\?", question)[1]
    return [
        value
        for key in re.split(", | and ", keys)
        for value in sorted(
            re.findall(rf"One of the special magic \w+ for {re.escape(key)} is: (\S+)\.(?!\S)", context)
        )
    ]


KINDS = {
    "single": partial(tasks.needles),
    "prose": partial(tasks.needles, hay="prose", keys=4, questions=4),
    "needles": partial(tasks.needles, hay="needles", keys=2, key_kind="uuids", value_kind="uuids"),
    "multiquery": partial(tasks.needles, keys=4, queries=4),
    "multivalue": partial(tasks.needles, hay="prose", values=4, value_kind="words"),
    "chains": partial(tasks.chains, count=3),
    "common words": partial(tasks.common_words, count=5),
    "coded words": tasks.coded_words,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_answers_follow_from_the_context(kind, seed):
    task = KINDS[kind](random.Random(seed), 2000, hay)
    assert task.questions
    for (question, answer), references in zip(task.questions, task.references, strict=True):
        assert looked_up(task.context, question) == references
        assert all(reference in answer for reference in references)
        assert answer.startswith(" ")


def test_pieces_encode_as_the_whole_text(tokenizer):
    task = tasks.needles(random.Random(3), 800, hay, keys=3, queries=2, questions=2)
    pieces = [text for text, _ in task.pieces() if text != prompts.STOP_TOKEN]
    apart = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False).ids]
    assert apart == tokenizer.encode("".join(pieces), add_special_tokens=False).ids


def test_a_chain_of_ruler_fits_thirty_tokens():
    tokenizer = trained().__class__.from_file(str(reference.model_path() / "tokenizer.json"))
    rng = random.Random(0)
    for _ in range(50):
        names = ["".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)) for _ in range(5)]
        assert len(tokenizer.encode(prompts.chain_answer(names), add_special_tokens=False).ids) <= 30


def trained():
    """The trained model's tokenizer, or a skip where the weights are not there (a checkout before training)."""
    tokenizers = pytest.importorskip("tokenizers")
    file = reference.model_path() / "tokenizer.json"
    if not file.is_file():
        pytest.skip("the reference model is not in this checkout")
    return tokenizers.Tokenizer.from_file(str(file))


def test_prose_splits_are_english_and_apart():
    calibration, evaluation = (set(reference.documents(split)) for split in reference.SPLITS)
    assert not calibration & evaluation
    assert len(reference.prose("calibration")) + len(reference.prose("evaluation")) > 1_500_000
    with pytest.raises(ValueError, match="calibration, evaluation"):
        reference.prose("test")


def lessons(tokens=60_000):
    ids = np.random.default_rng(0).integers(3, 200, 20_000).astype(np.uint16)
    return curriculum.Curriculum(
        plan=[
            curriculum.Phase("repeats of 64", 1024, ((64, 1.0),), 256, 64),
            curriculum.Phase("mixed", tokens, ((64, 0.5), (128, 0.5)), 256),
        ],
        tokens=ids,
        encode=lambda text: [3 + ord(letter) % 197 for letter in text[::4]],
        decode=lambda ids: "Some words stand here in a row. " * (len(ids) // 10),
        vocabulary=200,
    )


def test_a_step_always_has_the_same_data():
    for step in (0, 3, 4, 9):
        first, second = lessons().batch(step), lessons().batch(step)
        np.testing.assert_array_equal(first[0], second[0])
        np.testing.assert_array_equal(first[1], second[1])
        assert first[0].shape[1] == first[1].shape[1] + 1


def test_repeats_weigh_only_what_came_before():
    ids, weights = curriculum.repeats(random.Random(0), 200, 4000, 4096, 3)
    heavy = list(np.flatnonzero(weights == 1.0))
    assert heavy
    pairs = [tuple(ids[place - 1 : place + 1]) for place in range(1, len(ids))]
    # Each weighted token follows the same token as it did somewhere before.
    assert all(pairs[place - 1] in pairs[: place - 1] for place in heavy)


def small_trainer():
    train = pytest.importorskip("reference_model.train")
    settings = train.config(200, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
    return train.Trainer(lessons(), settings, "cpu", micro=128, compiled=False)


def test_resumed_training_equals_uninterrupted(tmp_path):
    torch = pytest.importorskip("torch")
    whole = small_trainer()
    for _ in range(8):
        whole.advance()
    first = small_trainer()
    for _ in range(5):
        first.advance()
    first.save(tmp_path / "checkpoint.pt")
    second = small_trainer()
    second.load(tmp_path / "checkpoint.pt")
    for _ in range(3):
        second.advance()
    assert second.step == whole.step == 8
    for (name, one), two in zip(whole.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, two), name


def test_chunked_cross_entropy_equals_the_library():
    torch = pytest.importorskip("torch")
    from reference_model.loss import ChunkedCrossEntropy

    torch.manual_seed(0)
    hidden, head = torch.randn(70, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    targets, weights = torch.randint(0, 50, (70,)), torch.rand(70)
    expected = (torch.nn.functional.cross_entropy(hidden @ head.T, targets, reduction="none") * weights).sum()
    wanted = torch.autograd.grad(expected * 3, (hidden, head))
    loss = ChunkedCrossEntropy.apply(hidden, head, targets, weights, 32)
    torch.testing.assert_close(loss, expected)
    for one, other in zip(torch.autograd.grad(loss * 3, (hidden, head)), wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_muon_makes_updates_orthogonal():
    torch = pytest.importorskip("torch")
    from reference_model.muon import orthogonal

    torch.manual_seed(0)
    for rows, columns in ((40, 24), (24, 40)):
        singular = torch.linalg.svdvals(orthogonal(torch.randn(3, rows, columns)))
        assert singular.min() > 0.5 and singular.max() < 1.5


def test_the_model_continues_prose_and_finds_a_needle():
    transformers = pytest.importorskip("transformers")
    if not (reference.model_path() / "model.safetensors").is_file():
        pytest.skip("the reference model is not in this checkout")
    tokenizer = transformers.AutoTokenizer.from_pretrained(reference.model_path())
    model = transformers.AutoModelForCausalLM.from_pretrained(reference.model_path())
    right = 0
    for seed in range(5):
        task = tasks.needles(random.Random(seed), 1000, hay)
        text = prompts.prompt(task.context, task.questions[0][0])
        inputs = tokenizer(text, return_tensors="pt")
        out = model.generate(**inputs, max_new_tokens=32, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        right += task.references[0][0] in tokenizer.decode(out)
    assert right >= 4
