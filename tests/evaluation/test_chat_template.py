"""When the chat template is applied: by default where the tokenizer has one, and results say so."""

import copy
import dataclasses
from types import SimpleNamespace

import pytest
from tokenizers.processors import TemplateProcessing

from kvq_cli.errors import UsageError
from kvq_cli.evaluation.chat_template import chat_template_note, encode_prompt, uses_chat_template
from kvq_cli.evaluation.compared_methods import compared_methods
from kvq_cli.evaluation.generation import prompt_key
from kvq_cli.evaluation.runner import evaluate
from kvq_cli.evaluation.settings import EvaluationSettings
from kvq_cli.methods.registry import build

TEMPLATE = "<|bos|>[{{ messages[0]['content'] }}]{% if add_generation_prompt %}>{% endif %}"


@pytest.fixture(scope="module")
def instruct(loaded):
    """The tiny model as an instruction-tuned model: its tokenizer has a chat template."""
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.chat_template = TEMPLATE
    return dataclasses.replace(loaded, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def run(instruct):
    def start(out, **changes):
        settings = {"tasks": ["vt"], "seqlens": [1024], "samples": 1, "save_prompts": True, **changes}
        return evaluate(instruct, compared_methods([build("fp16")]), EvaluationSettings(**settings), out)

    return start


@pytest.fixture
def closing(loaded):
    """The tiny model with a tokenizer that appends its EOS to every text."""
    tokenizer = copy.deepcopy(loaded.tokenizer)
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (tokenizer.bos_token, tokenizer.eos_token)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{tokenizer.bos_token} $A {tokenizer.eos_token}", special_tokens=special
    )
    return dataclasses.replace(loaded, tokenizer=tokenizer)


@pytest.mark.parametrize("text", ["The town", "The town<eos>", "<eos> The town", "The <bos>"])
def test_prompts_have_no_special_tokens_behind_them(loaded, closing, text):
    """But for those that the text itself ends with."""
    tokenizer = closing.tokenizer
    text = text.replace("<eos>", tokenizer.eos_token).replace("<bos>", tokenizer.bos_token)
    plain = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer(text).input_ids == [tokenizer.bos_token_id, *plain, tokenizer.eos_token_id]
    assert encode_prompt(tokenizer, text) == [tokenizer.bos_token_id, *plain]
    assert encode_prompt(tokenizer, text, special_tokens=False) == plain
    assert encode_prompt(loaded.tokenizer, text) == loaded.tokenizer(text).input_ids


def test_evaluations_encode_prompts_without_eos_behind_them(loaded, closing):
    from kvq_cli.evaluation.lm_eval.model import AttachedLM

    model = AttachedLM(closing, None)
    context, continuation = model._encode_pair("The town", " is old")
    whole = closing.tokenizer("The town is old", add_special_tokens=False).input_ids
    assert context + continuation == [closing.tokenizer.bos_token_id, *whole]
    assert (
        prompt_key(closing, "The town", False)["first_prompt_sha256"]
        == (prompt_key(loaded, "The town", False)["first_prompt_sha256"])
    )


@pytest.mark.parametrize(
    ("template", "wanted", "default", "applied"),
    [
        (TEMPLATE, None, True, True),
        (TEMPLATE, None, False, False),
        (TEMPLATE, True, False, True),
        (TEMPLATE, False, True, False),
        (None, None, True, False),
        (None, False, True, False),
    ],
)
def test_default_follows_the_tokenizer(template, wanted, default, applied):
    loaded = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=template), name="tiny")
    assert uses_chat_template(loaded, wanted, default) is applied


def test_wanted_without_a_template_is_an_error():
    loaded = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=None), name="tiny")
    with pytest.raises(UsageError, match="--chat-template: the tokenizer of tiny has none; drop the flag"):
        uses_chat_template(loaded, True)


def test_ruler_applies_it_by_default_and_results_have_the_resolved_value(run, tmp_path):
    one = run(tmp_path)["methods"]["fp16"]
    assert one["config"]["chat_template"] == {"vt": True} and one["configs"]["vt-1024"]["chat_template"] is True
    (log,) = tmp_path.glob("*/*.jsonl")
    assert '"prompt": "<|bos|>[Memorize and track' in log.read_text()
    run(tmp_path, chat_template=True)
    assert list(tmp_path.glob("*/*.jsonl")) == [log]  # the same samples under the same resume key
    plain = run(tmp_path, chat_template=False)["methods"]["fp16"]
    assert plain["config"]["chat_template"] == {"vt": False} and len(list(tmp_path.glob("*/*.jsonl"))) == 2


def test_answer_prefix_follows_the_template(run, tmp_path):
    run(tmp_path)
    (log,) = tmp_path.glob("*/*.jsonl")
    assert "in the text above.]> Answer: According to the chain(s) of variable assignment" in log.read_text()


def test_note_names_tasks_only_where_they_differ():
    assert chat_template_note({}) is None
    assert chat_template_note({"vt": True, "cwe": True}) == "chat template: applied"
    assert chat_template_note({"vt": False}) == "chat template: not applied"
    assert chat_template_note({"a": True, "b": False, "c": True}) == "chat template: applied to a, c; not to b"
