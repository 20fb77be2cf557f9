"""Convert GGUF files to the Hugging Face format, each once, in the user's cache folder.

transformers reads the file and dequantizes its weights. A file of which it would leave something out (a scaled RoPE,
tensors without a place in its model) is refused: it would be another model.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from kvq_cli.errors import KvqError, UsageError, reading
from kvq_cli.files import MAX_SETTINGS, cannot_write, load_json, os_error, read_text
from kvq_cli.paths import short_name

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    Pair = tuple[PreTrainedModel, PreTrainedTokenizerBase]

READERS = ("accelerate", "gguf")
"""The packages with which transformers reads GGUF files."""
_CONFIG = "config.json"
#: The divisors of a scaled RoPE's frequencies, float32 [head_dim / 2].
_ROPE_DIVISORS = "rope_freqs.weight"
#: Most characters of a file's name in its folder's name.
_MAX_NAME = 100


def is_gguf(name: str) -> bool:
    """Whether `name` is that of a `.gguf` file; a model folder may have such a name, too."""
    return name.lower().endswith(".gguf") and not Path(name).expanduser().is_dir()


def models_folder() -> Path:
    """Where converted models are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvq" / "models"


def is_converted(folder: Path) -> bool:
    """Whether the folder has a model; `convert` leaves no part of one."""
    return (folder / _CONFIG).is_file()


def missing_readers() -> list[str]:
    """Those of `READERS` that are not installed."""
    return [name for name in READERS if find_spec(name) is None]


def gguf_folder(name: str, dtype: str = "auto") -> Path:
    """The model of a GGUF file in the Hugging Face format; converts it first where that was not done before.

    dtype: of the weights, one of `models.DTYPES`; "auto" is the file's floating-point type, or bfloat16 where it has
    weights in fewer bits. The folder's name has the file's name and sha256, and a dtype that is not the file's.
    KvqError where the file cannot be read as a model, what reads it is not installed, or the cache folder cannot be
    written.
    """
    path, option, own = _located(name)
    other = own.with_name(f"{own.name}-{dtype}")
    for folder in (own, other):
        if is_converted(folder) and (folder == other or dtype in ("auto", _dtype_of(folder))):
            return folder
    reader = _checked(path, option)
    stored = _float_type(reader)
    wanted = stored if dtype == "auto" else dtype
    folder = own if wanted == stored else other
    about = f"{sum(int(tensor.n_bytes) for tensor in reader.tensors) / 1e9:.2f} GB, to {wanted}"
    convert(folder, path.name, about, lambda: read_gguf(path, wanted, option, reader=reader))
    return folder


def gguf_config(name: str) -> PretrainedConfig:
    """Return the configuration of a GGUF file's model, as that of `gguf_folder(name)`; no weights are read or
    converted.

    KvqError as for `gguf_folder`.
    """
    import torch
    from transformers import AutoConfig

    path, option, own = _located(name)
    if is_converted(own):
        return AutoConfig.from_pretrained(own)
    reader = _checked(path, option)
    with reading(f"{option}: transformers cannot read {path.name}"):
        config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name, trust_remote_code=False)
        _scale_rope(config, reader)
    config.dtype = getattr(torch, _float_type(reader))
    return config


def _located(name: str) -> tuple[Path, str, Path]:
    """Return the file, the option that gave it, and the folder of the model in the file's dtype."""
    path, option = Path(name).expanduser(), f"--model {name}"
    if not path.is_file():
        raise KvqError(f"{option}: no such file; give the path of a .gguf file")
    with reading(option):
        state = path.stat()
        digest = _sha256(path.resolve(), state.st_size, state.st_mtime_ns)
    return path, option, models_folder() / f"{short_name(path.stem)[:_MAX_NAME]}-{digest[:12]}"


