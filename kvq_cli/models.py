"""Load a model with its tokenizer, and read its architecture sizes.

torch and transformers are imported inside the functions, so that importing this module is fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq_cli import packaged
from kvq_cli.codecs.layout import dtype_name
from kvq_cli.errors import KvqError, UsageError, did_you_mean, reading, reason
from kvq_cli.files import MAX_SETTINGS, load_json, read_text
from kvq_cli.gguf_models import gguf_config, gguf_folder, is_gguf
from kvq_cli.layer_kinds import attention_layers, layer_kinds

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from kvq_cli.methods.base import ModelShape

REFERENCE = "reference"
SMOLLM2 = packaged.SMOLLM2.name
GEMMA3_270M = packaged.GEMMA3_270M.name
REFERENCE_LENGTH = 1024
"""Longest sequences that the built-in model was trained on; its context is longer."""
#: The file that makes a folder an adapter of PEFT.
_ADAPTER = "adapter_config.json"
#: Kinds of RoPE whose `factor` scales the original length.
_SCALED = ("yarn", "linear", "dynamic")
DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in eval mode and its tokenizer.

    name: as passed to `load_model`. revision: the Hub commit, None for local files. trust_remote_code: whether Python
    code of the model's folder or repository was allowed to run.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    revision: str | None
    shape: ModelShape
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if any(parameter.device.type == "meta" for parameter in self.model.parameters()):
            raise KvqError(
                f"weights of the model {self.name!r} are on the device meta, as where accelerate offloads them: "
                "evaluation and calibration need all weights on one device, as load_model puts them"
            )

    @property
    def label(self) -> str:
        """The name, and that the model's own code was trusted, for messages and result files."""
        return f"{self.name} (trusted remote code)" if self.trust_remote_code else self.name

    @property
    def context(self) -> int:
        """The model's maximum sequence length."""
        return model_context(self.model.config)

    def default_length(self, limit: int) -> int:
        """`limit` tokens, or fewer where the model's context (the training length of the built-in model) is shorter."""
        return min(limit, self.context, REFERENCE_LENGTH if self.name == REFERENCE else limit)


def load_model(
    name: str = REFERENCE,
    device: str = "auto",
    dtype: str = "auto",
    *,
    trust_remote_code: bool = False,
    accept_license: bool = False,
) -> LoadedModel:
    """Load `name`: "reference", "smollm2" or "gemma3-270m" (see `packaged`), a folder in the Hugging Face format, a
    GGUF file (see `gguf_models`), or a Hub id.

    device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", which becomes the current one. dtype: one of
    `DTYPES`; "auto" is the dtype of the stored weights, or bfloat16 where a GGUF file has fewer bits.
    trust_remote_code: run the Python code that the model's `auto_map` names; never asked for on stdin. accept_license:
    accept the terms of use of "gemma3-270m", which its first use asks for.
    Raises KvqError where there is no such model, or one that needs code that is not trusted; UsageError for an unknown
    device or dtype.
    """
    import torch
    import transformers

    from kvq_cli.upcast import upcast_forward_passes

    target = torch_device(device)
    weight_dtype = _torch_dtype(dtype)
    packaged.check_dtype(name, dtype)
    source = model_source(name, accept_license, dtype)
    local = Path(source).is_dir() or not _on_the_hub(source)
    base = _base_source(source)
    if Path(source).is_dir():
        with _loading(name, ": config.json"):  # loading the tokenizer reads it, too
            transformers.AutoConfig.from_pretrained(base, local_files_only=local, trust_remote_code=trust_remote_code)
    words = source if any(Path(source).glob("tokenizer*")) else base
    tokenizer = _load_tokenizer(name, words, local, trust_remote_code)
    with _loading(name):
        pair: Any = transformers.AutoModelForCausalLM.from_pretrained(
            source,
            dtype=weight_dtype,
            local_files_only=local,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
        )
        model, info = pair  # its type says nothing of `output_loading_info`
    # transformers initializes missing weights, and weights of another shape, at random.
    if missing := sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise KvqError(f"cannot load the model {name!r}: its files lack the weights {missing[0]}{more}")
    if target.type == "cuda" and target.index is not None:
        torch.cuda.set_device(target)  # Triton and CUDA graphs take the current device, not the model's
    model = model.eval().to(target)
    model.requires_grad_(False)
    upcast_forward_passes(model)
    revision = getattr(model.config, "_commit_hash", None)
    return LoadedModel(model, tokenizer, name, revision, model_shape(model), trust_remote_code)


