"""The method that a vLLM engine caches with: read from vLLM's flags, and planned for the model's layers.

`--kv-cache-dtype kvq` takes it from `--additional-config '{"kvq": {"method": {"name": "kivi", "bits": 2},
"artifact": DIR}}'`; names such as `kvq_kivi_2` are methods without calibration with their default options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from kvq_cli.artifact import Artifact, load_artifact, local_folder
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import LayerPlan, Method, ModelShape
from kvq_cli.methods.registry import from_config, to_config
from kvq_cli.vllm.shard import WHOLE, Shard

#: vLLM's `--kv-cache-dtype` for a method in `--additional-config`, and the key there.
CACHE_DTYPE = KEY = "kvq"
#: Methods with shorthands `kvq_NAME_BITS`, and the bits.
_SHORTHANDS = {"kivi": (1, 2, 3, 4, 8), "innerq": (1, 2, 3, 4, 8), "turboquant": (1, 2, 3, 4)}
#: Options that a server sets unless they are given: a page cannot depend on the prompt of one sequence.
SERVER_DEFAULTS: Mapping[str, Mapping[str, Any]] = {"innerq": {"norm": False}}


def shorthands() -> dict[str, dict[str, Any]]:
    """`--kv-cache-dtype` names -> the method's name and options."""
    names: dict[str, dict[str, Any]] = {"kvq_fp16": {"name": "fp16"}}
    for name, bits in _SHORTHANDS.items():
        names |= {f"kvq_{name}_{b}": {"name": name, "bits": b, **SERVER_DEFAULTS.get(name, {})} for b in bits}
    return names


def cache_dtypes() -> list[str]:
    """All values of `--kv-cache-dtype` that kvq adds."""
    return [CACHE_DTYPE, *shorthands()]


@dataclass(frozen=True)
class ServedMethod:
    """A method and, where it calibrates, its artifact."""

    method: Method
    artifact: Artifact | None = None

    @classmethod
    def of(cls, attachable: Method | Artifact) -> ServedMethod:
        """The method, or the artifact's."""
        if isinstance(attachable, Method):
            return cls(attachable)
        return cls(from_config(attachable.method_config), attachable)

    @classmethod
    def of_flags(cls, cache_dtype: str, additional_config: Mapping[str, Any]) -> ServedMethod:
        """The method of vLLM's `--kv-cache-dtype` and `--additional-config`; UsageError for others."""
        if cache_dtype != CACHE_DTYPE:
            return cls(from_config(shorthands()[cache_dtype]))
        config = additional_config.get(KEY)
        example = '--additional-config \'{"kvq": {"method": {"name": "kivi", "bits": 2}}}\''
        if not isinstance(config, Mapping) or not config:
            raise UsageError(f"--kv-cache-dtype kvq needs a method: {example}")
        if unknown := set(config) - {"method", "artifact"}:
            raise UsageError(f'--additional-config: "kvq" has no {sorted(unknown)[0]!r}; it has "method", "artifact"')
        method = from_config(config["method"]) if "method" in config else None
        if "artifact" not in config:
            if method is None:
                raise UsageError(f"--kv-cache-dtype kvq needs a method: {example}")
            return cls(method)
        artifact = load_artifact(Path(config["artifact"]))
        if method is None:
            return cls.of(artifact)
        if method.name != (held := artifact.method_config["name"]):
            raise UsageError(f"the artifact {artifact.path} holds {held}, not {method.name}")
        return cls.of(artifact.with_options({key: config["method"][key] for key in config["method"] if key != "name"}))

    def additional_config(self) -> dict[str, Any]:
        """The inverse of `of_flags`, for `--kv-cache-dtype kvq`."""
        config: dict[str, Any] = {"method": to_config(self.method)}
        if self.artifact is not None:
            config["artifact"] = str(local_folder(self.artifact.path).resolve())
        return {KEY: config}

    def plans(self, shape: ModelShape, device: Any = "cpu", shard: Shard = WHOLE) -> list[LayerPlan]:
        """Return the plan of each of `shape.cached_layers` for the heads of `shard`, tensors on `device`; shape: of
        all heads. Raises UsageError where an artifact is needed, or cannot be cut by heads."""
        if self.artifact is None and self.method.needs_artifact(shape):
            raise UsageError(
                f"method {self.method.name} needs an artifact: make one with `kvq calibrate --method "
                f"{self.method.name}`, then give its folder"
            )
        return [shard.plan(self.method, layer, shape, self._tensors(layer, device)) for layer in shape.cached_layers]

    def plans_of_ranks(self, shape: ModelShape, ranks: int) -> list[LayerPlan]:
        """The plans of rank 0's layers, then of rank 1's, ...; of rank 0's alone where those of all ranks are alike."""
        different = range(1 if self.artifact is None else ranks)
        return [plan for rank in different for plan in self.plans(shape, shard=Shard(rank, ranks))]

    def _tensors(self, layer: int, device: Any) -> dict[str, Tensor]:
        if self.artifact is None:
            return {}
        return {name: tensor.to(device) for name, tensor in self.artifact.layer(layer).items()}


def served_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a method on a server: those given, and the `SERVER_DEFAULTS`."""
    return {**SERVER_DEFAULTS.get(name, {}), **options}
