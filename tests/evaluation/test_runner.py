"""Evaluation runs on a tiny random model: documents, resume, errors."""

import copy
import dataclasses
import json

import pytest
import torch
from run_records import without_run
from tiers import slow

from kvq_cli.attention.attach import attach
from kvq_cli.attention.backend import ChosenBackend
from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.errors import KvqError, NotFiniteError, UsageError
from kvq_cli.evaluation.base import cache_record
from kvq_cli.evaluation.compared_methods import compared_methods
from kvq_cli.evaluation.generation import generate_answers, stop_tokens
from kvq_cli.evaluation.paired import differences
from kvq_cli.evaluation.perplexity import PerplexityEvaluation
from kvq_cli.evaluation.ruler.evaluation import RulerEvaluation
from kvq_cli.evaluation.runner import evaluate
from kvq_cli.evaluation.sample_log import read_records
from kvq_cli.evaluation.settings import EvaluationSettings, build_evaluations
from kvq_cli.methods.registry import build

COMPARED = (build("fp16"), build("kivi", bits=2, residual=32))
SETTINGS = {"tasks": ["vt", "perplexity"], "seqlens": [512], "samples": 3, "templates": "reference"}


def _run(loaded, out, chosen=COMPARED, **changes):
    extra = {key: changes.pop(key) for key in ("track", "fresh", "note") if key in changes}
    return evaluate(loaded, compared_methods(chosen), EvaluationSettings(**{**SETTINGS, **changes}), out, **extra)


