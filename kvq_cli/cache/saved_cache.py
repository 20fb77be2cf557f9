"""Caches on disk: one safetensors file with the packed tensors, the token ids of the prompt, and what it belongs to.

The file's metadata has one entry, `kvq`, a JSON document of the form `FORM`. A file that was truncated or altered is
refused, and so is one for another model, method, option, artifact or format. Its tensors must have the names, shapes
and dtypes that the method stores for as many tokens, and numbers that its codecs can have written: a file may come from
anyone. Tokens that no later query sees are left out: of layers with a sliding window, since format 3. Packed parts of
codecs that say so are compressed by DEFLATE; their names end in `.deflate`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvq_cli.artifact.fingerprint import Fingerprint
from kvq_cli.artifact.schema import DTYPE, FINGERPRINT, Form, Many, OneOf, OrNone, Whole, check_form, parse_json
from kvq_cli.artifact.stored import check_spec
from kvq_cli.cache.deflate import SUFFIX, deflated, inflated
from kvq_cli.cache.rows import Rows
from kvq_cli.cache.snapshot import Snapshot, expected
from kvq_cli.codecs.layout import TensorSpec, spec_of
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.files import file_size, os_error, replacing

if TYPE_CHECKING:
    from kvq_cli.cache.cache import CompressedCache
    from kvq_cli.cache.layer import CompressedLayer
    from kvq_cli.cache.stream import Stream

FORMAT = 3
#: Of a file of format 2, layers with a sliding window hold all tokens.
FORMATS = (2, FORMAT)
FORM: Form = {
    "format": OneOf(FORMATS),
    "kvq": str,
    "model": FINGERPRINT,
    "weights": str,
    "dtype": DTYPE,
    "method": dict,
    "artifact": OrNone(str),
    "prefill": OneOf(("exact", "compressed")),
    "rows": {name: Many(Whole(0, 2**31)) for name in ("pads", "offsets", "prompts")},
    "document": Whole(),
    "template": OrNone(str),
    "sha256": str,
    "checksum": str,
}
_KEY, _IDS, _TEXT = "kvq", "prompt.ids", "prompt.text"
#: The option of methods that says how layers with a sliding window are stored; `auto` changed with versions.
_LOCAL = "local"


@dataclass(frozen=True)
class Origin:
    """What a cache belongs to: it continues correctly only with the same.

    weights: see `weights_digest`. method: name and options, as `methods.registry.to_config` gives them. artifact: the
    digest of the artifact, None for a method without one. dtype: of the model. prefill: see `attach`.
    """

    model: Fingerprint
    weights: str
    dtype: str
    method: Mapping[str, Any]
    artifact: str | None
    prefill: str


@dataclass(frozen=True)
class SavedPrompt:
    """The prompt of a saved cache.

    ids:      int64 `[batch, tokens]`, pads included.
    text:     the text of a single row, if known: the last `document` characters are the user's, the others a chat
              template's.
    template: sha256 of that chat template; None where the text was not put into one.
    """

    ids: Tensor
    text: str = ""
    document: int = 0
    template: str | None = None


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a layer of the model, from its own tensors.

    streams: numbers of each stream, `[..., kv_heads, ..., head_dim]`, of which shape and dtype count.
    numbers_per_token: cached numbers of a token, keys and values.
    """

    streams: Sequence[Tensor]
    kv_heads: int
    numbers_per_token: int


# -- write -------------------------------------------------------------------------------------------------------------


