"""The options of a prefix store, from the command line to the connector."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq_cli.artifact import Artifact, load_artifact
from kvq_cli.errors import UsageError
from kvq_cli.units import parse_bytes

CONNECTOR, MODULE = "KvqConnector", "kvq_cli.vllm.prefix_store.connector"
#: Bits of klt's codes, and the size of the folder, unless they are given.
DEFAULT_BITS, DEFAULT_SIZE = 4, "20GiB"
#: Instead of an artifact's folder: blocks are stored as they are.
RAW = "raw"


@dataclass(frozen=True)
class StoreSettings:
    """folder: of the store. artifact: klt's folder, or "raw". size: of all files, such as 20GiB."""

    folder: str
    artifact: str = RAW
    size: str = DEFAULT_SIZE

    @classmethod
    def of_extra_config(cls, config: Mapping[str, Any]) -> StoreSettings:
        """Read those of vLLM's `kv_connector_extra_config`. Raises UsageError for others."""
        if unknown := set(config) - {"folder", "artifact", "size"}:
            raise UsageError(f'kv_connector_extra_config: no {min(unknown)!r}; it has "folder", "artifact", "size"')
        if not {"folder", "artifact"} <= set(config):
            raise UsageError(
                'kv_connector_extra_config: give {"folder": DIR, "artifact": DIR}, of the store and of klt (kvq '
                'calibrate --method klt --bits 4), or "artifact": "raw"'
            )
        settings = cls(**{name: str(value) for name, value in config.items()})
        parse_bytes(settings.size, "kv_connector_extra_config: size")
        return settings

    @property
    def capacity(self) -> int:
        """Return the bytes of all files."""
        return parse_bytes(self.size, "--prefix-store-size")

    def load_codes(self) -> Artifact | None:
        """Load klt's artifact; None: blocks are stored as they are. Raises KvqError for one that cannot be read,
        UsageError for one of another method."""
        if self.artifact == RAW:
            return None
        artifact = load_artifact(Path(self.artifact))
        if (name := artifact.method_config["name"]) != "klt":
            raise UsageError(f"the prefix store has codes of klt, and {self.artifact} is of {name}: calibrate klt")
        return artifact

    def transfer_config(self) -> dict[str, Any]:
        """Return vLLM's `--kv-transfer-config`."""
        folder = str(Path(self.folder).absolute())
        artifact = RAW if self.artifact == RAW else str(Path(self.artifact).absolute())
        return {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": MODULE,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"folder": folder, "artifact": artifact, "size": self.size},
        }

    def flags(self) -> list[str]:
        """Return vLLM's flags that set the store up."""
        return ["--kv-transfer-config", json.dumps(self.transfer_config())]

    def summary(self) -> str:
        """Say what is stored, in words."""
        kept = "as they are" if self.artifact == RAW else f"in codes of {self.artifact}"
        return f"full blocks of prompts are stored {kept} in {self.folder}, up to {self.size}"