@cache
def _sha256(path: Path, size: int, changed: int) -> str:
    """size, changed (ns): so that a process reads a file again that changed."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _dtype_of(folder: Path) -> str:
    """The dtype in a converted model's config."""
    with reading(f"{folder}: cannot read {_CONFIG}"):
        return str(load_json(read_text(folder / _CONFIG, MAX_SETTINGS))["dtype"])


def convert(folder: Path, title: str, about: str, read: Callable[[], Pair]) -> None:
    """Write what `read` returns to `folder`, atomically, unless another process has done so meanwhile.

    title: the model's, in messages. about: its size, or how long it takes.
    KvqError where the folder cannot be written.
    """
    start = time.monotonic()

    def say(state: str) -> None:
        print(f"kvq: converting {title}, {state}", file=sys.stderr, flush=True)

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f"{folder.name}.lock"), title):
            if is_converted(folder):
                return
            for left in folder.parent.glob(f".{folder.name}.*"):  # by a process that was killed here
                shutil.rmtree(left, ignore_errors=True)
            say(f"once ({about})")
            model, tokenizer = read()
            say(f"1/2: weights read, {time.monotonic() - start:.0f} s elapsed")
            partial = Path(mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
            try:
                model.save_pretrained(partial)
                tokenizer.save_pretrained(partial)
                shutil.rmtree(folder, ignore_errors=True)
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            say(f"2/2: written to {folder}, {time.monotonic() - start:.0f} s elapsed")
    except SafetensorError as error:
        raise cannot_write(folder, os_error(error), "XDG_CACHE_HOME") from error
    except OSError as error:
        raise cannot_write(folder, error, "XDG_CACHE_HOME") from error


@contextmanager
def _locked(path: Path, title: str) -> Iterator[None]:
    import fcntl  # not on all systems: only the conversion needs it

    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"kvq: waiting for another process that converts {title}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _checked(path: Path, option: str) -> GGUFReader:
    """The file's tensors. KvqError where the file is damaged, or a part, or of an architecture that transformers does
    not read, or where what reads it is not installed."""
    if missing := missing_readers():
        raise KvqError(f"{option}: reading it needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    from gguf import GGUFReader
    from transformers import __version__
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, read_gguf_metadata
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    with reading(f"{option}: damaged, truncated or no GGUF file"):
        metadata, _ = read_gguf_metadata(str(path))  # first: fast, and ends where a length is wrong
        reader = GGUFReader(path)
    if (parts := metadata.get("split.count", 1)) > 1:
        raise KvqError(f"{option}: one of {parts} parts: join them with llama.cpp's `llama-gguf-split --merge`")
    architecture = str(metadata["general.architecture"])
    supported = {*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_CONFIG_ARCHS} - {"general", "tokenizer"}
    if _plain(architecture) not in map(_plain, supported):
        raise UsageError(
            f"{option}: transformers {__version__} does not read GGUF files of architecture {architecture!r}; it "
            f"reads {', '.join(sorted(supported))}"
        )
    return reader


def _plain(architecture: str) -> str:
    """Without what llama.cpp's and transformers' spelling differs by: gpt-oss and gpt_oss, qwen2moe and qwen2_moe."""
    return architecture.replace("-", "").replace("_", "")


def _float_type(reader: GGUFReader) -> str:
    """The dtype that holds the weights: the 16-bit one beside which norms are float32, or float32 alone."""
    types = {tensor.tensor_type.name for tensor in reader.tensors}
    plain = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    return next((dtype for kind, dtype in plain.items() if kind in types and types <= plain.keys()), "bfloat16")


def read_gguf(source: Path, dtype: str, option: str, advice: str = "", reader: GGUFReader | None = None) -> Pair:
    """The model of a GGUF file, with weights of `dtype`, and its tokenizer.

    option: named by errors, which end with `advice`. reader: of the file, if there is one; opening it takes seconds.
    KvqError where transformers cannot read all of the file.
    """
    # transformers draws bars, also where stderr is no terminal.
    bars = nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())
    with bars, reading(f"{option}: transformers cannot read {source.name}", advice):
        return _read(source, dtype, reader)


def _read(source: Path, dtype: str, reader: GGUFReader | None) -> Pair:
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    location: dict[str, Any] = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    location["trust_remote_code"] = False
    pair: Any = AutoModelForCausalLM.from_pretrained(
        **location,
        dtype=torch.float32,  # some weights are transformed, and rounded once, below
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    loaded, info = pair  # its type says nothing of `output_loading_info`
    if missing := sorted(info["missing_keys"]):  # transformers initializes them at random
        raise ValueError(f"it lacks the weights {missing[0]}" + f" and {len(missing) - 1} more" * bool(missing[1:]))
    reader = reader or GGUFReader(source)
    _check_all_are_read(loaded, reader)
    _scale_rope(loaded.config, reader)
    loaded.to(getattr(torch, dtype))
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "transformers_version", "model_type"):
        settings.pop(key, None)
    # `save_pretrained` refuses models read from GGUF: the weights move to a fresh model.
    with torch.device("meta"):
        model = type(loaded)(type(loaded.config)(**settings))
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    return model, AutoTokenizer.from_pretrained(**location)


def _check_all_are_read(model: PreTrainedModel, reader: GGUFReader) -> None:
    """ValueError where the file has weights that the model has no place for: transformers drops them."""
    stored = sum(int(tensor.n_elements) for tensor in reader.tensors if tensor.name != _ROPE_DIVISORS)
    held = sum({weight.data_ptr(): weight.numel() for weight in model.state_dict().values()}.values())  # tied ones once
    if stored != held:
        raise ValueError(f"{type(model).__name__} has {held:,} of its {stored:,} weights")


def _scale_rope(config: PretrainedConfig, reader: GGUFReader) -> None:
    """Give the config the file's scaled RoPE, which transformers reads of no architecture but gpt-oss.

    Layers with a sliding window keep theirs. ValueError for a scaling that transformers does not have.
    """
    every = getattr(config, "rope_parameters", None) or {}
    rope = every.get("full_attention", every)
    if rope.get("rope_type", "default") != "default":
        return
    fields = {key: field.contents() for key, field in reader.fields.items() if ".rope.scaling." in key}
    scaling = {key.rpartition(".")[2]: value for key, value in fields.items()}
    kind = scaling.pop("type", "none")
    scaling.pop("finetuned", None)
    if "original_context_length" in scaling:
        scaling["original_max_position_embeddings"] = scaling.pop("original_context_length")
    if kind == "yarn" and scaling.keys() == {"factor", "original_max_position_embeddings"}:
        rope |= {"rope_type": kind, **scaling}
    elif kind == "linear" and "factor" in scaling:
        rope |= {"rope_type": kind, "factor": scaling["factor"]}
    elif kind != "none":
        raise ValueError(f"its RoPE is scaled by {kind} with {', '.join(scaling)}, which transformers does not have")
    for tensor in reader.tensors:
        if tensor.name == _ROPE_DIVISORS:
            _divide_rope(config, tensor.data)


def _divide_rope(config: PretrainedConfig, divisors: Any) -> None:
    """Give the config the RoPE of Llama 3.1 and later, of which llama.cpp stores what it divides frequencies by.

    divisors: float32 [head_dim / 2]. ValueError where they are another model's.
    """
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stored = torch.tensor(divisors)
    if (stored == 1).all():
        return
    plain = getattr(config, "rope_parameters", None) or {}
    scaled = {"rope_type": "llama3", "factor": stored.max().item(), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config.update({"rope_parameters": {**plain, **scaled, "original_max_position_embeddings": 8192}})
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    dims = 2 * len(stored)
    unscaled = plain["rope_theta"] ** (-torch.arange(0, dims, 2) / dims)
    if frequencies.shape != stored.shape or not torch.allclose(unscaled / frequencies, stored, rtol=1e-5):
        raise ValueError(f"its RoPE has divisors ({_ROPE_DIVISORS}) that are not Llama 3's")
