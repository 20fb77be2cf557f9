"""Tasks of lm-eval in `kvq eval`: scores, compressed caches, resume."""

import copy
import dataclasses
import json
import linecache
import re
import sys
from pathlib import Path

import pytest
from run_records import without_run

from kvq_cli.attention.attach import attach
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.evaluation.compared_methods import compared_methods
from kvq_cli.evaluation.lm_eval import evaluation as evaluation_module
from kvq_cli.evaluation.lm_eval.evaluation import LmEvalEvaluation
from kvq_cli.evaluation.lm_eval.model import AttachedLM
from kvq_cli.evaluation.lm_eval.tasks import load_tasks, silence
from kvq_cli.evaluation.runner import evaluate
from kvq_cli.evaluation.settings import EvaluationSettings
from kvq_cli.methods.registry import build

COMPARED = [build("fp16"), build("kivi", bits=2, residual=32)]
FIGURES = {
    "lm_eval:sums": {"exact_match,strict-match", "exact_match,flexible-extract"},
    "lm_eval:letters": {"acc,none", "acc_norm,none"},
}


@pytest.fixture(scope="module")
def run(loaded, tasks, data_dir):
    def start(out, chosen=COMPARED, **changes):
        extra = {key: changes.pop(key) for key in ("track", "fresh", "note") if key in changes}
        settings = {"tasks": [f"lm_eval:{one}" for one in tasks.values()], "data_dir": str(data_dir), "batch_size": 1}
        return evaluate(loaded, compared_methods(chosen), EvaluationSettings(**{**settings, **changes}), out, **extra)

    return start


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    return out, run(out)


