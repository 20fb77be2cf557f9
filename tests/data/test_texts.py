"""Datasets, text files, and token windows."""

import gzip
import json
import lzma
import random
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvq_cli.data.texts import (
    C4_SAMPLES,
    check_dataset,
    dataset_names,
    document_windows,
    evaluation_windows,
    file_digest,
    load_text,
    sampled_windows,
    text_name,
    token_windows,
)
from kvq_cli.errors import KvqError, UsageError


class Letters:
    """A tokenizer whose tokens are characters, after a BOS token."""

    bos_token_id = 1

    def __call__(self, text, return_tensors, verbose):
        class Encoded:
            input_ids = torch.tensor([[1, *map(ord, text)]])

        return Encoded

    def __len__(self):
        return 128


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_byte_order_mark_is_not_text(tmp_path, name):
    with (gzip.open if name.endswith(".gz") else open)(tmp_path / name, "wb") as file:
        file.write("\ufeffabc".encode())
    assert load_text(str(tmp_path / name), "calibration") == "abc"


@pytest.mark.parametrize("name", ["prose", "pydoc"])
def test_built_in_texts_have_disjoint_splits(name):
    calibration, evaluation = (load_text(name, split) for split in ("calibration", "evaluation"))
    assert min(len(calibration), len(evaluation)) > 100_000
    paragraphs = {p for p in evaluation.split("\n\n") if len(p) > 200}
    assert len(paragraphs) > 100
    assert not paragraphs & set(calibration.split("\n\n"))


def test_token_windows_are_consecutive_without_overlap_or_tail():
    windows = token_windows(Letters(), "abcdefghij", 4)
    assert windows.tolist() == [[1, *b"abc"], [*b"defg"]]
    assert token_windows(Letters(), "abcdefghij", 4, samples=1).tolist() == [[1, *b"abc"]]