@pytest.fixture(scope="module")
def whole(loaded, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    return out, _run(loaded, out, batch_size=1)


def _lines(out):
    return {path.relative_to(out): sorted(path.read_text().splitlines()) for path in out.glob("*/*.jsonl")}


def test_documents_follow_lm_evals_schema(whole):
    out, document = whole
    assert json.loads((out / "comparison.json").read_text()) == json.loads(json.dumps(document))
    one = json.loads((out / "kivi-2bit,residual=32" / "results.json").read_text())
    assert one == json.loads(json.dumps(document["methods"]["kivi-2bit"]))
    assert set(one["results"]) == {"vt", "perplexity"}
    assert set(one["results"]["vt"]) == {"alias", "512,none", "512_stderr,none"}
    assert {"perplexity,none", "kl,none", "top1,none", "kl_stderr,none"} <= set(one["results"]["perplexity"])
    assert one["n-samples"]["vt"]["effective"] == 3
    assert one["versions"] == {"vt": 1, "perplexity": 2}
    assert one["higher_is_better"]["perplexity"]["kl"] is False and one["higher_is_better"]["vt"]["512"] is True
    assert one["config"]["method"]["bits"] == 2 and one["config"]["random_seed"] == 0
    assert one["config"]["backend"] == "torch" and one["config"]["settings"]["backend"] == "auto"
    assert one["configs"]["vt-512"]["prefill"] == "compressed" and one["configs"]["vt-512"]["templates"] == "reference"
    assert document["methods"]["fp16"]["results"]["perplexity"]["kl,none"] == pytest.approx(0, abs=1e-6)
    assert one["cache"]["vt-512"]["compressed_tokens"] > 300


def test_several_texts_are_scored_each_and_their_mean(loaded, tmp_path):
    file = tmp_path / "numbers.txt"
    file.write_text(" ".join(map(str, range(4000))))
    document = _run(loaded, tmp_path / "out", tasks=["perplexity"], datasets=["prose", str(file)])
    one = document["methods"]["kivi-2bit"]
    means, texts = one["results"]["perplexity"], [one["results"][f"perplexity_{name}"] for name in ("prose", "numbers")]
    for metric in ("perplexity,none", "kl,none", "top1,none"):
        assert means[metric] == pytest.approx(sum(text[metric] for text in texts) / 2)
    assert texts[0]["perplexity,none"] != texts[1]["perplexity,none"]
    assert one["versions"]["perplexity"] == one["versions"]["perplexity_prose"] == 2
    titles = ["perplexity prose", "KL to fp16 prose", "top-1 prose", "perplexity numbers", "KL to fp16 numbers"]
    titles += ["top-1 numbers", "perplexity", "KL to fp16", "top-1"]
    assert document["table"]["columns"][1:10] == titles
    pooled = differences(tmp_path / "out", document["methods"], "fp16")["kivi-2bit"]["perplexity loss"]
    alone = _run(loaded, tmp_path / "alone", tasks=["perplexity"], datasets=[str(file)])
    assert pooled.samples == 6
    assert alone["methods"]["kivi-2bit"]["results"]["perplexity"] == {**texts[1], "alias": "perplexity"}


def test_two_texts_of_one_name_are_refused(loaded, tmp_path):
    with pytest.raises(UsageError, match="several texts are named prose"):
        _run(loaded, tmp_path, tasks=["perplexity"], datasets=["prose", "prose"])


def test_table_has_a_row_per_method(whole):
    table = whole[1]["table"]
    names = ["method", "vt", "perplexity", "KL to fp16", "top-1", "nominal bits", "measured bits"]
    names += ["cache KiB", "x smaller"]
    assert table["columns"] == names
    assert [row[0] for row in table["rows"]] == ["fp16", "kivi-2bit"]
    assert all(len(row) == len(names) for row in table["rows"])
    assert table["rows"][1][names.index("nominal bits")] == 2


def test_methods_are_given_the_same_samples(whole):
    out, _ = whole
    prompts = {}
    for path in out.glob("*/vt-512-*.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()[1:]]
        prompts[path.parent.name] = [(r["index"], r["prompt_sha256"], r["references"]) for r in records]
    assert prompts["fp16"] == prompts["kivi-2bit,residual=32"] and len(prompts["fp16"]) == 3


@pytest.mark.parametrize("after", [4, *slow(1, 8)])
def test_interrupted_run_resumes_to_the_same_results(loaded, whole, tmp_path, interrupt_after, after):
    before = loaded.model.config._attn_implementation
    with pytest.raises(KeyboardInterrupt):
        _run(loaded, tmp_path, batch_size=1, track=interrupt_after(after))
    assert loaded.model.config._attn_implementation == before
    kept = sum(len(path.read_text().splitlines()) - 1 for path in tmp_path.glob("*/*.jsonl"))
    assert kept == after
    assert not list(tmp_path.glob("**/results.json"))
    last = max(tmp_path.glob("*/*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    last.write_bytes(last.read_bytes()[:-7])  # as if the kill had come in the middle of a line
    left = []

    def count(what, total, found):
        left.append(total - found)
        return lambda count: None

    document = _run(loaded, tmp_path, batch_size=1, track=count)
    assert sum(left) == 12 - after + 1
    assert without_run(document) == without_run(whole[1])
    assert _lines(tmp_path) == _lines(whole[0])


def test_finished_samples_are_not_evaluated_again(loaded, whole, monkeypatch):
    out, document = whole
    monkeypatch.setattr(loaded.model, "generate", None)
    monkeypatch.setattr(loaded.model, "forward", None)
    with pytest.raises(TypeError):
        _run(loaded, out, batch_size=1, samples=4)
    assert without_run(_run(loaded, out, batch_size=1, samples=3)) == without_run(document)


def test_a_given_batch_size_has_samples_of_its_own(loaded, tmp_path):
    """Records count the padding of their batch. Without the option the key of a sample is that of earlier versions."""
    for size, count in ((None, 1), (2, 2), (3, 3), (2, 3), (None, 3)):
        _run(loaded, tmp_path, COMPARED[1:], tasks=["vt"], batch_size=size)
        assert len(list(tmp_path.glob("kivi*/*.jsonl"))) == count
    keys = [json.loads(path.open().readline())["key"] for path in tmp_path.glob("kivi*/*.jsonl")]
    assert sorted(key.get("batch_size", 0) for key in keys) == [0, 2, 3]


def test_save_prompts_evaluates_samples_without_a_prompt_again(loaded, tmp_path, monkeypatch):
    def prompts():
        return {index: record.get("prompt") for index, record in read_records(log).items()}

    vt = {"tasks": ["vt"], "samples": 2}
    before = _run(loaded, tmp_path, COMPARED[1:], **vt)
    (log,) = tmp_path.glob("kivi*/*.jsonl")
    assert prompts() == {0: None, 1: None}
    after = _run(loaded, tmp_path, COMPARED[1:], save_prompts=True, **vt)
    assert all(prompts().values()) and list(tmp_path.glob("kivi*/*.jsonl")) == [log]
    assert after["table"] == before["table"]
    monkeypatch.setattr(loaded.model, "forward", None)  # nothing is left to do
    assert _run(loaded, tmp_path, COMPARED[1:], save_prompts=True, **vt)["table"] == before["table"]
    assert _run(loaded, tmp_path, COMPARED[1:], **vt)["table"] == before["table"]


@pytest.mark.parametrize("changed", ["weights", "results", "version"])
def test_samples_of_other_weights_or_of_a_changed_evaluation_are_made_again(loaded, tmp_path, monkeypatch, changed):
    settings = {"tasks": ["perplexity"], "samples": 2}
    _run(loaded, tmp_path, **settings)
    if changed == "weights":  # of no key and no value: the fingerprint of the model stays
        weight = loaded.model.model.layers[0].mlp.down_proj.weight
        monkeypatch.setattr(weight, "data", weight.data * 1.5)
    elif changed == "results":
        monkeypatch.setattr("kvq_cli.evaluation.runner.RESULTS", -1)
    else:
        monkeypatch.setattr(PerplexityEvaluation, "version", -1)
    _run(loaded, tmp_path, **settings)
    assert len(list(tmp_path.glob("kivi*/*.jsonl"))) == 2


def test_windows_are_split_by_methods_and_the_uncompressed_model_runs_once_each(loaded, tmp_path, monkeypatch):
    """Also in one process; workers then share few windows evenly, and an interrupted run loses few samples."""
    units, references, real = [], [], PerplexityEvaluation.reference_logits

    def reference(self, loaded, index):
        references.append(index)
        return real(self, loaded, index)

    def run(self, loaded, attached, pending, real=PerplexityEvaluation.run):
        units.append({label: list(indices) for label, indices in pending.items()})
        return real(self, loaded, attached, pending)

    monkeypatch.setattr(PerplexityEvaluation, "reference_logits", reference)
    monkeypatch.setattr(PerplexityEvaluation, "run", run)
    chosen = [build("fp16"), *(build("kivi", bits=bits, residual=32) for bits in (1, 2, 3, 4))]
    document = _run(loaded, tmp_path, chosen, tasks=["perplexity"], samples=2)
    assert [len(unit) for unit in units] == [4, 1, *[1] * 5] and references == [0, 1]
    assert [indices for unit in units for indices in unit.values()] == [[0]] * 5 + [[1]] * 5
    assert document["methods"].keys() == {"fp16", *(f"kivi-{bits}bit" for bits in (1, 2, 3, 4))}


@pytest.mark.slow
def test_units_of_a_batch_share_the_passes_over_its_prompts(loaded, tmp_path, monkeypatch):
    """Four methods a unit, one in the last batch; behind an exact prefill, the next unit reads no prompt again."""
    passes, units, forward, run = [], [], loaded.model.forward, RulerEvaluation.run

    def counted(input_ids=None, *args, **kwargs):
        passes.append(input_ids.shape)
        return forward(input_ids, *args, **kwargs)

    def noted(self, loaded, attached, pending):
        units.append({label: list(indices) for label, indices in pending.items()})
        return run(self, loaded, attached, pending)

    monkeypatch.setattr(RulerEvaluation, "run", noted)
    monkeypatch.setattr(loaded.model, "forward", counted)
    chosen = [build("fp16"), *(build("kivi", bits=bits, residual=32) for bits in (1, 2, 3, 4))]
    settings = {"tasks": ["vt"], "samples": 4, "batch_size": 2, "prefill": "exact"}
    together = _run(loaded, tmp_path / "together", chosen, **settings)
    assert [len(unit) for unit in units] == [4, 1, *[1] * 5]
    assert [indices for unit in units for indices in unit.values()] == [[0, 1]] * 5 + [[2, 3]] * 5
    assert len([shape for shape in passes if shape[1] > 1]) == 2
    for each in chosen:
        out = tmp_path / each.name / str(getattr(each, "bits", 16))
        alone = _run(loaded, out, [each], **settings)
        label = next(iter(alone["methods"]))
        assert without_run(alone)["methods"][label]["results"] == together["methods"][label]["results"]


def test_each_method_configuration_has_its_own_results(loaded, tmp_path, monkeypatch, interrupt_after):
    """Evaluated one by one or together, in the same folder; and together needs no more than each has done."""
    residuals, found = (32, 64), {}
    for residual in residuals:
        chosen = [build("kivi", bits=2, residual=residual)]
        with pytest.raises(KeyboardInterrupt):
            _run(loaded, tmp_path, chosen, tasks=["perplexity"], samples=2, track=interrupt_after(1))
        found[residual] = _run(loaded, tmp_path, chosen, tasks=["perplexity"], samples=2)["methods"]["kivi-2bit"]
    assert sorted(path.name for path in tmp_path.glob("kivi*/")) == ["kivi-2bit,residual=32", "kivi-2bit,residual=64"]
    for residual, document in found.items():
        kept = json.loads((tmp_path / f"kivi-2bit,residual={residual}" / "results.json").read_text())
        assert kept == json.loads(json.dumps(document)) and kept["config"]["method"]["residual"] == residual
    assert found[32]["results"] != found[64]["results"]
    monkeypatch.setattr(loaded.model, "forward", None)
    chosen = [build("kivi", bits=2, residual=residual) for residual in residuals]
    together = _run(loaded, tmp_path, chosen, tasks=["perplexity"], samples=2)["methods"]
    assert list(map(without_run, together.values())) == list(map(without_run, found.values()))


def test_methods_share_prompts_of_exact_prefill(loaded, tmp_path):
    """The model reads each prompt once for all methods, and samples are those of runs of one method each."""
    chosen = [build("fp16"), build("kivi", bits=2, residual=32), build("squat", bits=2, residual=32)]
    columns = []
    hook = loaded.model.model.layers[0].register_forward_pre_hook(lambda _, args: columns.append(args[0].shape[1]))
    for method in chosen:
        _run(loaded, tmp_path / "alone", [method], tasks=["vt"], prefill="exact", batch_size=2)
    alone = [count for count in columns if count > 96]
    columns.clear()
    _run(loaded, tmp_path / "together", chosen, tasks=["vt"], prefill="exact", batch_size=2)
    hook.remove()
    assert _lines(tmp_path / "alone") == _lines(tmp_path / "together")
    assert len([count for count in columns if count > 96]) == len(alone) / 3 == 2


def test_samples_in_a_renamed_folder_are_reused(loaded, whole, tmp_path, monkeypatch):
    out, document = whole
    for path in out.glob("*/*.jsonl"):
        (tmp_path / path.parent.name.upper()).mkdir(exist_ok=True)
        (tmp_path / path.parent.name.upper() / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(loaded.model, "forward", None)
    again = _run(loaded, tmp_path, batch_size=1)
    assert again["table"] == document["table"]
    for one in again["methods"].values():
        assert all((tmp_path / place).is_file() for place in one["samples"].values())


def test_an_edited_sample_is_evaluated_again(loaded, tmp_path):
    said = []
    settings = {"tasks": ["perplexity"], "samples": 1, "note": said.append}
    before = _run(loaded, tmp_path, COMPARED[1:], **settings)
    (path,) = tmp_path.glob("*/*.jsonl")
    path.write_text(path.read_text().replace('"nll": ', '"nll": 1'))
    for _ in range(2):  # once evaluated again, it is not mentioned again
        assert _run(loaded, tmp_path, COMPARED[1:], **settings)["table"] == before["table"]
    assert [note for note in said if "damaged" in note] == [
        f"{path}: damaged, line 2; samples of no other line are evaluated again"
    ]


def test_samples_do_not_depend_on_their_number(loaded, whole, tmp_path):
    document = _run(loaded, tmp_path, chosen=COMPARED[1:], samples=1, tasks=["vt"], batch_size=1)
    path = next(tmp_path.glob("*/vt-512-*.jsonl"))
    longer = next(whole[0].glob("kivi-2bit,residual=32/vt-512-*.jsonl"))
    assert path.name == longer.name
    assert path.read_text().splitlines() == longer.read_text().splitlines()[:2]
    assert document["methods"]["kivi-2bit"]["results"]["vt"]["512_stderr,none"] is None


def test_batched_answers_equal_single_answers(loaded):
    prompts = [torch.arange(5, 5 + length).tolist() for length in (70, 40, 55)]
    with attach(loaded.model, COMPARED[1], prefill="compressed") as attached:
        together, _ = generate_answers(loaded, attached, prompts, 12)
        alone = [generate_answers(loaded, attached, [prompt], 12)[0][0] for prompt in prompts]
    assert together == alone
    assert [one.tokens for one in together] == [12] * 3


def test_answers_end_at_the_stop_token(loaded, monkeypatch):
    prompt = list(range(20, 90))
    with attach(loaded.model, COMPARED[0]) as attached:
        free = generate_answers(loaded, attached, [prompt], 8)[0][0]
        ids = loaded.model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, 70:].tolist()
        stop = next(place for place in range(1, 8) if ids[place] not in ids[:place])
        monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", ids[stop])
        stopped = generate_answers(loaded, attached, [prompt], 8)[0][0]
    assert free.text == loaded.tokenizer.decode(ids, skip_special_tokens=True)
    assert stopped.tokens == stop + 1
    assert stopped.text == loaded.tokenizer.decode(ids[: stop + 1], skip_special_tokens=True)


def test_answers_end_at_the_stop_tokens_of_the_model_and_of_the_tokenizer(loaded, monkeypatch):
    prompt = list(range(20, 90))
    ids = loaded.model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, 70:].tolist()
    stop = next(place for place in range(1, 8) if ids[place] not in ids[:place])
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ids[stop])
    other = next(token for token in range(100, 200) if token not in ids)
    monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", other)
    chat = dataclasses.replace(loaded, tokenizer=tokenizer)
    assert stop_tokens(chat) == [other, ids[stop], loaded.model.config.eos_token_id]
    with attach(loaded.model, COMPARED[0]) as attached:
        assert generate_answers(chat, attached, [prompt], 8)[0][0].tokens == stop + 1
        assert generate_answers(loaded, attached, [prompt], 8)[0][0].tokens == 8


def test_answers_are_greedy_whatever_the_models_generation_config(loaded, monkeypatch):
    prompts = [list(range(20, 90)), [5, 6, 7] * 20]
    with attach(loaded.model, COMPARED[0]) as attached:
        plain, _ = generate_answers(loaded, attached, prompts, 12)
        own = loaded.model.generation_config
        for option, value in (
            ("repetition_penalty", 3.0),
            ("no_repeat_ngram_size", 1),
            ("suppress_tokens", list(range(3, 1500))),
            ("min_new_tokens", 12),
        ):
            monkeypatch.setattr(own, option, value)
            assert generate_answers(loaded, attached, prompts, 12)[0] == plain
        assert loaded.model.generation_config is own


def test_measured_bytes_depend_neither_on_the_backend_nor_on_the_longest_answer_allowed(loaded, monkeypatch):
    """All answers end at their first token."""
    monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", list(range(len(loaded.tokenizer))))
    prompt = [token % 1000 + 5 for token in range(300)]

    def record(longest_answer, by_kernels):
        monkeypatch.setattr(ChosenBackend, "by_kernels", lambda self, layer: by_kernels)
        with attach(loaded.model, COMPARED[1]) as attached:
            _, report = generate_answers(loaded, attached, [prompt], longest_answer)
        assert report.reserved <= report.parts["unused"]
        return cache_record(report, 1)

    records = [record(*each) for each in ((4, False), (1500, False), (4, True), (1500, True))]
    reserved = [one.pop("reserved_bytes") for one in records]
    assert records == records[:1] * 4
    assert reserved[3] > 2 * records[0]["bytes"] and max(reserved[:2]) == 0
    assert 16 * records[0]["bytes"] / records[0]["fp16_bytes"] < 8


def test_resume_key_of_ruler_has_the_chat_template_and_the_stop_tokens(loaded, monkeypatch):
    def evaluation(template):
        tokenizer = copy.deepcopy(loaded.tokenizer)
        tokenizer.chat_template = template
        settings = EvaluationSettings(**{**SETTINGS, "tasks": ["vt"]})
        [found] = build_evaluations(
            settings, dataclasses.replace(loaded, tokenizer=tokenizer), lambda *_: lambda _: None
        )
        return found

    first, second = ("[{{ messages[0]['content'] }}]", "<{{ messages[0]['content'] }}>")
    chosen = [evaluation(template) for template in (first, second)]
    assert evaluation(first).resume_key == chosen[0].resume_key
    assert chosen[0].config == chosen[1].config
    monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", [1, 7])
    keys = [*(one.resume_key for one in chosen), evaluation(first).resume_key]
    assert len({json.dumps(key) for key in keys}) == 3


def test_nothing_compressed_is_an_error(loaded, tmp_path):
    with pytest.raises(KvqError, match=r"perplexity-96: kivi-2bit compressed none of 95 tokens.*--seqlen"):
        _run(loaded, tmp_path, chosen=[build("kivi", bits=2, residual=128)], tasks=["perplexity"], seqlens=[96])
    assert not list(tmp_path.glob("**/results.json"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ["niah"]}, r"unknown task 'niah'.*ruler, perplexity, drift, niah_single_1"),
        ({"prompt_tokens": 512}, r"--prompt-tokens 512: windows of 512 tokens leave none to score"),
        ({"seqlens": [4096]}, r"--seqlen 4096: the context length of tiny is 2048 tokens"),
        ({"seqlens": [4096], "tasks": ["perplexity"]}, r"--seqlen 4096: the context length of tiny is 2048 tokens"),
        (
            {"seqlens": [512, 640]},
            r"--seqlen 512,640: perplexity takes one length: give RULER's tasks a run",
        ),
        ({"seqlens": [128]}, r"--seqlen 128 is too short for vt"),
        ({"datasets": ["nothing"]}, r"nothing"),
        ({"haystack": "nowhere.txt"}, r"nowhere.txt"),
        ({"templates": "mine"}, r"unknown templates 'mine'"),
        ({"chat_template": True}, r"--chat-template: the tokenizer of tiny has none"),
    ],
)
def test_invalid_settings_fail_before_anything_is_written(loaded, tmp_path, changes, message):
    with pytest.raises(UsageError, match=message):
        _run(loaded, tmp_path, **changes)
    assert not list(tmp_path.iterdir())


