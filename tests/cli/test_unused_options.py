"""Options that a command does not read are announced or refused, and artifacts are checked before the model loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from kvq_cli.cli.app import app
from kvq_cli.cli.rules import given_options, rules_of, unused
from kvq_cli.errors import UsageError

ARTIFACTS = Path(__file__).parents[2] / "artifacts" / "reference"
SHARED = "bits set_ trust_remote_code accept_license"
DECODING = f"{SHARED} max_new_tokens temperature top_p top_k seed prefill"
#: The parameters with a rule, of each command that has any.
RULED = {
    "calibrate": f"{SHARED} out dataset samples seqlen gradients points iterations kmeans damping captured resume "
    "force disk workers ray seed",
    "tune": "kl set_ trust_remote_code accept_license",
    "recommend": "trust_remote_code accept_license",
    "generate": f"{DECODING} num_beams prompt_lookup when_full",
    "chat": f"{DECODING} when_full",
    "serve": SHARED,
    "eval": f"{SHARED} dataset seqlen prompt_tokens haystack qa_file templates chat_template "
    "data_dir num_fewshot max_length max_new_tokens truncation save_prompts batch_size artifact prefill plot seed",
    "analyze": "model trust_remote_code accept_license device dtype seed set_ dataset samples seqlen out_dir",
    "bits": f"{SHARED} compare method shapes context batch model",
    "plan": f"{SHARED} model",
    "results": "with_ run baseline against plot columns calibrations transpose",
    "report": "artifact",
    "reproduce": "options trust_remote_code accept_license store workers ray",
    "bench kernels": "check seconds resume dry out_dir device",
    "bench generate": f"{SHARED} rounds seconds resume prefill layers model",
    "bench calibrate": "set_ trust_remote_code accept_license dataset samples seqlen layers model",
}


def _commands():
    root = typer.main.get_command(app)
    for name, command in root.commands.items():
        yield from ({name: command} if not hasattr(command, "commands") else {
            f"{name} {child}": one for child, one in command.commands.items()
        }).items()  # fmt: skip


def test_options_that_a_command_does_not_always_read_have_a_rule():
    found = {path: set(rules) for path, command in _commands() if (rules := rules_of(command))}
    assert found == {path: set(names.split()) for path, names in RULED.items()}


def test_tune_names_its_own_default_folder():
    """It writes mixed artifacts, and with --objective memory does not know their bits before."""
    shown = {path: next((p.help for p in one.params if p.name == "out"), None) for path, one in _commands()}
    assert "artifacts/MODEL/METHOD-BITSbit" in shown["calibrate"]
    assert "METHOD-BITSbit" not in shown["tune"] and "artifacts/MODEL/mixed-kl-NATS" in shown["tune"]


def _notes(line):
    """Notes on a command line, parsed as the command does."""
    words = line.split()
    path = " ".join(words[: 2 if words[0] == "bench" else 1])
    command = dict(_commands())[path]
    ctx = command.make_context(path, words[len(path.split()) :])
    return unused(command, ctx.params, given_options(ctx))


@pytest.mark.parametrize(
    ("line", "announced"),
    [
        ("eval --task perplexity --samples 2 --seqlen 96 --dataset prose", []),
        ("eval --task perplexity --seqlen 512 --batch-size 2", ["--batch-size"]),
        ("eval --task ruler,perplexity --seqlen 512 --samples 2 --plot x.png --qa-file f --haystack f --seed 1", []),
        ("eval --task vt --qa-file f --haystack f --seqlen 96 --max-length 512", ["--qa-file", "--haystack",
         "--max-length"]),
        ("eval --task niah_single_2,qa_2 --qa-file f --haystack f --samples 2", []),
        ("eval --task lm_eval:gsm8k --seqlen 512 --samples 2", ["--seqlen"]),
        ("eval --task lm_eval:gsm8k,drift --seqlen 512 --samples 2", []),
        ("eval --task perplexity --data-dir d --seed 1", ["--data-dir", "--seed"]),
        ("eval --task perplexity --dataset c4 --data-dir d --seed 1", []),
        ("eval --task lm_eval:gsm8k --data-dir d --num-fewshot 2 --truncation middle --chat-template", []),
        ("eval --task perplexity --chat-template --num-fewshot 2", ["--chat-template", "--num-fewshot"]),
        ("eval --method fp16 --prefill exact --trust-remote-code", ["--prefill", "--trust-remote-code"]),
        ("eval --compare fp16,kivi --bits 2 --prefill exact", []),
        ("eval --compare kivi-4bit,kivi-2bit --bits 2", ["--bits has no effect: set in kivi-4bit, kivi-2bit"]),
        ("eval --compare fp16 --bits 2", ["--bits has no effect: no method has it"]),
        ("eval --compare kivi,innerq --set sign=inside",
         ["--set sign applies to innerq; not to kivi (no such option)"]),
        ("eval --compare kivi:sinks=8,innerq --set sinks=32",
         ["--set sinks applies to innerq; not to kivi:sinks=8 (its own)"]),
        ("generate x --seed 1", ["--seed"]),
        ("generate x --seed 1 --temperature 0.5 --prefill compressed", []),
        ("generate x --save-cache f --prefill-chunk 8 --method kivi", []),
        ("generate x --save-cache f -n 3 --temperature 0.5 --top-k 4 --top-p 0.5 --seed 1",
         ["--max-new-tokens", "--temperature", "--top-k", "--top-p",
          "--seed has no effect: --save-cache generates nothing"]),
        ("generate x --save-cache f --num-beams 2 --prompt-lookup 3",
         ["--num-beams", "--prompt-lookup has no effect: --save-cache generates nothing"]),
        ("chat --method fp16 --prefill compressed", ["--prefill"]),
        ("calibrate --method xquant --dataset prose --damping 0.2", ["--dataset", "--damping"]),
        ("calibrate --method temporalkv --dataset prose --damping 0.2 --out x", []),
        ("calibrate --no-fisher --damping 0.2", ["--damping"]),
        ("calibrate --set fisher=off --damping 0.2", ["--damping"]),
        ("calibrate --dry-run --out x --force --captured y", ["--out", "--force", "--captured"]),
        ("bench generate --grow --rounds 2 --seconds 5", ["--rounds"]),
        ("bench kernels --static --check --seconds 3 --device cpu", ["--check", "--seconds", "--device"]),
        ("bench kernels --check --out x", ["--out"]),
        ("bits --papers --context 512 --bits 2", ["--context", "--bits"]),
        ("bits --method kivi --bits 2 --context 512", []),
        ("plan --memory 8GB --compare kivi,innerq --set sign=inside", ["--set sign applies to innerq"]),
        ("analyze --samples 2 --seed 1", ["--samples", "--seed"]),
        ("analyze roofline --seqlen 96", ["--seqlen"]),
        ("analyze error --seqlen 96", []),
        ("results d --runs --baseline kivi", ["--baseline"]),
        ("results d --baseline kivi --columns bits --transpose", ["--columns", "--transpose"]),
        ("reproduce --store x", ["--store"]),
    ],
)  # fmt: skip
def test_options_without_effect_are_announced(line, announced):
    notes = _notes(line)
    assert len(notes) == len(announced), notes
    for note, start in zip(sorted(notes), sorted(announced), strict=True):
        assert note.startswith(start)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("eval --task vt --plot x.png", "--plot has no effect: it draws perplexity and RULER's mean"),
        ("bench generate --seconds 5", "--seconds has no effect: it needs --grow"),
        ("bench generate --layers 2", "--layers has no effect: it needs --random"),
        ("bench calibrate --random tiny --model x", "--random replaces the model"),
        ("plan --memory 8GB --shapes tiny --model x", "--shapes replaces the model"),
    ],
)
def test_requests_that_contradict_themselves_are_refused(line, says):
    with pytest.raises(UsageError, match=says):
        _notes(line)


def test_files_of_questions_that_no_task_reads_are_announced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("squad").write_text(' {"data": []}')
    Path("hotpot").write_text("\n[]")
    assert _notes("eval --task qa_1,qa_2,vt --qa-file squad --qa-file hotpot") == []
    assert _notes("eval --task qa_1,vt --qa-file squad --qa-file hotpot") == [
        "--qa-file hotpot has no effect: only qa_2 reads the format of HotpotQA"
    ]
    assert _notes("eval --task qa_2 --qa-file squad") == [
        "--qa-file squad has no effect: only qa_1 reads the format of SQuAD"
    ]
    assert _notes("eval --task qa_1 --qa-file gone --qa-file hotpot") == []  # an error of the command


def test_notes_are_lines_on_stderr_also_for_options_of_a_file(kvq, tmp_path):
    (tmp_path / "run.yaml").write_text("templates: standard\n")
    shown = kvq("bits", "--papers", "--help")  # asks for help alone
    assert shown.exit_code == 0 and shown.stderr == ""
    line = "plan --memory 1GB --reserve 1MB --compare kivi,innerq --set sign=inside --shapes tiny"
    result = kvq(*line.split())
    assert result.exit_code == 0
    assert result.stderr.splitlines()[0] == "note: --set sign applies to innerq; not to kivi (no such option)"
    failed = kvq("eval", "--config", "run.yaml", "--dataset", "no-such-data", "--method", "fp16")
    assert failed.stderr.splitlines()[0] == "note: --templates has no effect: only tasks of RULER read it"


@pytest.mark.parametrize("method", ['{"name": []}', '{"name": "a", "bits": []}', "[]", "[" * 100_000])
def test_a_malformed_artifact_is_one_line(fails, tmp_path, method):
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "config.json").write_text(f'{{"method": {method}}}')
    for words in (["--compare", "fp16,./evil"], ["--compare", "fp16", "--artifact", "evil", "--quiet"]):
        fails("eval", *words, "--bits", 2, code=1, says="evil/config.json")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--artifact", "gone"], 1, "no artifact at gone"),
        (["--artifact", ARTIFACTS / "temporalkv-2bit", "--method", "kivi"], 2, "holds temporalkv"),
        (["--artifact", ARTIFACTS / "temporalkv-2bit", "--bits", "4"], 2, "was calibrated with bits=2"),
        (["--artifact", ARTIFACTS / "temporalkv-2bit", "--model", "other"], 2,
         "belongs to the model 'reference' (layers 8), not to 'other' (layers 2)"),
        (["--method", "temporalkv", "--bits", "3"], 2, "bits=3"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["generate", "chat", "eval"])
def test_wrong_artifacts_are_found_before_the_model_loads(fails, monkeypatch, tmp_path, command, words, code, says):
    from transformers import LlamaConfig

    monkeypatch.setattr("kvq_cli.models.load_model", None)
    LlamaConfig(num_hidden_layers=2).save_pretrained(tmp_path / "other")
    fails(command, *(["x"] if command == "generate" else []), *words, code=code, says=says)