def test_seeded_token_windows_are_a_deterministic_subset():
    text = "".join(chr(33 + i // 50) + chr(33 + i % 50) for i in range(250))
    every = {tuple(w) for w in token_windows(Letters(), text, 10).tolist()}
    drawn = token_windows(Letters(), text, 10, samples=20, seed=7)
    assert drawn.shape == (20, 10)
    assert drawn.equal(token_windows(Letters(), text, 10, samples=20, seed=7))
    assert not drawn.equal(token_windows(Letters(), text, 10, samples=20, seed=8))
    chosen = {tuple(w) for w in drawn.tolist()}
    assert len(chosen) == 20 and chosen <= every


def test_long_text_is_tokenized_in_part():
    text = "x" * 100_000 + "y" * 100_000
    drawn = [token_windows(Letters(), text, 8, samples=2, seed=seed)[:, 1:] for seed in range(20)]
    assert any((w == ord("x")).all() for w in drawn) and any((w == ord("y")).all() for w in drawn)


def test_text_of_long_tokens_is_tokenized_whole_before_it_is_too_short():
    class Lines(Letters):
        """Tokens are whole lines."""

        def __call__(self, text, return_tensors, verbose):
            return super().__call__("".join(line[0] for line in text.split("\n") if line), return_tensors, verbose)

    text = "\n".join(chr(65 + i % 26) * 80 for i in range(60))
    windows = token_windows(Lines(), text, 10, samples=4, seed=0)
    assert {tuple(w) for w in windows.tolist()} <= {tuple(w) for w in token_windows(Lines(), text, 10).tolist()}
    with pytest.raises(KvqError, match="too short: 61 tokens found, 70 needed"):
        token_windows(Lines(), text, 10, samples=7)


def test_short_text_error_names_tokens_found_and_needed():
    with pytest.raises(KvqError, match="too short: 11 tokens found, 40 needed for 4 windows of 10"):
        token_windows(Letters(), "abcdefghij", 10, samples=4, seed=0)
    with pytest.raises(KvqError, match="11 tokens found, 12 needed for one window of 12"):
        token_windows(Letters(), "abcdefghij", 12)


class GemmaLetters(Letters):
    """Gemma's tokenizer is told by its name."""


def test_each_window_of_gemma_begins_with_bos():
    """The text's own BOS is not another one."""
    assert token_windows(GemmaLetters(), "abcdefghij", 4).tolist() == [[1, *b"abc"], [1, *b"def"], [1, *b"ghi"]]
    assert token_windows(GemmaLetters(), "abcdef", 4, samples=2).shape == (2, 4)  # six tokens are enough
    assert token_windows(GemmaLetters(), "ab", 1).tolist() == [[1], *([letter] for letter in b"ab")]  # no room
    drawn = token_windows(GemmaLetters(), "".join(map(chr, range(65, 91))), 4, samples=5, seed=1)
    assert drawn[:, 0].tolist() == [1] * 5 and (drawn[:, 1:] >= 65).all()


def test_document_windows_of_gemma_begin_with_bos():
    windows = document_windows(GemmaLetters(), ["abc", "defghijkl"], 4, 30, seed=0)
    assert windows.shape == (30, 4) and (windows[:, 0] == 1).all()
    assert (windows[:, 2:] - windows[:, 1:-1] == 1).all()  # letters in order
    assert {chr(row[1]) for row in windows.tolist()} == set("adefghi")  # GPTQ's draw leaves out the last start


def _documents(count=40):
    """Documents of 5 to 44 letters."""
    return ["".join(chr(65 + (i + k) % 26) for k in range(5 + i)) for i in range(count)]


def test_document_windows_equal_the_draws_of_gptq():
    """`random.seed(0)`, a document until one is long enough, then a start: in this order, from one generator."""
    documents, seqlen = _documents(), 20
    random.seed(0)
    expected = []
    while len(expected) < 30:
        tokens = [1, *map(ord, documents[random.randint(0, len(documents) - 1)])]
        if len(tokens) >= seqlen:
            start = random.randint(0, len(tokens) - seqlen - 1) if len(tokens) > seqlen else 0
            expected.append(tokens[start : start + seqlen])
    found = document_windows(Letters(), documents, seqlen, 30, seed=0)
    assert found.tolist() == expected
    assert not found.equal(document_windows(Letters(), documents, seqlen, 30, seed=1))
    with pytest.raises(KvqError, match="none of 40 documents has 100 tokens: take a smaller --seqlen"):
        document_windows(Letters(), documents, 100, 1, seed=0)
    with pytest.raises(KvqError, match="has no document"):
        document_windows(Letters(), [], 100, 1, seed=0)


def test_local_copies_give_the_rows_of_the_hub(tmp_path):
    raw = " \n = Title = \n \n One line . \n Another . \n \n"
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "test.txt").write_text(raw)
    joined = "\n\n".join(["", " = Title = \n", "", " One line . \n", " Another . \n", ""])  # the Hub's rows
    assert load_text("wikitext2", "evaluation", tmp_path) == joined
    assert evaluation_windows(Letters(), "wikitext2", 8, data_dir=tmp_path).flatten().tolist() == [
        1,
        *map(ord, joined[: (len(joined) + 1) // 8 * 8 - 1]),
    ]
    (tmp_path / "ptb").mkdir()
    (tmp_path / "ptb" / "validation.txt").write_text(" no it was n't \n but <unk> said N \n")
    assert load_text("ptb", "evaluation", tmp_path) == "no it was n't\n\nbut <unk> said N"


@pytest.mark.parametrize("place", ["c4/validation.jsonl", "allenai/c4/en/c4-validation.00000-of-00008.json.gz"])
def test_local_copy_of_c4_gives_256_document_windows(tmp_path, place):
    path = tmp_path / place
    path.parent.mkdir(parents=True)
    lines = "".join(json.dumps({"text": text, "url": "x"}) + "\n" for text in _documents()).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    windows = evaluation_windows(Letters(), "c4", 20, data_dir=tmp_path)
    assert windows.equal(document_windows(Letters(), _documents(), 20, C4_SAMPLES, seed=0))
    assert windows.shape == (256, 20)


def test_missing_local_copy_error_names_its_path(tmp_path):
    for name, place in (
        ("wikitext2", "wikitext2/test.txt"),
        ("c4", "c4/validation.txt"),
        ("ptb", "ptb/validation.txt"),
    ):
        with pytest.raises(KvqError, match=rf"'{name}': --data-dir .* has no {place}, .jsonl or .parquet"):
            load_text(name, "evaluation", tmp_path)
    (tmp_path / "ptb").mkdir()
    (tmp_path / "ptb" / "validation.jsonl").write_text('{"text": "one"}')
    with pytest.raises(KvqError, match='validation.jsonl, line 1: not a JSON object with the field "sentence"'):
        load_text("ptb", "evaluation", tmp_path)


def test_text_and_json_lines_files(tmp_path):
    plain, packed = tmp_path / "a.txt", tmp_path / "a.txt.xz"
    plain.write_text("one\ntwo")
    packed.write_bytes(lzma.compress(b"one\ntwo"))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "one"}) + "\n\n" + json.dumps({"text": "two", "n": 1}))
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress((tmp_path / "rows.jsonl").read_bytes()))
    assert load_text(str(plain), "calibration") == load_text(str(packed), "evaluation") == "one\ntwo"
    for name in ("rows.jsonl", "rows.jsonl.gz"):
        assert load_text(str(tmp_path / name), "calibration") == "one\n\ntwo"


