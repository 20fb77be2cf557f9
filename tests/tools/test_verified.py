"""`tools/verified.py`: which long suites must run again."""

from __future__ import annotations

import verified
from verified import ROOT, SUITES, Suite, main


def names(suite: Suite) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in verified.sources(suite)}


def test_a_suite_depends_on_what_its_tests_import_directly_or_not():
    vllm, launches = names(SUITES["vllm"]), names(SUITES["launches"])
    assert {"kvq_cli/vllm/backend.py", "kvq_cli/codecs/bits.py", "kernels/kvq_kernels/planar.py"} <= vllm
    assert {"tests/vllm/engine/test_tokens.py", "tests/support/vllm_engines.py", "constraints.txt"} <= vllm
    assert {"kernels/kvq_kernels/decode_attention/tuning.json", "tests/kernels/ptx/execute.py"} <= launches
    assert "kvq_cli/codecs/subspace.py" in launches  # by an import of a test
    assert not [name for name in launches if name.startswith(("kvq_cli/evaluation", "kvq_cli/report", "lab"))]


def test_a_suite_runs_again_after_a_change_of_its_sources(tmp_path, monkeypatch):
    source = tmp_path / "tests/one/test_one.py"
    source.parent.mkdir(parents=True)
    source.write_text("import json\n")
    monkeypatch.setattr(verified, "ROOT", tmp_path)
    monkeypatch.setattr(verified, "RECORD", tmp_path / "tests/verified.json")
    monkeypatch.setattr(verified, "sources", lambda suite: [source])
    (tmp_path / "constraints.txt").write_text("torch==1\nruff==1\n")
    monkeypatch.setitem(SUITES, "one", Suite(("tests/one",), pins=("torch",)))
    needed = 0
    assert main("needs", "one") == needed
    main("record", "one")
    assert main("needs", "one") != needed
    source.write_text("# Reads results.\nimport  json  # of one run\n")
    assert main("needs", "one") != needed  # comments and layout do not count
    source.write_text("import json, sys\n")
    assert main("needs", "one") == needed
    main("record", "one")
    (tmp_path / "constraints.txt").write_text("torch==1\nruff==2\n")
    assert main("needs", "one") != needed  # another package
    (tmp_path / "constraints.txt").write_text("torch==2\nruff==2\n")
    assert main("needs", "one") == needed


def test_launches_names_the_tests_of_kernels_that_are_slow():
    slow = {path.name for path in (ROOT / "tests/kernels").glob("test_*.py") if "mark.slow" in path.read_text()}
    assert {f"test_{name}.py" for name in verified.LAUNCHES} == slow
