"""`--when-full` of `kvq generate` and `kvq chat`: what happens where a text is as long as the model's context."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import AutoTokenizer

from kvq_cli.attention.attach import attach
from kvq_cli.cli.chat_session import ChatSession
from kvq_cli.cli.conversation import Conversation
from kvq_cli.cli.interrupts import Interrupts
from kvq_cli.cli.options import CompressionOptions, ModelOptions
from kvq_cli.cli.output import Output
from kvq_cli.cli.text_generator import Decoding, attached_generator
from kvq_cli.errors import UsageError
from kvq_cli.evaluation.chat_template import chat_opening, encode_prompt
from kvq_cli.methods.registry import build_parsed
from kvq_cli.models import load_model
from kvq_cli.reference import model_path

CONTEXT = 96
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
STORY = " The river flows through the old town." * 9
KIVI = "kivi:group=16:residual=16:sinks=8"
COMPRESSED = ("--method", "kivi", "--set", "group=16", "--set", "residual=16", "--set", "sinks=8")


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """The built-in model, with a context of 96 tokens; `short(template)`: with a chat template."""

    def make(template: str | None = None) -> str:
        folder = tmp_path_factory.mktemp("model") / "short"
        shutil.copytree(model_path(), folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
        tokenizer = AutoTokenizer.from_pretrained(model_path())
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        return str(folder)

    return make


@pytest.fixture(scope="module")
def plain(short):
    return short()


@pytest.fixture(scope="module")
def with_template(short):
    return short(TEMPLATE)


def greedy(kv, ids: list[int], tokens: int) -> list[int]:
    """The most probable continuation, from single passes over all tokens before it into a new cache."""
    cache = kv.new_cache()
    out = kv.model.generate(torch.tensor([ids]), past_key_values=cache, max_new_tokens=tokens, do_sample=False)
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize(("method", "first"), [("fp16", 4), (KIVI, 8)])
def test_dropping_goes_on_as_a_text_of_the_kept_tokens(kvq, plain, method, first):
    """The first tokens and the newest, half a context together, read as a prompt of their own; three times."""
    loaded = load_model(plain, dtype="float32")
    ids = encode_prompt(loaded.tokenizer, STORY)
    assert CONTEXT // 2 < len(ids) < CONTEXT
    wanted, text, dropped = [], ids, 0
    with attach(loaded.model, build_parsed(method)) as kv:
        while len(wanted) < 120:
            if len(text) == CONTEXT:
                text = text[:first] + text[-(CONTEXT // 2 - first) :]
                dropped += CONTEXT // 2
            added = greedy(kv, text, min(120 - len(wanted), CONTEXT - len(text)))
            wanted, text = wanted + added, text + added
    assert dropped == 144
    given = ("--model", plain, "--dtype", "float32", "-n", 120, "--when-full", "drop-oldest")
    given += ("--method", "fp16") if method == "fp16" else COMPRESSED
    result = kvq("generate", STORY, *given)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == loaded.tokenizer.decode(wanted) + "\n"
    said = "was full: 144 tokens were dropped, the oldest; the others were read anew"
    assert f"the context of {plain} (96 tokens) {said}" in result.stderr.splitlines()
    document = json.loads(kvq("generate", STORY, *given, "--json").stdout)
    assert (document["new_tokens"], document["dropped_tokens"]) == (120, 144)
    assert document["cache"]["tokens"] == len(text) - 1


def test_an_answer_stops_where_the_context_is_full(kvq, plain):
    given = ("generate", STORY, "--model", plain, "--method", "fp16")
    prompt = json.loads(kvq(*given, "-n", 1, "--json").stdout)["prompt_tokens"]
    result = kvq(*given, "-n", 40, "--json")
    assert json.loads(result.stdout)["new_tokens"] == CONTEXT - prompt < 40
    assert "(96 tokens) was full: the answer ends there; --when-full drop-oldest" in result.stderr
    assert "was full" not in kvq(*given, "-n", CONTEXT - prompt).stderr


def test_prompts_longer_than_the_context(kvq, plain):
    given = ("generate", STORY * 2, "--model", plain, "--method", "fp16", "-n", 5, "--json")
    assert "shorten it, or drop its oldest tokens with --when-full drop-oldest" in kvq(*given).stderr
    document = json.loads(kvq(*given, "--when-full", "drop-oldest").stdout)
    assert document["dropped_tokens"] == document["prompt_tokens"] - CONTEXT // 2 and document["new_tokens"] == 5
    assert document["cache"]["tokens"] == CONTEXT // 2 + 4


@pytest.mark.parametrize("template", [False, True])
def test_chat_drops_whole_turns(plain, with_template, capsys, template):
    """The answer is that of a conversation which had the other turns only."""
    folder = with_template if template else plain
    options = ModelOptions(folder, dtype="float32"), CompressionOptions("fp16"), "exact"
    with attached_generator(*options, Decoding(6, drop_oldest=True)) as generator:
        conversation = Conversation(generator, note=Output().note)
        chat = ChatSession(conversation, Output(), Interrupts())
        messages = [f"The {name} flows through the old town of the north" for name in ("river", "water", "road")]
        chat.say(messages[0])
        while "turns were dropped" not in (err := capsys.readouterr().err):
            kept = list(conversation.messages)
            chat.say(messages[1])
        turns = len(kept) // 2
        left = conversation.messages[:-2]
        assert 0 < len(left) < len(kept) and left == kept[-len(left) :]
        assert f"the context is full: {turns - len(left) // 2} of {turns} turns were dropped, the oldest;" in err
        fresh = Conversation(generator)
        fresh.load(left)
        fresh.ask(messages[1], lambda piece: None)
        assert (conversation.ids, conversation.messages) == (fresh.ids, fresh.messages)
        assert len(conversation.ids) - 6 <= CONTEXT // 2
        assert conversation.cache.get_seq_length() == len(conversation.ids) - 1
        cache = conversation.cache
        chat.say("and")  # the cache goes on again
        assert conversation.cache is cache


def test_an_answer_longer_than_the_context_keeps_the_system_message(with_template):
    options = ModelOptions(with_template, dtype="float32"), CompressionOptions("fp16"), "exact"
    with attached_generator(*options, Decoding(90, drop_oldest=True)) as generator:
        tokenizer = generator.loaded.tokenizer
        conversation = Conversation(generator, system="Be brief and write of rivers.", note=lambda line: None)
        first = conversation.prompt_ids("The town")
        opening = chat_opening(tokenizer, [{"role": "system", "content": conversation.system}])
        assert tokenizer.decode(first[:opening]) == "[system]Be brief and write of rivers.[user]"
        answer = conversation.ask("The town", lambda piece: None)
        before = (first + answer.ids)[:CONTEXT]
        kept = before[:opening] + before[-(CONTEXT // 2 - opening) :]
        assert opening > 4 and answer.dropped == CONTEXT // 2
        alone = generator.generate(kept, generator.new_cache(0), lambda piece: None)
        begin = CONTEXT - len(first)
        assert alone.ids[: len(answer.ids) - begin] == answer.ids[begin:]
        assert conversation.cache is None  # it holds a part of the turn
        conversation.ask("and", lambda piece: None)
        assert [message["content"] for message in conversation.messages][::2] == ["and"]


def test_beams_are_refused():
    with pytest.raises(UsageError, match="--num-beams .* with --when-full drop-oldest: use one of them"):
        Decoding(num_beams=2, drop_oldest=True)
