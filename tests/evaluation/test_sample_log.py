"""Sample logs: resume, incomplete and damaged lines, separation by key."""

import errno
import json
import os

import pytest

from kvq_cli.errors import KvqError
from kvq_cli.evaluation.base import mean_and_stderr
from kvq_cli.evaluation.sample_log import SampleLog, read_records

KEY = {"task": "vt", "seed": 0}


def test_log_resumes(tmp_path):
    SampleLog(tmp_path, "vt-512", KEY).append([{"index": 0, "score": 1.0}, {"index": 1, "score": 0.5}])
    log = SampleLog(tmp_path, "vt-512", KEY)
    assert log.records == {0: {"index": 0, "score": 1.0}, 1: {"index": 1, "score": 0.5}}
    log.append([{"index": 2, "score": 0.0}])
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert lines[0] == {"key": KEY, "hashed": True} and [line["index"] for line in lines[1:]] == [0, 1, 2]


def test_fresh_discards_the_samples_of_the_run_alone(tmp_path):
    """A run of 2 samples leaves the third one of a longer run; what is discarded stays so."""
    SampleLog(tmp_path, "vt-512", KEY).append([{"index": index, "score": 1.0} for index in range(3)])
    log = SampleLog(tmp_path, "vt-512", KEY, fresh=2)
    assert list(log.records) == [2]
    log.append([{"index": 0, "score": 0.5}])
    again = SampleLog(tmp_path, "vt-512", KEY).records
    assert again == read_records(log.path) == {0: {"index": 0, "score": 0.5}, 2: {"index": 2, "score": 1.0}}


@pytest.mark.parametrize("cut", range(1, 26, 4))
def test_incomplete_last_line_is_evaluated_again(tmp_path, cut):
    log = SampleLog(tmp_path, "vt-512", KEY)
    log.append([{"index": 0, "score": 1.0}, {"index": 1, "score": 0.5}])
    os.truncate(log.path, log.path.stat().st_size - cut)
    again = SampleLog(tmp_path, "vt-512", KEY)
    assert list(again.records) == [0]
    again.append([{"index": 1, "score": 0.25}])
    assert SampleLog(tmp_path, "vt-512", KEY).records[1]["score"] == 0.25


def test_log_with_incomplete_key_starts_anew(tmp_path):
    log = SampleLog(tmp_path, "vt-512", KEY)
    os.truncate(log.path, 5)
    again = SampleLog(tmp_path, "vt-512", KEY)
    again.append([{"index": 0, "score": 1.0}])
    assert json.loads(again.path.read_text().splitlines()[0])["key"] == KEY
    assert list(SampleLog(tmp_path, "vt-512", KEY).records) == [0]


def test_runs_without_file_locks_lose_no_record(tmp_path, monkeypatch):
    """On a file system without locks, another run may append between this one's reading and its writing."""

    def no_locks(*_):
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr("fcntl.lockf", no_locks)
    logs = [SampleLog(tmp_path, "vt-512", KEY) for _ in range(2)]
    refresh, order = SampleLog.refresh, [0]

    def interleaved(log):
        incomplete = refresh(log)
        if log is logs[0] and order:
            logs[1].append([{"index": order.pop(), "score": 1.0}])
        return incomplete

    monkeypatch.setattr(SampleLog, "refresh", interleaved)
    logs[0].append([{"index": 1, "score": 0.5}])
    assert read_records(logs[0].path) == {0: {"index": 0, "score": 1.0}, 1: {"index": 1, "score": 0.5}}


def test_log_file_depends_on_settings(tmp_path):
    SampleLog(tmp_path, "vt-512", KEY).append([{"index": 0, "score": 1.0}])
    assert SampleLog(tmp_path, "vt-512", {**KEY, "seed": 1}).records == {}


SAMPLES = [{"index": index, "score": 0.25 * index, "text": "\u00e4\n"} for index in range(4)]


def damage(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    "old, new", [("0.25", "0.75"), ('"index": 1', '"index": 9'), ('{"index": 1', '{"in'), (', "score": 0.25', "")]
)
def test_damaged_line_is_evaluated_again(tmp_path, old, new):
    log = SampleLog(tmp_path, "vt-512", KEY)
    log.append(SAMPLES)
    damage(log.path, old, new)
    again = SampleLog(tmp_path, "vt-512", KEY)
    assert list(again.records) == [0, 2, 3] and again.damaged == [3]
    assert list(read_records(log.path, 1)) == [0, 2, 3]
    with pytest.raises(KvqError, match=r"line 3 is damaged: run the evaluation again"):
        read_records(log.path, 4)
    again.append(SAMPLES[1:2])
    assert sorted(read_records(log.path, 4).values(), key=lambda row: row["index"]) == SAMPLES


def test_removed_hash_is_damage(tmp_path):
    log = SampleLog(tmp_path, "vt-512", KEY)
    log.append(SAMPLES[:2])
    row = json.loads(log.path.read_text().splitlines()[2])
    damage(log.path, f', "sha256": "{row["sha256"]}"', "")
    assert list(SampleLog(tmp_path, "vt-512", KEY).records) == [0]


def test_keys_that_json_makes_text_are_no_damage(tmp_path):
    log = SampleLog(tmp_path, "vt-512", KEY)
    log.append([{"index": 0, "scores": {2: 1.0, 10: 2.0}}])
    assert SampleLog(tmp_path, "vt-512", KEY).records[0]["scores"] == {"2": 1.0, "10": 2.0}


def test_log_of_an_earlier_version_resumes_without_hashes(tmp_path):
    """Only the lines appended since are checked."""
    log = SampleLog(tmp_path, "vt-512", KEY)
    wrong = ['["no record"]', '{"index": "0"}', "[" * 100_000]
    old = [json.dumps({"key": KEY}), *map(json.dumps, SAMPLES[:2]), *wrong]
    log.path.write_text("\n".join(old) + "\n")
    log = SampleLog(tmp_path, "vt-512", KEY)
    assert list(log.records.values()) == SAMPLES[:2] and log.damaged == [4, 5, 6]
    log.append(SAMPLES[2:])
    assert read_records(log.path, 4) == dict(enumerate(SAMPLES))
    damage(log.path, "0.5", "0.75")
    assert list(SampleLog(tmp_path, "vt-512", KEY).records) == [0, 1, 3]


def test_mean_and_standard_error():
    assert mean_and_stderr([1.0]) == (1.0, None)
    mean, error = mean_and_stderr([0.0, 1.0, 1.0, 0.0])
    assert (mean, error) == (0.5, pytest.approx((1 / 3) ** 0.5 / 2))