def test_a_field_of_rows_is_named_behind_the_file(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "one", "text": "x"}) + "\n" + json.dumps({"question": "two"}))
    named = f"{rows}:question"
    assert load_text(named, "calibration") == "one\n\ntwo"
    assert file_digest(named) == file_digest(str(rows)) and text_name(named) == "rows_question"
    with pytest.raises(KvqError, match='rows.jsonl, line 2: not a JSON object with the field "text"'):
        load_text(str(rows), "calibration")
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(UsageError, match=r"a.txt:question: only .jsonl and .parquet files have fields"):
        check_dataset(f"{tmp_path}/a.txt:question")
    with pytest.raises(UsageError, match="no dataset"):
        check_dataset(f"{tmp_path}/none.jsonl:question")
    (tmp_path / "odd:name.txt").write_text("odd")
    assert load_text(f"{tmp_path}/odd:name.txt", "calibration") == "odd"


def test_parquet_files(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["one", "two"]}), path)
    assert load_text(str(path), "calibration") == "one\n\ntwo"
    parquet.write_table(pyarrow.table({"words": ["one"]}), path)
    with pytest.raises(KvqError, match='column "text"'):
        load_text(str(path), "calibration")
    parquet.write_table(pyarrow.table({"text": ["one", None]}), path)
    with pytest.raises(KvqError, match='rows.parquet, row 2: the field "text" is not text'):
        load_text(str(path), "calibration")
    path.write_bytes(b"no parquet")
    with pytest.raises(KvqError, match="rows.parquet is not a Parquet file"):
        load_text(str(path), "calibration")


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.jsonl", b'{"text": "one"}\n{"text": ', "a.jsonl, line 2: not a JSON object"),
        ("a.jsonl", b'{"words": "one"}', 'line 1: not a JSON object with the field "text"'),
        ("a.jsonl", b'{"text": "one"}\n{"text": null}', 'a.jsonl, line 2: the field "text" is not text'),
        ("a.txt", b"\xff\xfe\x00", "cannot read the text of .*a.txt"),
        ("a.txt.xz", b"no archive", "cannot read the text of .*a.txt.xz"),
        ("a.txt.gz", b"no archive", "cannot read the text of .*a.txt.gz"),
        ("a.txt.gz", gzip.compress(b"text", mtime=0)[:10] + b"damaged" * 9, "cannot read the text of .*a.txt.gz"),
        ("a.txt", b" \n ", "a.txt contains no text"),
    ],
)
def test_malformed_files_are_named(tmp_path, name, data, says):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(KvqError, match=says):
        load_text(str(tmp_path / name), "calibration")


def test_unknown_dataset_error_lists_the_datasets():
    with pytest.raises(UsageError, match=r"no dataset 'nonsense'.*prose, pydoc, self, wikitext2, c4, ptb"):
        load_text("nonsense", "calibration")
    assert "self" in dataset_names()
    with pytest.raises(UsageError, match="unknown split 'test'"):
        load_text("prose", "test")


@pytest.mark.parametrize(("package", "name"), [("datasets", "wikitext2"), ("pyarrow", "rows.parquet")])
def test_missing_package_error_names_the_extra(tmp_path, monkeypatch, package, name):
    (tmp_path / "rows.parquet").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(KvqError, match=rf"{package}, which is not installed: pip install '\.\[datasets\]'"):
        load_text(name, "calibration")


@pytest.mark.parametrize("name", ["wikitext2", "c4", "ptb"])
def test_offline_hub_dataset_error_names_the_offline_datasets(name, capfd):
    pytest.importorskip("datasets")
    with pytest.raises(KvqError) as caught:
        load_text(name, "calibration")
    said = str(caught.value)
    assert f"dataset '{name}' cannot be loaded" in said and "\n" not in said
    assert "prose, pydoc, self, or a .txt, .jsonl or .parquet file" in said
    assert capfd.readouterr().err == ""


def test_sampled_windows_follow_the_model_and_the_seed():
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, eos_token_id=5))
    with torch.no_grad():  # token 9 is nearly always drawn; EOS would be nearly as often
        model.model.norm.weight.zero_()
        model.lm_head.bias = torch.nn.Parameter(torch.full((128,), -20.0))
        model.lm_head.bias[9], model.lm_head.bias[5] = 3.0, 2.9
    windows = sampled_windows(model, Letters(), seqlen=12, samples=3, seed=1, batch=2)
    assert windows.tolist() == [[1] + [9] * 11] * 3
    with torch.no_grad():
        model.lm_head.bias.zero_()
    first = sampled_windows(model, Letters(), 12, 3, seed=1)
    assert first.equal(sampled_windows(model, Letters(), 12, 3, seed=1))
    assert not first.equal(sampled_windows(model, Letters(), 12, 3, seed=2))
    assert first.unique().numel() > 10