def _load_tokenizer(name: str, source: str, local: bool, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        with _loading(name, ": its tokenizer"):
            return AutoTokenizer.from_pretrained(source, local_files_only=local, trust_remote_code=trust_remote_code)
    except KvqError as error:
        # transformers' message lists the tokenizer classes instead.
        if Path(source).is_dir() and not any(Path(source).glob("*token*")):
            raise KvqError(
                f"cannot load the model {name!r}: the folder has no tokenizer; save it there, too"
            ) from error
        raise


@contextmanager
def _loading(name: str, part: str = "") -> Iterator[None]:
    """Raise KvqError for errors of libraries about missing, truncated or malformed files."""
    with _asks_for_trust(name), reading(f"cannot load the model {name!r}{part}"):
        yield


@contextmanager
def _asks_for_trust(name: str) -> Iterator[None]:
    """Name --trust-remote-code where transformers refuses to run code that is not trusted."""
    try:
        yield
    except KvqError as error:
        if "trust_remote_code" not in str(error.__cause__):
            raise
        raise KvqError(
            f"--model {name}: loading it would run Python code that comes with it; read that code, and pass "
            "--trust-remote-code if you trust it"
        ) from error


def model_name(model: PreTrainedModel) -> str:
    """Return the name of a model as for `load_model`, by what transformers loaded it from; empty for one made in
    memory."""
    from kvq_cli.reference import model_path

    source = getattr(model.config, "_name_or_path", "") or ""
    builtin = {str(model_path()): REFERENCE}
    builtin |= {str(packaged.converted_folder(each)): name for name, each in packaged.MODELS.items()}
    return builtin.get(source, source)


def vocabulary(model: PreTrainedModel) -> int:
    """The number of token ids that have an embedding; a tokenizer may have more."""
    return int(model.config.get_text_config().vocab_size)


def check_token_ids(model: PreTrainedModel, rows: Iterable[Sequence[int]]) -> None:
    """KvqError for a token id without embedding, which ends a process on a GPU."""
    size, largest = vocabulary(model), max((max(row) for row in rows if row), default=0)
    if largest >= size:
        raise KvqError(
            f"the tokenizer gave token id {largest:,}, the model has {size:,} embeddings: save the model's own "
            "tokenizer with it, or resize its embeddings to the tokenizer's"
        )


def model_shape(model: PreTrainedModel) -> ModelShape:
    """The architecture sizes of a decoder; UsageError for attention that kvq does not support."""
    return _shape_of(model.config, dtype_name(model.dtype))


def configured_shape(name: str, *, trust_remote_code: bool = False) -> ModelShape:
    """The architecture sizes of model `name` (as for `load_model`), from its configuration; weights are not read."""

    config = model_config(name, trust_remote_code)
    return _shape_of(config, dtype_name(getattr(config, "dtype", None) or "float16"))


def parameters_and_context(name: str, *, trust_remote_code: bool = False) -> tuple[int, int]:
    """(number of parameters, maximum sequence length) of model `name`, from its configuration; weights are not read."""
    import torch
    from transformers import AutoModelForCausalLM

    config = model_config(name, trust_remote_code)
    with _asks_for_trust(name), reading(f"--model {name}"), torch.device("meta"):  # it may be no decoder
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters()), model_context(config)


def model_config(name: str, trust_remote_code: bool) -> PretrainedConfig:
    """The configuration of model `name`, as for `load_model`; weights are not read."""
    from transformers import AutoConfig

    if is_gguf(name):
        return gguf_config(name)
    with _asks_for_trust(name), reading(f"--model {name}: cannot read its configuration"):
        return AutoConfig.from_pretrained(_base_source(model_source(name)), trust_remote_code=trust_remote_code)


def _shape_of(config: PretrainedConfig, dtype: str) -> ModelShape:
    from kvq_cli.methods.base import ModelShape

    config = text_config(config)
    if getattr(config, "kv_lora_rank", None):
        raise UsageError(f"a model of type {config.model_type} has latent attention, which kvq does not compress")
    if _has_alibi(config):
        raise UsageError(
            f"a model of type {config.model_type} adds ALiBi biases to its attention, which kvq does not compress"
        )
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        raise UsageError(f"a model of type {config.model_type} has no attention heads, and so no key-value cache")
    try:
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    except RuntimeError as error:  # transformers: an attribute that differs between layers
        raise UsageError(
            f"a model of type {config.model_type} has layers of different sizes, which kvq does not compress"
        ) from error
    windows = layer_windows(config)
    return ModelShape(
        layers=config.num_hidden_layers,
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=config.hidden_size,
        dtype=dtype,
        windows=windows,
        context=model_context(config) if windows else 0,
        attention=attention_layers(config),
    )


def layer_windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    """`ModelShape.windows`: empty where no layer has a sliding window, so that shapes of such models are equal."""
    window = getattr(config, "sliding_window", None)
    if not window or window < 1:
        return ()
    windows = tuple(window if kind == "sliding_attention" else None for kind in layer_kinds(config))
    return windows if any(windows) else ()


