"""What a target's result depends on beside its command: versions, files that the command names, the model's weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvq_cli import RESULTS, reference
from kvq_cli.benchmarking.shapes import SHAPES
from kvq_cli.calibration.kmeans import VERSION as CLUSTERING
from kvq_cli.data.texts import file_digest
from kvq_cli.evaluation.base import DRIFT, PERPLEXITY
from kvq_cli.evaluation.drift import DriftEvaluation
from kvq_cli.evaluation.lm_eval.task_groups import is_lm_eval
from kvq_cli.evaluation.perplexity import PerplexityEvaluation
from kvq_cli.evaluation.ruler.evaluation import RulerEvaluation
from kvq_cli.files import MAX_SETTINGS, read_text
from kvq_cli.methods.base import Method
from kvq_cli.models import REFERENCE, SMOLLM2
from kvq_cli.papers.targets import Target

#: Studies that cluster captured activations.
_CLUSTERING_STUDIES = ("error", "quantizers")
#: Options, also as keys of a `--config` file, whose values may be files.
_FILES = ("config", "dataset", "haystack", "qa-file")
#: Files of a model's folder that its answers may depend on: weights, configuration, tokenizer, code.
_MODEL_FILES = frozenset((".safetensors", ".bin", ".pt", ".gguf", ".json", ".model", ".txt", ".jinja", ".py"))


def versions(target: Target, model: str) -> dict[str, Any]:
    """Versions of what computes the result: `results` (`kvq_cli.RESULTS`), of an evaluation also `versions` by task, of
    methods and studies that cluster `clustering` (`calibration.kmeans.VERSION`).

    Empty for a fixed command, such as `bits --papers`, which has neither samples nor activations.
    """
    if target.run:
        return {}
    common: dict[str, Any] = {"results": RESULTS}
    if target.analyze in _CLUSTERING_STUDIES or any(map(clusters, target.calibrated(model))):
        common["clustering"] = CLUSTERING
    if not target.eval:
        return common
    tasks = command_options(target.command(model)).get("task", [PERPLEXITY])[-1].split(",")
    return {**common, "versions": {name.strip(): _version(name.strip()) for name in tasks}}


def file_digests(target: Target, model: str) -> dict[str, str]:
    """The sha256, by path, of the files that the command and its `--config` file name and that exist here."""
    options = command_options(target.command(model))
    named = [name.strip() for option in _FILES for value in options.get(option, []) for name in value.split(",")]
    return {name: digest for name in named if (digest := file_digest(name)) is not None}


def model_version(model: str) -> str:
    """The model's name; of the built-in model, a folder and a GGUF file, also a hash of the files, which may change in
    place.

    `artifact.fingerprint.weights_digest` needs the model in memory: too slow for a list of targets. A Hub model's files
    are those of its name, SmolLM2's have a fixed hash.
    """
    if model == REFERENCE:
        weights = (reference.model_path() / "model.safetensors").read_bytes()
        return f"{model} {hashlib.sha256(weights).hexdigest()[:16]}"
    path = Path(model).expanduser()
    if model == SMOLLM2 or not path.exists():
        return model
    paths = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in _MODEL_FILES and p.is_file())
    states = ((path, path.stat()) for path in paths)
    return f"{model} {_folder_digest(tuple((path, each.st_size, each.st_mtime_ns) for path, each in states))}"


@cache
def _folder_digest(files: tuple[tuple[Path, int, int], ...]) -> str:
    """files: path, size, time of the last change. Once per process: the weights may be many gigabytes."""
    digest = hashlib.sha256()
    for path, size, _ in files:
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def clusters(method: Method) -> bool:
    """Whether calibrating this method captures and clusters activations."""
    shape = SHAPES["llama-3.1-8b"].model_shape()  # any: it does not depend on it
    return method.calibration(shape).captures


def _version(task: str) -> Any:
    if is_lm_eval(task):
        try:
            return version("lm_eval")
        except PackageNotFoundError:
            return None
    own = {PERPLEXITY: PerplexityEvaluation.version, DRIFT: DriftEvaluation.version}
    return own.get(task, RulerEvaluation.version)


def command_options(words: Sequence[str]) -> dict[str, list[str]]:
    """The values of each option of a command, in order; of those that it does not give, of its `--config` file."""
    found: dict[str, list[str]] = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            found.setdefault(_option(name), []).append(value if equals else following)
    for path in found.get("config", [])[-1:]:
        for key, value in _read_config(Path(path)).items():
            found.setdefault(_option(str(key)), [",".join(map(str, value)) if isinstance(value, list) else str(value)])
    return found


def _option(name: str) -> str:
    name = name.lstrip("-").replace("_", "-")
    return "task" if name == "tasks" else name


def _read_config(path: Path) -> dict[str, Any]:
    """Empty for a file that cannot be read: the command reports the error."""
    import yaml

    try:
        content = yaml.safe_load(read_text(path, MAX_SETTINGS))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}