def save(cache: CompressedCache, path: str | os.PathLike, prompt: SavedPrompt, origin: Origin, option: str) -> int:
    """Write a cache with its prompt, atomically; returns the bytes of the file. option: see `files.replacing`.

    Raises UsageError where the prompt is not the one that the cache holds, KvqError where the file cannot be written.
    """
    from kvq_cli import __version__

    columns = {layer.columns for layer in cache.compressed}
    held = (len(cache.rows.pads), *columns)
    if len(columns) != 1 or not held[1] or any(layer.absorbing for layer in cache.compressed):
        raise UsageError("this cache holds no complete forward pass: there is nothing to save")
    if tuple(prompt.ids.shape) != held:
        raise UsageError(
            f"ids of shape {tuple(prompt.ids.shape)} for a cache of (rows, tokens) = {held}: give all tokens that it "
            "holds (the last generated token is not in the cache)"
        )
    tensors = {_IDS: prompt.ids.to("cpu", torch.int64).contiguous()}
    if prompt.text:
        tensors[_TEXT] = torch.frombuffer(bytearray(prompt.text.encode()), dtype=torch.uint8)
    if cache.rollback and any(layer.sliding_window for layer in cache.compressed):
        cache = cache.clone()  # what may be seen after a rollback stays in the cache, and is left out of the file
    for layer in cache.compressed:
        layer.drop_unseen(all_of_them=True)
    tensors |= _tensors(cache)
    about = {
        "format": FORMAT,
        "kvq": __version__,
        "model": origin.model.to_dict(),
        "weights": origin.weights,
        "dtype": origin.dtype,
        "method": dict(origin.method),
        "artifact": origin.artifact,
        "prefill": origin.prefill,
        "rows": {"pads": cache.rows.pads, "offsets": cache.rows.offsets, "prompts": cache.rows.prompts},
        "document": prompt.document,
        "template": prompt.template,
        "sha256": _digest((name, tensors[name]) for name in sorted(tensors)),
    }
    about["checksum"] = _checksum(about)
    with replacing(Path(path), option) as partial:
        try:
            save_file(tensors, partial, {_KEY: json.dumps(about)})
        except SafetensorError as error:
            raise os_error(error) from error
    return Path(path).stat().st_size


def _streams(index: int, layer: CompressedLayer) -> Iterator[tuple[str, Stream]]:
    """The streams of a layer by their names in the file: `layers.<i>.keys` and `.values`, or `.shared` for both."""
    names = ("keys", "values") if len(layer.streams) == 2 else ("shared",)
    yield from zip((f"layers.{index}.{name}" for name in names), layer.streams, strict=True)


def _tensors(cache: CompressedCache) -> Iterator[tuple[str, Tensor]]:
    """The tensors of all streams, on the CPU."""
    for name, stream in (pair for index, layer in enumerate(cache.compressed) for pair in _streams(index, layer)):
        lengths = [length + stream.dropped for length in stream.lengths]
        settings = (stream.codec, stream.plan.window, stream.ring, lengths, cache.rows.prompts, stream.dropped)
        wanted = expected(*settings).tensors()
        for part, tensor in stream.snapshot().tensors().items():
            # The state of rows that were removed may have been larger.
            kept = tensor[tuple(slice(0, size) for size in wanted[part].shape)].detach().to("cpu").contiguous()
            in_file = _file_name(name, part, stream)
            yield in_file, deflated(kept) if in_file.endswith(SUFFIX) else kept