def records(out, label, task):
    (path,) = out.glob(f"{label}*/lm_eval:{task}-*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def test_records_have_scores_and_compressed_bytes(whole):
    out, document = whole
    for label in ("fp16", "kivi-2bit"):
        one = document["methods"][label]
        assert {task: {name for name in found if "," in name and "_stderr" not in name} for task, found in
                one["results"].items()} == FIGURES  # fmt: skip
        assert one["versions"] == {"lm_eval:sums": 3.0, "lm_eval:letters": 1.0}
        assert one["n-shot"] == {"lm_eval:sums": 2, "lm_eval:letters": 0}
        for task in ("sums", "letters"):
            kept = records(out, label, task)
            assert [record["index"] for record in kept] == list(range(6))
            for name, mean in one["results"][f"lm_eval:{task}"].items():
                if "," in name and "_stderr" not in name:
                    assert mean == pytest.approx(sum(record["scores"][name] for record in kept) / 6)
    for task in ("sums", "letters"):
        exact, packed = (records(out, label, task) for label in ("fp16", "kivi-2bit"))
        assert [one["prompt_sha256"] for one in exact] == [one["prompt_sha256"] for one in packed]
        assert all(a["responses"] != b["responses"] for a, b in zip(exact, packed, strict=True))
        assert all(a["cache"]["bytes"] > 1.5 * b["cache"]["bytes"] for a, b in zip(exact, packed, strict=True))
        assert all(one["cache"]["compressed"] > 30 for one in packed)


def test_a_task_that_samples_has_its_repeats(run, tasks, tmp_path):
    """pass@1 over three sampled answers a document, also of a run that is resumed with other samples in its batches."""
    path = tmp_path / "sampled" / "sums.yaml"
    path.parent.mkdir()
    text = (
        Path(tasks["sums"])
        .read_text()
        .replace("do_sample: false, temperature: 0.0", "do_sample: true, temperature: 0.9")
    )
    filters = text.index("filter_list:")
    path.write_text(text[:filters] + "repeats: 3\n" + text[text.index("metric_list:") :])

    def start(out, **changes):
        return run(tmp_path / out, tasks=[f"lm_eval:{path}"], **changes)["methods"]

    start("whole", samples=4, batch_size=4)
    start("parts", samples=1)
    start("parts", samples=4)
    start("seed", samples=2, seed=1)
    whole, parts, other = (records(tmp_path / out, "fp16", "sums") for out in ("whole", "parts", "seed"))
    assert all(len(one["responses"][0]) == len(set(one["responses"][0])) == 3 for one in whole)
    assert [one["responses"] for one in whole] == [one["responses"] for one in parts]
    assert all(a["responses"] != b["responses"] for a, b in zip(whole, other, strict=False))


def test_options_that_tasks_do_not_read_are_announced(run, tmp_path):
    given = {"num_fewshot": 1, "truncation": "middle", "max_new_tokens": 4, "max_length": 512, "samples": 1}
    notes, after = [], []
    run(tmp_path, [build("kivi", bits=2, residual=32)], note=notes.append, **given)
    assert [note for note in notes if note.startswith("note: ")] == [
        "note: --num-fewshot has no effect on lm_eval:letters: defined as zero-shot",
        "note: --truncation has no effect on lm_eval:letters: log-likelihoods, whose long prompts lose their beginning",
        "note: --max-new-tokens has no effect on lm_eval:letters: log-likelihoods, without generated answers",
    ]
    run(tmp_path, [build("kivi", bits=2, residual=32)], note=after.append, samples=1, max_length=512)
    assert not any(note.startswith("note: ") for note in after)


def test_table_has_columns_of_lm_eval_tasks(whole):
    table = whole[1]["table"]
    assert [row[0] for row in table["rows"]] == ["fp16", "kivi-2bit"]
    assert {"sums exact_match,strict-match", "letters acc", "measured bits"} <= set(table["columns"])


def test_scores_equal_lm_evals_own_evaluator(whole, loaded, tasks, data_dir):
    from lm_eval.evaluator import evaluate as native

    document = whole[1]["methods"]["kivi-2bit"]["results"]
    loaded_tasks = load_tasks([tasks["sums"], tasks["letters"]], data_dir)
    with attach(loaded.model, COMPARED[1], prefill="compressed") as attached, silence():
        for task in loaded_tasks:
            task.set_fewshot_seed(0)
        model = AttachedLM(loaded, attached)
        found = native(model, {"tasks": {task.task_name: task for task in loaded_tasks}}, bootstrap_iters=1)["results"]
    for task, names in FIGURES.items():
        theirs = found[task.removeprefix("lm_eval:")]
        for name in names:
            error = name.replace(",", "_stderr,")
            assert document[task][name] == theirs[name] and document[task][error] == pytest.approx(theirs[error])


def test_strict_and_flexible_match_of_gsm8k(run, loaded, tasks, data_dir, tmp_path, monkeypatch):
    """A model that writes the right sum, once behind #### and once in words; scored by hand beside it."""
    answers = [" #### {}", " it is {}", " #### 7", " {}.", " none", " 5 #### {} or 3"]

    def speak(self, requests, disable_tqdm=False):
        self.cache_records.append(({"tokens": 9, "compressed": 9, "bytes": 1, "fp16_bytes": 9, "constant_bytes": 0,
                           "nominal_bits": 2, "packed_bits": 2}, 1))  # fmt: skip
        found = []
        for request in requests:
            a, b = map(int, re.findall(r"What is (\d+) and (\d+)", request.args[0])[-1])
            found.append(answers[request.doc_id].format(a + b))
        return found

    monkeypatch.setattr(AttachedLM, "generate_until", speak)
    run(tmp_path, COMPARED[1:], tasks=[f"lm_eval:{tasks['sums']}"])
    kept = records(tmp_path, "kivi-2bit", "sums")
    assert [record["scores"]["exact_match,strict-match"] for record in kept] == [1, 0, 0, 0, 0, 1]
    assert [record["scores"]["exact_match,flexible-extract"] for record in kept] == [1, 1, 0, 1, 0, 0]
    assert [record["score"] for record in kept] == [1, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("after", [2, 15])
def test_interrupted_run_resumes_to_the_same_results(run, whole, tmp_path, interrupt_after, after):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, track=interrupt_after(after))
    assert sum(len(path.read_text().splitlines()) - 1 for path in tmp_path.glob("*/*.jsonl")) == after
    left = []

    def count(what, total, found):
        left.append(total - found)
        return lambda count: None

    assert without_run(run(tmp_path, track=count)) == without_run(whole[1])
    assert sum(left) == 24 - after
    for path in whole[0].glob("*/*.jsonl"):
        assert (tmp_path / path.relative_to(whole[0])).read_text() == path.read_text()


def test_methods_share_prompts_of_exact_prefill(run, tmp_path):
    for method in COMPARED:
        run(tmp_path / "alone", [method], prefill="exact", samples=2)
    run(tmp_path / "together", COMPARED, prefill="exact", samples=2)
    for method in ("fp16", "kivi-2bit"):
        for task in ("sums", "letters"):
            alone, together = (records(tmp_path / folder, method, task) for folder in ("alone", "together"))
            assert alone == together and len(alone) == 2


def test_samples_do_not_depend_on_their_number(run, whole, tmp_path):
    run(tmp_path, COMPARED[1:], samples=2)
    for task in ("sums", "letters"):
        assert records(tmp_path, "kivi-2bit", task) == records(whole[0], "kivi-2bit", task)[:2]


def test_resume_key_has_everything_that_changes_an_answer(loaded, tasks, data_dir, tmp_path):
    def config(seed=0, folder=data_dir, num_fewshot=None, **options):
        (task,) = load_tasks([tasks["sums"]], folder, num_fewshot)
        return LmEvalEvaluation(task, loaded, seed=seed, limit=2, prefill="compressed", **options).config

    (tmp_path / "sums").mkdir()
    for split in ("train", "test"):
        text = (data_dir / "sums" / f"{split}.jsonl").read_text()
        (tmp_path / "sums" / f"{split}.jsonl").write_text(text)
    plain = config()
    assert config(folder=tmp_path) == plain  # the same rows in another place
    examples = tmp_path / "sums" / "train.jsonl"
    examples.write_text(examples.read_text().replace("castle", "house"))
    changed = [config(seed=1), config(num_fewshot=1), config(max_length=900), config(new_tokens=5)]
    changed += [config(truncation="middle"), config(folder=tmp_path)]
    keys = {json.dumps(one, sort_keys=True, default=str) for one in [plain, *changed]}
    assert len(keys) == 1 + len(changed)


def test_resume_key_has_the_definition_of_the_task(loaded, tasks, data_dir, tmp_path):
    """The version and the data are the same in all."""
    definition = Path(tasks["sums"]).read_text()
    path = tmp_path / "sums.yaml"

    def config(before="", after=""):
        assert before in definition
        path.write_text(definition.replace(before, after))
        (task,) = load_tasks([str(path)], data_dir)
        return dict(LmEvalEvaluation(task, loaded, seed=0, limit=2, prefill="compressed").config)

    changed = [
        config("Question: ", "Asked: "),
        config("num_fewshot: 2", "num_fewshot: 2\ndescription: Add."),
        config('regexes_to_ignore: ["(?s).*#### "]', "ignore_case: true"),
        config("#### (", "## ("),
    ]
    assert config() == config()
    keys = {one["definition_sha256"] for one in [config(), *changed]}
    assert len(keys) == 1 + len(changed)


def test_definition_with_functions_is_hashed_by_their_source(loaded, tasks, data_dir, tmp_path):
    """An address in it would keep every run from resuming the one before."""
    definition = Path(tasks["sums"]).read_text()
    (tmp_path / "sums.yaml").write_text(definition + "fewshot_config: {doc_to_text: !function words.ask}\n")

    def digest(word):
        (tmp_path / "words.py").write_text(f"def ask(doc):\n    return '{word} ' + doc['question']\n")
        linecache.checkcache()
        (task,) = load_tasks([str(tmp_path / "sums.yaml")], data_dir)
        return LmEvalEvaluation(task, loaded, seed=0, limit=1, prefill="compressed").config["definition_sha256"]

    assert digest("Add") == digest("Add") != digest("Sum up")


@pytest.mark.parametrize("file", ["words", "kvq_speech"])
def test_definition_has_all_functions_of_a_folder(loaded, tasks, data_dir, tmp_path, monkeypatch, file):
    """A task's function may call others beside it, and in files beside its own."""
    definition = re.sub("doc_to_text: .*", "doc_to_text: !function words.ask", Path(tasks["sums"]).read_text())
    (tmp_path / "sums.yaml").write_text(definition)
    ask = "def ask(doc):\n    return polite(doc['question'])\n\n\n"
    (tmp_path / "words.py").write_text(f"from {file} import polite\n\n\n{ask}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, file, None)  # removed again, with the module that is imported here
    del sys.modules[file]

    def digest(word):
        helper = f"def polite(text):\n    return '{word} ' + text\n"
        (tmp_path / f"{file}.py").write_text((ask if file == "words" else "") + helper)
        linecache.checkcache()
        (task,) = load_tasks([str(tmp_path / "sums.yaml")], data_dir)
        return LmEvalEvaluation(task, loaded, seed=0, limit=1, prefill="compressed").config["definition_sha256"]

    assert digest("Please: ") == digest("Please: ") != digest("Kindly, ")


def test_definition_has_the_class_of_a_task(loaded, tasks, data_dir, tmp_path):
    definition = Path(tasks["sums"]).read_text()
    (tmp_path / "sums.yaml").write_text(definition + "class: !function adding.Sums\n")

    def digest(word):
        (tmp_path / "adding.py").write_text(
            "from datasets import Dataset\nfrom lm_eval.api.task import ConfigurableTask\n\n\n"
            "class Sums(ConfigurableTask):\n    def __init__(self, config=None):\n        config.pop('class')\n"
            "        super().__init__(config=config)\n\n"
            "    def download(self, *_, **__):\n"
            "        data = Dataset.from_list([{'question': '1', 'answer': '1'}] * 4)\n"
            "        self.dataset = dict.fromkeys(('train', 'validation', 'test'), data)\n\n"
            f"    def doc_to_text(self, doc, *_):\n        return '{word}: ' + doc['question']\n"
        )
        linecache.checkcache()
        (task,) = load_tasks([str(tmp_path / "sums.yaml")], data_dir)
        return LmEvalEvaluation(task, loaded, seed=0, limit=1, prefill="compressed").config["definition_sha256"]

    assert digest("Add") == digest("Add") != digest("Sum up")


def test_resume_key_has_tokenizer_template_stop_tokens_and_batch_size(loaded, tasks, data_dir, monkeypatch):
    def key(template=None, **options):
        tokenizer = copy.deepcopy(loaded.tokenizer)
        tokenizer.chat_template = template
        (task,) = load_tasks([tasks["sums"]], data_dir)
        instruct = dataclasses.replace(loaded, tokenizer=tokenizer)
        return LmEvalEvaluation(task, instruct, seed=0, limit=1, prefill="compressed", **options).resume_key

    dated = "{{ strftime_now('%f') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    keys = [key(), key(dated), key(dated + "!"), key(batch_size=1), key(batch_size=4)]
    assert key() == keys[0] and key(dated) == keys[1]
    monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", [1, 7])
    keys.append(key())
    assert len({json.dumps(one) for one in keys}) == len(keys)


def test_batch_sizes_by_length_do_not_change_the_resume_key(loaded, tasks, data_dir, monkeypatch):
    """Without `--batch-size`, it depends on the longest prompt of the samples."""

    def evaluation(tokens):
        monkeypatch.setattr(evaluation_module, "CHARACTERS_PER_TOKEN", tokens)
        (task,) = load_tasks([tasks["sums"]], data_dir)
        return LmEvalEvaluation(task, loaded, seed=0, limit=1, prefill="compressed")

    several, one = evaluation(4), evaluation(0.01)
    assert several.batch_size > one.batch_size == 1 and several.resume_key == one.resume_key


def test_metrics_that_some_documents_lack_are_reported(loaded, tasks, data_dir):
    (task,) = load_tasks([tasks["sums"]], data_dir)
    one = LmEvalEvaluation(task, loaded, seed=0, limit=2, prefill="compressed")
    records = [{"scores": {"acc,none": 1.0, "0_acc,none": 1.0}}, {"scores": {"acc,none": 0.0, "1_acc,none": 0.5}}]
    metrics = one.metrics(records)
    assert (metrics["acc,none"], metrics["0_acc,none"], metrics["1_acc,none"]) == (0.5, 1.0, 0.5)


def test_batch_size_of_one_measures_each_prompt_alone_after_a_larger_batch(run, whole, tasks, tmp_path):
    letters = [f"lm_eval:{tasks['letters']}"]
    padded = run(tmp_path, COMPARED[1:], tasks=letters, batch_size=6)
    alone = run(tmp_path, COMPARED[1:], tasks=letters, batch_size=1)
    [bits, fewer] = (one["methods"]["kivi-2bit"]["cache"]["lm_eval:letters-2048"]["measured_bits"]
                     for one in (padded, alone))  # fmt: skip
    assert fewer < bits - 0.1
    assert fewer == whole[1]["methods"]["kivi-2bit"]["cache"]["lm_eval:letters-2048"]["measured_bits"]


def test_prompts_that_cannot_be_built_are_an_error(loaded, tasks, data_dir, tmp_path):
    (tmp_path / "sums").mkdir()
    for split in ("train", "test"):
        lines = (data_dir / "sums" / f"{split}.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "sums" / f"{split}.jsonl").write_text("".join(lines[:2]))
    (task,) = load_tasks([tasks["sums"]], tmp_path, 5)
    with pytest.raises(KvqError, match="lm_eval:sums: prompts with 5 few-shot examples cannot be built: .*[Ss]ample"):
        LmEvalEvaluation(task, loaded, seed=0, limit=1, prefill="compressed")


def test_chat_template_is_applied_to_generation_alone_unless_asked_for(loaded, tasks, data_dir):
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    instruct = dataclasses.replace(loaded, tokenizer=tokenizer)

    def first_prompt(name, chat):
        (task,) = load_tasks([tasks[name]], data_dir)
        built = LmEvalEvaluation(task, instruct, seed=0, limit=1, prefill="compressed", chat=chat)
        prompt = built._requests[0][0].args[0]
        assert built.config["chat_template"] is prompt.startswith("[user]")
        return prompt

    chats = {(name, chat): first_prompt(name, chat) for name in ("sums", "letters") for chat in (None, True, False)}
    assert chats["sums", None] == chats["sums", True] != chats["sums", False]
    assert chats["sums", None].count("[user]") == 3 and chats["sums", None].endswith("Answer:>")  # 2 examples
    assert chats["letters", None] == chats["letters", False] != chats["letters", True]


def test_nothing_compressed_is_an_error_only_when_no_sample_is(run, tasks, tmp_path):
    letters = [f"lm_eval:{tasks['letters']}"]
    run(tmp_path, [build("kivi", bits=2, residual=256)], tasks=letters)
    compressed = [record["cache"]["compressed"] for record in records(tmp_path, "kivi-2bit", "letters")]
    assert compressed[:5] == [0] * 5 and compressed[5] >= 128
    with pytest.raises(KvqError, match=r"lm_eval:letters-2048: kivi-2bit compressed none"):
        run(tmp_path / "none", [build("kivi", bits=2, residual=1024)], tasks=letters)
    assert not list(tmp_path.glob("none/**/results.json"))


def test_invalid_settings_are_refused(run, tasks, tmp_path):
    run(tmp_path, COMPARED[1:], tasks=[f"lm_eval:{tasks['sums']}"], prefill="exact", samples=1)
    with pytest.raises(UsageError, match="--data-dir nowhere: no such folder"):
        run(tmp_path, data_dir="nowhere")
    with pytest.raises(UsageError, match="--chat-template: the tokenizer of tiny has none"):
        run(tmp_path / "none", chat_template=True)
    with pytest.raises(UsageError, match="--max-length 4096: the context length of tiny is 2048 tokens"):
        run(tmp_path / "none", max_length=4096)
    assert not (tmp_path / "none").exists()


def test_command_takes_tasks_of_all_kinds(kvq, tasks, data_dir, loaded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    task = f"lm_eval:{tasks['letters']},perplexity"
    result = kvq("eval", "--model", folder, "--task", task, "--data-dir", data_dir, "--method", "kivi", "--set",
                 "residual=32", "--seqlen", 160, "--samples", 2, "--json")  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert set(json.loads(result.stdout)["results"]) == {"lm_eval:letters", "perplexity"}
