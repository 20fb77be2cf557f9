"""`kvq results --calibrations`: means over artifacts of one method, and their spread."""

from __future__ import annotations

import json

import pytest


def document(name, kl, bits=2, artifact=None):
    return {
        "results": {"perplexity": {"perplexity,none": 10 + kl, "kl,none": kl, "kl_stderr,none": 0.5}},
        "higher_is_better": {"perplexity": {"perplexity": False, "kl": False}},
        "n-samples": {"perplexity": {"effective": 3}},
        "cache": {"p": {"nominal_bits": bits, "measured_bits": bits + 1, "bytes": 2048, "ratio": 4, "tokens": 9}},
        "config": {
            "method": {"name": name, "bits": bits},
            "artifact": artifact,
            "folder": f"{name}-{bits}bit" + (f",artifact={artifact}" if artifact else ""),
            "model_args": {"name": "reference"},
        },
        "samples": {},
    }


@pytest.fixture
def folder(tmp_path):
    methods = {
        "fp16": document("fp16", 0.0, 16),
        "0": document("temporalkv", 0.1, artifact="0123abcd"),
        "1": document("temporalkv", 0.2, artifact="0123abce"),
        "2": document("temporalkv", 0.3, artifact="0123abcf"),
        "2 (again)": document("temporalkv", 0.4, artifact="0123abcf"),
        "klt-2bit": document("klt", 0.05, artifact="99"),
    }
    (tmp_path / "comparison.json").write_text(json.dumps({"methods": methods}))
    return tmp_path


def test_artifacts_of_one_method_are_one_row_with_their_spread(kvq, folder):
    found = kvq("results", folder, "--calibrations", "--format", "markdown", "--columns", "KL to fp16,measured bits")
    assert found.stdout.splitlines()[2:] == [
        "| fp16 | 0 | 17 | 1 |",
        "| temporalkv-2bit | 0.20000 ±0.10000 | 3 | 3 |",
        "| klt-2bit | 0.05 | 3 | 1 |",
    ]
    rows = json.loads(kvq("results", folder, "--calibrations", "--json").stdout)["rows"]
    assert rows["temporalkv-2bit"]["KL to fp16"] == {"value": pytest.approx(0.2), "error": pytest.approx(0.1)}
    assert rows["temporalkv-2bit"]["measured bits"] == {"value": 3, "error": None}
    head = kvq("results", folder, "--calibrations", "--transpose", "--format", "csv").stdout.splitlines()[0]
    assert head == "method,fp16,temporalkv-2bit,klt-2bit"


def test_results_without_two_artifacts_of_a_method_are_refused(kvq, fails, folder):
    document = json.loads((folder / "comparison.json").read_text())
    del document["methods"]["0"], document["methods"]["1"]
    (folder / "comparison.json").write_text(json.dumps(document))
    fails("results", folder, "--calibrations", code=2, says="no method has results of two artifacts")