def _has_alibi(config: PretrainedConfig) -> bool:
    """Bloom always has ALiBi, Falcon's config has a flag, MPT's attention config too."""
    return config.model_type == "bloom" or any(
        getattr(part, "alibi", False) for part in (config, getattr(config, "attn_config", None))
    )


def model_context(config: PretrainedConfig) -> int:
    """The maximum sequence length in the config, scaled as its RoPE says; 2^31 where the config has none.

    `factor` multiplies the original length: the one that the parameters of the RoPE give, else
    `max_position_embeddings`. Other kinds of scaling (llama3, longrope), and Gemma 3, state the scaled length there.
    """
    config = text_config(config)
    stated = getattr(config, "max_position_embeddings", None) or 2**31
    if config.model_type.startswith("gemma3"):
        return stated
    scaled = [rope for rope in _rope_parameters(config) if rope.get("rope_type", rope.get("type")) in _SCALED]
    lengths = [(rope.get("original_max_position_embeddings") or stated) * (rope.get("factor") or 1) for rope in scaled]
    return max(stated, *map(int, lengths)) if lengths else stated


def _rope_parameters(config: PretrainedConfig) -> list[dict[str, Any]]:
    """The parameters of each RoPE of a text decoder; models whose layers differ have one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return [parameters, *(nested for nested in parameters.values() if isinstance(nested, dict))]


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The config of the text decoder (the config itself for a text model)."""
    return config.get_text_config(decoder=True)


def torch_device(name: str) -> torch.device:
    """The device `name`; UsageError where this machine does not have it."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: unknown device; valid: auto, cpu, cuda, cuda:<number>")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices; use cpu or auto")
    return device


def _torch_dtype(name: str) -> torch.dtype | str:
    import torch

    if name not in DTYPES:
        raise UsageError(f"--dtype {name}: unknown; valid: {', '.join(DTYPES)}")
    return name if name == "auto" else getattr(torch, name)


def model_source(name: str, accept_license: bool = False, dtype: str = "auto") -> str:
    """The folder or the Hub id that `name` is loaded from; accept_license, dtype: as for `load_model`."""
    from kvq_cli.reference import model_path

    if name == REFERENCE:
        folder = model_path()
        if not (folder / "config.json").is_file():
            raise KvqError(f"the reference model is not installed: {folder} has no config.json")
        return str(folder)
    if name in packaged.MODELS:
        return str(packaged.model_folder(packaged.MODELS[name], accept_license))
    if is_gguf(name):
        return str(gguf_folder(name, dtype))
    if not name.strip():
        raise KvqError(f"--model {name!r}: no such folder")
    path = Path(name).expanduser()
    if path.is_dir():
        if _is_adapter(path) and find_spec("peft") is None:
            raise KvqError(f"--model {name}: its adapter ({_ADAPTER}) needs PEFT: pip install peft")
        if not _is_adapter(path) and not (path / "config.json").is_file():
            raise KvqError(f"--model {name}: not a model folder: config.json is missing")
        return str(path)
    looks_like_a_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_like_a_path or path.exists():
        no_model = "neither a folder nor a .gguf file" if path.is_file() else "no such folder"
        raise KvqError(f"--model {name}: {no_model}{_similar(name)}")
    return name


def _is_adapter(folder: Path) -> bool:
    return (folder / _ADAPTER).is_file()


def _base_source(source: str) -> str:
    """Where the configuration, and without one of its own the tokenizer, of a model folder are: of an adapter alone,
    with its base model."""
    folder = Path(source)
    if not _is_adapter(folder) or (folder / "config.json").is_file():
        return source
    with reading(f"--model {source}: cannot read {_ADAPTER}"):
        base = load_json(read_text(folder / _ADAPTER, MAX_SETTINGS)).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise KvqError(f"--model {source}: {_ADAPTER} names no base model")
    return base


def _similar(name: str) -> str:
    return did_you_mean(name, (REFERENCE, *packaged.MODELS))


def _on_the_hub(name: str) -> bool:
    """True where the Hub has `name`; False where the Hub is unreachable but `name` is in the local cache.

    Checked once here, because transformers retries for almost a minute before it reports a missing network.
    """
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        huggingface_hub.HfApi().model_info(name, timeout=10)
        return True
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise KvqError(
            f"--model {name}: neither a local folder nor a model on the Hugging Face Hub{_similar(name)}"
        ) from error
    except Exception as error:  # every HTTP backend has its own class for network errors
        if isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
            return False
        raise KvqError(
            f"--model {name}: no such folder, never downloaded, and the Hugging Face Hub is unreachable; "
            f"use a local folder or {REFERENCE!r} ({reason(error)}){_similar(name)}"
        ) from error