def test_unwritable_folder_is_an_error(loaded, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KvqError, match="choose another --out"):
        _run(loaded, tmp_path / "file")


def test_method_that_overflows_is_left_out_and_the_others_finish(loaded, tmp_path, monkeypatch):
    check = CompressedLayer._check_finite

    def overflow(layer, forward):
        if layer.index == 1 and layer.key_stream.codec.nominal_bits == 1:
            raise NotFiniteError("layer 1: the keys contain NaN or infinity (try --dtype float32)")
        check(layer, forward)

    monkeypatch.setattr(CompressedLayer, "_check_finite", overflow)
    said = []
    bad = build("kivi", bits=1, residual=32)
    methods, settings = compared_methods([*COMPARED, bad]), EvaluationSettings(**SETTINGS)
    document = evaluate(loaded, methods, settings, tmp_path / "a", note=said.append)
    assert list(document["methods"]) == ["fp16", "kivi-2bit"]
    assert document["failed"] == {"kivi-1bit": "layer 1: the keys contain NaN or infinity (try --dtype float32)"}
    assert [line for line in said if "kivi-1bit is left out: layer 1" in line] == said[1:2]
    with pytest.raises(NotFiniteError, match="layer 1"):
        _run(loaded, tmp_path / "c", (bad,))
    with pytest.raises(NotFiniteError, match="layer 1"):
        _run(loaded, tmp_path / "d", (build("fp16"), bad))


def test_labels_are_unique():
    same = [build("kivi", bits=2), build("kivi", bits=2, residual=64), build("kivi", bits=4)]
    labels = [one.label for one in compared_methods(same)]
    assert labels == ["kivi-2bit", "kivi-2bit,residual=64", "kivi-4bit"]
    with pytest.raises(UsageError, match="twice"):
        compared_methods([build("fp16"), build("fp16")])


def test_several_lengths_and_the_mean_over_tasks(loaded, tmp_path):
    document = _run(loaded, tmp_path, chosen=COMPARED[1:], tasks=["vt", "qa_1"], seqlens=[512, 640], samples=1)
    one = document["methods"]["kivi-2bit"]
    results = one["results"]
    for length in (512, 640):
        scores = [results[task][f"{length},none"] for task in ("vt", "qa_1")]
        assert results["ruler"][f"{length},none"] == sum(scores) / 2
    assert one["group_subtasks"] == {"ruler": ["vt", "qa_1"]}
    assert document["table"]["columns"][1:7] == [
        "vt 512",
        "vt 640",
        "qa_1 512",
        "qa_1 640",
        "ruler mean 512",
        "ruler mean 640",
    ]
    assert one["n-samples"]["qa_1"]["original"] == 500
