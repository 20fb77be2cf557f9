"""The model `kvq` for lm-eval's command line and `lm_eval.simple_evaluate`.

    python -m kvq_cli.evaluation.lm_eval --model kvq --model_args pretrained=ID,method=kivi,bits=2 --tasks gsm8k

Importing this module registers `kvq` in lm-eval's model registry.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval.api.registry import register_model

from kvq_cli import __version__
from kvq_cli.artifact import Artifact, load_artifact
from kvq_cli.artifact.fingerprint import weights_digest
from kvq_cli.attention.attach import attach
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.evaluation.base import cache_summary
from kvq_cli.evaluation.compared_methods import compared_methods
from kvq_cli.evaluation.lm_eval.model import AttachedLM
from kvq_cli.evaluation.sample_log import digest
from kvq_cli.methods.registry import build
from kvq_cli.model_source import library_versions
from kvq_cli.models import load_model

if TYPE_CHECKING:
    from lm_eval.api.model import CacheHook

    from kvq_cli.methods.base import Method

CACHE_OWNER = "kvq: whose responses these are"  # key in lm-eval's response cache


@register_model("kvq")
class KvqLM(AttachedLM):
    """A model with an attached compression method, built from `--model_args`.

    pretrained: "reference", a Hugging Face id or a folder. artifact: folder of a calibrated artifact; or method, bits
    and the method's options (`kvq methods NAME` lists them). prefill, backend, device, dtype,
    trust_remote_code: as for `kvq eval`.
    max_length, truncation, new_tokens: as for `AttachedLM`; sampling_seed: its seed.
    """

    def __init__(
        self,
        pretrained: str = "reference",
        artifact: str | None = None,
        method: str | None = None,
        bits: int | None = None,
        *,
        prefill: str = "compressed",
        backend: str = "auto",
        device: str | None = None,
        dtype: str = "auto",
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        truncation: str = "left",
        new_tokens: int | None = None,
        sampling_seed: int = 0,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise UsageError(f"--batch_size {batch_size}: must be a number, at least 1")
        attachable = _attachable(artifact, method, options if bits is None else {"bits": bits, **options})
        # lm-eval's command line passes cuda:0 by default, also on a machine without a GPU.
        loaded = load_model(
            pretrained,
            "auto" if device in (None, "cuda:0") else device,
            dtype,
            trust_remote_code=trust_remote_code,
        )
        self._attachment = ExitStack()
        attached = self._attachment.enter_context(attach(loaded.model, attachable, prefill=prefill, backend=backend))
        super().__init__(
            loaded,
            attached,
            batch_size=int(batch_size),
            max_length=max_length,
            truncation=truncation,
            new_tokens=new_tokens,
            seed=int(sampling_seed),
        )
        self.identity = {
            "kvq": __version__,
            "model": loaded.label,
            "revision": loaded.revision,
            "weights": weights_digest(loaded.model),
            "libraries": library_versions(),
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
            **compared_methods([attachable])[0].identity,
            "prefill": prefill,
            "backend": attached.backend.summary,
            "max_length": self.max_length,
            "truncation": truncation,
            "new_tokens": new_tokens,
            **({"sampling_seed": self.seed} if self.seed else {}),
        }

    def close(self) -> None:
        """Detach the method from the model."""
        self._attachment.close()

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Use lm-eval's response cache (`--use_cache FILE`), whose keys contain neither model nor method.

        The file is bound to the first model and method that use it; UsageError for any other.
        """
        responses, owner = cache_hook.dbdict, digest(self.identity)
        if responses is not None:
            if len(responses) and responses.get(CACHE_OWNER) != owner:
                raise UsageError(
                    f"--use_cache: {responses.filename} holds the responses of another model or method: use a "
                    "separate file for each"
                )
            responses[CACHE_OWNER] = owner
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> dict[str, Any]:
        """Identity and cache sizes for lm-eval's results file. KvqError if nothing was compressed."""
        if not self.cache_records:  # all responses came from --use_cache
            return {"kvq": self.identity}
        if self.attached.method.name != "fp16" and not any(record["compressed"] for record, _ in self.cache_records):
            raise KvqError(
                f"{self.attached.method.name} compressed no token: all are within its full-precision windows; "
                "use a task with longer prompts, or smaller windows"
            )
        records = [{"cache": record} for record, rows in self.cache_records for _ in range(rows)]
        return {"kvq": {**self.identity, "cache": cache_summary(records)}}


def _attachable(artifact: str | None, method: str | None, options: dict[str, Any]) -> Method | Artifact:
    if artifact is None:
        if method is None:
            raise UsageError("--model_args: name a method (method=kivi,bits=2) or an artifact (artifact=DIR)")
        return build(method, **{name: str(value) for name, value in options.items()})
    if method is not None or options:
        raise UsageError(f"--model_args: artifact={artifact} defines method and options: drop the others")
    return load_artifact(Path(artifact))
