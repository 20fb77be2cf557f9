"""The artifact format: a folder with `config.json`, `tensors.safetensors` and a card, `README.md`.

`config.json` holds method, model, calibration settings, measured errors, and sizes and hashes of the files, its own
included. Truncated or altered files are refused by name; so are configs and tensors that the method cannot have
written, whatever their hashes: an artifact may come from anyone. Equal inputs give equal bytes: no file contains a time
or a path of the machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq_cli.artifact.contents import check_contents
from kvq_cli.artifact.fingerprint import Fingerprint, architecture, fingerprint
from kvq_cli.artifact.hub import local_folder, of_snapshot
from kvq_cli.artifact.names import CARD_FILE, CONFIG_FILE, TENSOR_FILE, is_artifact_file
from kvq_cli.artifact.schema import CONFIG, check_form, parse_json
from kvq_cli.artifact.stored import stored_tensors
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.files import cannot_write, file_size, partial_path, read_bytes, remove_partial
from kvq_cli.methods.registry import from_config, method_class, to_config
from kvq_cli.options import option_text

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

#: 2: klt keeps integers instead of codes of codebooks; all else is as in format 1.
FORMAT = 2
#: Most bytes of a `config.json`, which is read before anything in it can be checked; one of 8 layers has 11 KiB.
MAX_CONFIG = 64 << 20


@dataclass(frozen=True)
class Artifact:
    """A calibrated method.

    config:  the contents of `config.json`: `format`, `kvq`, `method`, `model`, `calibration`, `errors`, `sizes`,
             `files`, `checksum`.
    tensors: `layers.<i>.<k|v|x>.<name>` -> tensor, on the CPU.
    path:    the folder, or the id on the Hub with the commit that was read, for messages.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(repr=False)
    path: Path

    @property
    def method_config(self) -> dict[str, Any]:
        """The method and its options, for `methods.registry.from_config`."""
        return dict(self.config["method"])

    @property
    def model_name(self) -> str:
        """The model's name as passed to `--model`."""
        return self.config["model"]["name"]

    @property
    def digest(self) -> str:
        """Hash of the config, tensor hashes included: equal digests mean equal artifacts."""
        return self.config["checksum"]

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the model that the artifact was calibrated for."""
        return Fingerprint(**self.config["model"]["fingerprint"])

    def with_options(self, given: Mapping[str, Any]) -> Artifact:
        """The artifact with changed run-time options; UsageError for options that need another calibration.

        given: options of its method by name; strings are parsed.
        """
        config = self.method_config
        held = from_config(config)  # older artifacts lack options that were added later
        runtime = {f.name for f in fields(method_class(held.name)) if f.metadata.get("runtime")}
        wanted = from_config({**to_config(held), **given})
        changed = {key: getattr(wanted, key) for key in given if getattr(wanted, key) != getattr(held, key)}
        for key, value in changed.items():
            if key not in runtime:
                raise UsageError(
                    f"{key}={option_text(value)}: the artifact {self.path} was calibrated with "
                    f"{key}={option_text(getattr(held, key))}; calibrate again with the other value"
                )
        return replace(self, config={**self.config, "method": {**config, **changed}})

    def layer(self, index: int) -> dict[str, Tensor]:
        """The tensors of one layer without their prefix: `k.centroids.temporal`, `v.mean`, ..."""
        prefix = f"layers.{index}."
        return {name[len(prefix) :]: tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}

    def check_config(self, config: PretrainedConfig, name: str) -> None:
        """Raise UsageError, naming both models, if a model of this configuration has another architecture.

        Needs no weights; `check_model` compares these, too.
        """
        expected = asdict(self.fingerprint)
        for key, value in architecture(config).items():
            if value != expected[key]:
                raise UsageError(
                    f"artifact {self.path} belongs to the model {self.model_name!r} ({key} {expected[key]}), not to "
                    f"{name!r} ({key} {value}): pass --model {self.model_name} or calibrate for {name!r}"
                )

    def check_model(self, model: PreTrainedModel, name: str | None = None) -> None:
        """Raise UsageError, naming both models, unless the artifact was calibrated for `model`."""
        actual = fingerprint(model)
        if actual != self.fingerprint:
            name = name or getattr(model.config, "_name_or_path", "") or "this model"
            raise UsageError(
                f"artifact {self.path} belongs to the model {self.model_name!r} ({self.fingerprint}), "
                f"not to {name!r} ({actual}): pass --model {self.model_name} or calibrate for {name!r}"
            )


def load_artifact(path: str | os.PathLike) -> Artifact:
    """Read and verify an artifact: a folder, or a repository of the Hugging Face Hub ("user/repo@revision"), which is
    downloaded. A folder of that name comes first; without the Hub, the cached snapshot is read.

    Raises KvqError naming a file that is missing, truncated, altered or too new, or the entry or tensor that the method
    would not have written; or why the Hub does not give the repository.
    """
    folder = local_folder(path)
    with of_snapshot(path, folder) as name:
        config, data = _verified(folder)
    from safetensors.torch import load

    return Artifact(config, load(data), name)


def verified_config(path: str | os.PathLike) -> dict[str, Any]:
    """Verify an artifact as `load_artifact` does, and return its config alone. Needs no PyTorch."""
    folder = local_folder(path)
    with of_snapshot(path, folder):
        return _verified(folder)[0]


def _verified(folder: Path) -> tuple[dict[str, Any], bytes]:
    """The config and the file of tensors, both checked."""
    if folder.is_file():
        raise KvqError(f"{folder} is a file: give the artifact's folder, {folder.parent}")
    if not folder.is_dir():
        raise KvqError(f"no artifact at {folder}: not a folder (make one with `kvq calibrate --out {folder}`)")
    config = read_config(folder)
    path = folder / TENSOR_FILE
    data = _read_tensors(path, config["files"][TENSOR_FILE])
    try:
        tensors = stored_tensors(data)
    except Exception as error:  # of safetensors, NumPy or Python, depending on the damage
        raise KvqError(
            f"{path} is not a readable safetensors file ({type(error).__name__}): calibrate again"
        ) from error
    check_contents(config, tensors, folder / CONFIG_FILE)
    return config, data


def save_artifact(
    path: str | os.PathLike,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    card: str,
    *,
    overwrite: bool = False,
    pictures: Mapping[str, bytes] | None = None,
) -> Artifact:
    """Write an artifact atomically: the folder appears complete or not at all.

    config: without `format`, `files` and `checksum`, which are added. pictures: files of the card, by name. Raises
    KvqError where the folder cannot be written or `load_artifact` would refuse it, UsageError where it exists and
    `overwrite` is off.
    """
    folder = Path(path)
    check_replaceable(folder, overwrite=overwrite)
    tensors = {name: tensors[name].detach().to("cpu").contiguous() for name in sorted(tensors)}
    from safetensors.torch import save

    data = save(tensors)
    config = {"format": FORMAT, **config}
    config["files"] = {TENSOR_FILE: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}}
    config["checksum"] = _checksum(config)
    text = (json.dumps(config, indent=1) + "\n").encode()
    _check_loads(text, data, folder / CONFIG_FILE)
    with _replacing(folder) as partial:
        write_synced(partial / TENSOR_FILE, data)
        write_synced(partial / CARD_FILE, card.encode(errors="backslashreplace"))
        for name, picture in (pictures or {}).items():
            write_synced(partial / name, picture)
        write_synced(partial / CONFIG_FILE, text)
    return Artifact(config, tensors, folder)


def _check_loads(text: bytes, data: bytes, where: Path) -> None:
    """Raise KvqError, naming the entry or tensor, for a `config.json` or tensors that `load_artifact` would refuse."""
    try:
        config = json.loads(text)  # NaN is read, so that its entry is named
        check_form(config, CONFIG, str(where))
        check_contents(config, stored_tensors(data), where)
    except KvqError as error:
        reason = str(error).removesuffix(": calibrate again")
        raise KvqError(f"the artifact is not written, since it could not be loaded: {reason}") from error


def check_replaceable(folder: Path, *, overwrite: bool) -> None:
    """Raise UsageError unless `folder` is absent, or `overwrite` is on and it is empty or holds files of an artifact
    alone: models have a `config.json`, too. Also where the name that it gets meanwhile is taken."""
    if (replaced := _replaced(folder)).exists() and (why := _not_an_artifact(replaced)):
        raise UsageError(f"{replaced} is in the way and no artifact ({why}): move it, or choose another --out")
    if not folder.exists():
        return
    if not overwrite:
        raise UsageError(f"{folder} exists already: choose another --out, or pass --force to replace it")
    if why := _not_an_artifact(folder):
        raise UsageError(f"{folder} is not an artifact and will not be replaced ({why}): choose another --out")


def _not_an_artifact(folder: Path) -> str:
    """Why the path is no folder of an artifact; empty where it is one, or an empty folder."""
    if not folder.is_dir():
        return "it is a file"
    held = sorted(folder.iterdir())
    for path in held:
        if not (path.is_file() and is_artifact_file(path.name)):
            return f"it holds {path.name!r}"
    return f"it has no {CONFIG_FILE}" if held and not (folder / CONFIG_FILE).is_file() else ""


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and flush it to disk (fsync)."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _replaced(folder: Path) -> Path:
    """Where an artifact is while another takes its place; left there by a kill, it is moved back."""
    return folder.with_name(f".{folder.name}.replaced")


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder` that replaces it when the block succeeds and is removed when it fails."""
    partial, replaced = partial_path(folder), _replaced(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if replaced.exists() and not folder.exists():  # an earlier run was killed between the two renames
            replaced.rename(folder)
        remove_partial(folder)
        shutil.rmtree(replaced, ignore_errors=True)
        partial.mkdir()
        yield partial
        if folder.exists():
            folder.rename(replaced)
        partial.rename(folder)
    except OSError as error:
        raise cannot_write(folder, error) from error
    finally:
        if replaced.exists() and not folder.exists():  # failed between the two renames: restore it
            replaced.rename(folder)
        for leftover in (partial, replaced):
            shutil.rmtree(leftover, ignore_errors=True)


def read_config(folder: Path) -> dict[str, Any]:
    """Read and verify an artifact's `config.json` alone, without the tensors; KvqError as in `load_artifact`."""
    path = folder / CONFIG_FILE
    data = _read(path, MAX_CONFIG)
    try:
        config = parse_json(data)
        checksum = _checksum(config) if isinstance(config, dict) else None
    except (ValueError, RecursionError) as error:
        raise KvqError(f"{path} is not valid JSON (truncated or altered): calibrate again") from error
    if not isinstance(config, dict) or type(config.get("format")) is not int:
        raise KvqError(f"{path} is not the config of a kvq artifact: it has no format number")
    if config["format"] > FORMAT:
        raise KvqError(f"{path} has format {config['format']}, this kvq reads up to {FORMAT}: install a newer kvq")
    if config.get("checksum") != checksum:
        raise KvqError(f"{path} was altered (its checksum does not match): calibrate again")
    check_form(config, CONFIG, str(path))
    _refuse_codebooks(config, folder)
    return config


def _refuse_codebooks(config: Mapping[str, Any], folder: Path) -> None:
    """Raise KvqError for an artifact with streams of klt as they were in format 1."""
    method = config["method"]
    parts = f"{method.get('keys')} {method.get('values')}".split() if method.get("name") == "mixed" else []
    if config["format"] > 1 or not (method.get("name") == "klt" or any(part.startswith("klt") for part in parts)):
        return
    command = ["kvq", *(("tune", "--budget") if parts else ("calibrate", "--method", "klt", "--bits"))]
    command += [f"{method.get('bits')}", "--model", config["model"]["name"], "--out", str(folder), "--force"]
    raise KvqError(
        f"{folder} has codebooks of klt (format {config['format']}), which this kvq no longer reads: make a new "
        f"artifact with `{shlex.join(command)}`"
    )


def _read_tensors(path: Path, expected: Mapping[str, Any]) -> bytes:
    """The contents of a file with `expected` bytes, compared before it is read, and sha256, before it is parsed."""
    try:
        size = file_size(path)
    except OSError as error:
        raise _cannot_read(path, error) from error
    if size != expected["bytes"]:
        raise KvqError(f"{path} has {size:,} bytes instead of {expected['bytes']:,}: calibrate again")
    data = _read(path, size)
    if hashlib.sha256(data).hexdigest() != expected["sha256"]:
        raise KvqError(f"{path} was altered (its hash is not the one in {CONFIG_FILE}): calibrate again")
    return data


def _checksum(config: Mapping[str, Any]) -> str:
    hashed = {key: value for key, value in config.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()


def _read(path: Path, at_most: int) -> bytes:
    try:
        return read_bytes(path, at_most)
    except OSError as error:
        raise _cannot_read(path, error) from error


def _cannot_read(path: Path, error: OSError) -> KvqError:
    return KvqError(f"cannot read {path}: {error.strerror or error}")