def _digest(tensors: Iterator[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _checksum(about: Mapping[str, Any]) -> str:
    hashed = {key: value for key, value in about.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()


# -- read --------------------------------------------------------------------------------------------------------------


class SavedCache:
    """An opened file, whose hashes agree with its contents. Tensors are read when they are asked for.

    Raises KvqError, naming the file, where it is missing, truncated, altered, or of another format.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise KvqError(f"{self.path} is a folder: give the file of a saved cache")
        try:
            self.size = file_size(self.path)
            self._file: Any = safe_open(self.path, "pt")
            document = (self._file.metadata() or {}).get(_KEY)
            self._names = set(self._file.keys())
        except OSError as error:
            raise KvqError(f"cannot read {self.path}: {error.strerror or error}") from error
        except Exception as error:  # of safetensors or Python, depending on the damage
            raise KvqError(f"{self.path} is not a readable safetensors file (truncated or altered?)") from error
        self.about = self._parse(document)
        if _digest((name, self.read(name)) for name in sorted(self._names)) != self.about["sha256"]:
            raise KvqError(f"{self.path} was altered (its hash does not match its tensors): save it again")

    def _parse(self, document: str | None) -> dict[str, Any]:
        if document is None:
            raise KvqError(f"{self.path} is not a saved cache of kvq: its metadata has no entry {_KEY!r}")
        try:
            about = parse_json(document.encode())
        except (ValueError, RecursionError) as error:
            raise KvqError(f"{self.path} was altered (its metadata is not valid JSON): save it again") from error
        if not isinstance(about, dict) or type(about.get("format")) is not int:
            raise KvqError(f"{self.path} is not a saved cache of kvq: it has no format number")
        if about["format"] not in FORMATS:
            readable = " and ".join(map(str, FORMATS))
            raise KvqError(
                f"{self.path} has format {about['format']}, this kvq reads formats {readable}: save it again with this "
                "version"
            )
        if about.get("checksum") != _checksum(about):
            raise KvqError(f"{self.path} was altered (its checksum does not match): save it again")
        with self.refusing():
            check_form(about, FORM, "metadata")
        return about

    @contextmanager
    def refusing(self, advice: str = "save it again") -> Iterator[None]:
        """Name the file in the errors of a check. A UsageError would blame the command line."""
        try:
            yield
        except KvqError as error:
            raise KvqError(f"{self.path}: {error}: {advice}") from error

    def read(self, name: str) -> Tensor:
        """A tensor as the file holds it: its memory is the file's."""
        try:
            return self._file.get_tensor(name)
        except Exception as error:  # a dtype that PyTorch does not have, a shape that is too large for it
            raise KvqError(f"{self.path}: cannot read the tensor {name[:80]}: save it again") from error

    def checked(self, name: str, like: TensorSpec) -> Tensor:
        """A copy of a tensor, which must have the shape and dtype of `like` and finite numbers. A name that ends in
        `SUFFIX` is of a compressed one."""
        if name not in self._names:
            raise KvqError(f"tensor {name} is missing")
        tensor, compressed = self.read(name), name.endswith(SUFFIX)
        if compressed:
            check_spec(spec_of(tensor), TensorSpec((tensor.numel(),), "uint8"), name)
            tensor = inflated(tensor, like, name)
        check_spec(spec_of(tensor), like, name)
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise KvqError(f"tensor {name} has infinite numbers or NaN")
        return tensor if compressed else tensor.clone()

    def check_origin(self, origin: Origin) -> None:
        """Raise UsageError, naming both, for another model, method, option or artifact. The digest of the weights comes
        last: it depends on their dtype."""
        about, path = self.about, self.path
        # A file that does not say how layers with a window are stored fits any `local` that stores such tensors.
        unsaid = () if _LOCAL in about["method"] else (_LOCAL,)
        model = Fingerprint(**about["model"])
        if model != origin.model:
            raise UsageError(f"{path} belongs to the model {_short(model)}, not to {origin.model}: pass its --model")
        held, given = about["method"], json.loads(json.dumps(dict(origin.method)))
        if held.get("name") != given["name"]:
            other = _short(held.get("name"))
            raise UsageError(f"{path} holds a cache of {other}, not of {given['name']}: pass its --method")
        sides = [{"dtype": about["dtype"], "prefill": about["prefill"], "artifact": about["artifact"], **held}]
        sides.append({"dtype": origin.dtype, "prefill": origin.prefill, "artifact": origin.artifact, **given})
        for key in [key for key in (*sides[1], *sides[0]) if key not in unsaid]:
            one, other = (_short(side.get(key, "default")) for side in sides)
            if sides[0].get(key) != sides[1].get(key) or (key in sides[0]) != (key in sides[1]):
                key = _short(key)
                raise UsageError(f"{path} was saved with {key}={one}, not {key}={other}: pass the same, or save again")
        if about["weights"] != origin.weights:
            raise UsageError(f"{path} belongs to a model with other weights or another configuration: save it again")

    def prompt(self, vocabulary: int) -> SavedPrompt:
        """The token ids and the text; KvqError for ids that a model of this vocabulary does not have."""
        rows, about = len(self.about["rows"]["pads"]), self.about
        with self.refusing():
            shape = self.read(_IDS).shape if _IDS in self._names else (0,)
            columns = shape[1] if len(shape) == 2 else 1
            ids = self.checked(_IDS, TensorSpec((rows, columns), "int64"))
            if not ids.numel() or ids.min() < 0 or ids.max() >= vocabulary:
                raise KvqError(f"tensor {_IDS} must hold numbers from 0 to {vocabulary - 1}")
            text = self._text()
            if about["document"] > len(text) or (text and rows > 1) or (about["template"] is not None and not text):
                raise KvqError("document and template do not fit the text")
        return SavedPrompt(ids, text, about["document"], about["template"])

    def _text(self) -> str:
        if _TEXT not in self._names:
            return ""
        octets = self.read(_TEXT)
        check_spec(spec_of(octets), TensorSpec((octets.numel(),), "uint8"), _TEXT)
        try:
            return octets.numpy().tobytes().decode()
        except UnicodeDecodeError:
            raise KvqError(f"tensor {_TEXT} is not UTF-8 text") from None

    def rows(self, columns: int, context: int) -> Rows:
        """The rows of a cache of `columns` columns. context: the longest text that the model takes."""
        rows = Rows(**self.about["rows"])
        with self.refusing():
            if not len(rows.pads) == len(rows.offsets) == len(rows.prompts) > 0:
                raise KvqError("rows.pads, rows.offsets and rows.prompts must have as many entries")
            for pads, offset, prompt in zip(rows.pads, rows.offsets, rows.prompts, strict=True):
                if pads > columns or offset > max(context, columns) or (prompt == 0) != (pads == columns):
                    raise KvqError("rows.pads, rows.offsets and rows.prompts do not fit the ids")
        return rows

    def restore(self, cache: CompressedCache, layers: Sequence[LayerShape], other_local: str) -> None:
        """Fill an empty cache, whose `rows` are set. layers: of the model, on whose devices the cache is put.
        other_local: the `local` by which the cache would store layers with a sliding window otherwise."""
        rows, columns = cache.rows, self.read(_IDS).shape[1]
        lengths = [columns - pads for pads in rows.pads]
        known, advice = {_IDS, _TEXT}, "save it again"
        if _LOCAL not in self.about["method"] and any(layer.sliding_window for layer in cache.compressed):
            advice = f"if an earlier version saved it, pass --set {_LOCAL}={other_local}, else {advice}"
        with self.refusing(advice):
            for index, (layer, shape) in enumerate(zip(cache.compressed, layers, strict=True)):
                streams = list(_streams(index, layer))
                dropped = layer.saved_from(lengths) if self.about["format"] == FORMAT else 0
                wanted = {
                    name: _expected(stream, like, lengths, rows.prompts, dropped)
                    for (name, stream), like in zip(streams, shape.streams, strict=True)
                }
                held = dict(streams)
                parts = ((name, part) for name, snapshot in wanted.items() for part in snapshot.tensors())
                known |= {_file_name(name, part, held[name]) for name, part in parts}
                device = shape.streams[0].device
                snapshots = (self._snapshot(name, held[name], one, device) for name, one in wanted.items())
                layer.restore(snapshots, columns, shape.kv_heads, shape.numbers_per_token)
                for name, stream in streams:
                    with _named(name):
                        stream.check()
            if unknown := sorted(self._names - known):
                raise KvqError(f"the method stores no tensor {unknown[0][:80]}")

    def _snapshot(self, name: str, stream: Stream, wanted: Snapshot, device: torch.device) -> Snapshot:
        return wanted.map(lambda part, like: self.checked(_file_name(name, part, stream), spec_of(like)).to(device))


def _file_name(name: str, part: str, stream: Stream) -> str:
    """The name in the file of a part of the stream `name`: packed parts may be compressed."""
    compressed = stream.codec.deflates and part.startswith("packed.")
    return f"{name}.{part}{SUFFIX if compressed else ''}"


def _expected(stream: Stream, like: Tensor, lengths: Sequence[int], prompts: Sequence[int], dropped: int) -> Snapshot:
    packed = stream.plan.window.packed
    if any(packed(prompt) > packed(length) for prompt, length in zip(prompts, lengths, strict=True)):
        raise KvqError("rows.prompts exceed the tokens of the rows")
    return expected(stream.codec, stream.plan.window, like, lengths, prompts, dropped)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Name the stream in the errors of its codec's check."""
    try:
        yield
    except KvqError as error:
        raise KvqError(f"{name}: {error}") from error


def _short(value: Any) -> str:
    """A value for a message; hashes by their first digits. What a forged file holds may be long."""
    text = str(value)
    if isinstance(value, str) and len(value) == 64:
        return text[:8]
    return text if len(text) <= 200 else f"{text[:197]}..."
