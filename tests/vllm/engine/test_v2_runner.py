"""vLLM's V2 runner, which it takes on GPUs: the tests of V1 again, in a process where Triton's interpreter runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_engines import V2

CASES = (
    "test_tokens.py::test_concurrent_requests_prefix_hits_and_samples_equal_generate[kivi:sinks=32:recent=96]",
    "test_tokens.py::test_concurrent_requests_prefix_hits_and_samples_equal_generate[kvquant]",
    "test_tokens.py::test_concurrent_requests_prefix_hits_and_samples_equal_generate[klt]",
    "test_tokens.py::test_chunked_prefill_and_preemption_in_a_new_engine_equal_generate[kivi]",
    "test_drafts.py::test_ngram_drafts_equal_generate[kivi:sinks=32:recent=96]",
    "test_local_layers.py::test_concurrent_requests_and_prefix_hits_equal_generate[klt:local=16bit]",
    "test_kernels.py::test_tokens_equal_generate[kivi:residual=32-False]",
    "test_kernels.py::test_tokens_equal_generate[klt-True]",
)


@pytest.mark.skipif(V2, reason="this is the process with V2")
def test_tokens_equal_generate():
    """`RunningEngine` asserts that the runner is V2's."""
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [f"{here}/{case}" for case in CASES]
    done = subprocess.run(command, env=os.environ | {"KVQ_TEST_V2": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and f"{len(CASES)} passed" in done.stdout, done.stdout[-5000:]
