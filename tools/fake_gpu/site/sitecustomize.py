"""Activates the fake GPU when Python starts, in child processes too.

KVQ_FAKE_GPU=host|skip|none: activate the fake device. KVQ_COMPILE=forbid: a kernel that is not in Triton's cache fails
instead of being compiled. KVQ_CACHE_USED=FILE: list the entries of Triton's cache that are looked up.
"""

import os
import sys
from pathlib import Path

if {"KVQ_FAKE_GPU", "KVQ_COMPILE", "KVQ_CACHE_USED"} & os.environ.keys():
    sys.path.insert(0, str(Path(__file__).absolute().parents[2]))
    from fake_gpu import activate

    if "KVQ_FAKE_GPU" in os.environ:
        activate.activate(os.environ["KVQ_FAKE_GPU"])
    if os.environ.get("KVQ_COMPILE") == "forbid":
        activate.forbid_compilation()
    if "KVQ_CACHE_USED" in os.environ:
        activate.record_cache_entries(Path(os.environ["KVQ_CACHE_USED"]))
