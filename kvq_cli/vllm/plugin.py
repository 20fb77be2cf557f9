"""Entry point `vllm.general_plugins`: registers kvq's cache types and attention backend with vLLM."""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from kvq_cli.errors import KvqError
from kvq_cli.extras import install_command
from kvq_cli.vllm.served import CACHE_DTYPE, cache_dtypes

#: The versions of vLLM whose interfaces the plugin implements.
VLLM = "0.33"


def check_version() -> None:
    """Raise KvqError unless version `VLLM` of vLLM is installed."""
    try:
        found = version("vllm")
    except PackageNotFoundError:
        raise KvqError(f"vLLM is not installed: {install_command('vllm')}") from None
    if not found.startswith(f"{VLLM}."):
        raise KvqError(
            f"kvq serves with vLLM {VLLM}.x, found {found}: the interfaces for cache types and attention backends "
            f"change from version to version: {install_command('vllm')}"
        )


@cache
def register() -> None:
    """Register kvq with this process's vLLM. vLLM calls it in every process that it starts, whatever is served: with
    another version of vLLM, it warns and registers nothing."""
    try:
        check_version()
    except KvqError as error:
        # A name below "vllm" has vLLM's handlers, and its level.
        logging.getLogger("vllm.kvq").warning("--kv-cache-dtype %s is not available: %s", CACHE_DTYPE, error)
        return
    import torch
    from vllm.config.cache import register_kv_cache_dtype
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.kv_cache_interface import KVQuantMode

    class Handler:
        """Pages are bytes, which only kvq's backend reads."""

        def torch_dtype(self) -> torch.dtype:
            return torch.uint8

        def quant_mode(self) -> KVQuantMode:
            return KVQuantMode.CUSTOM

    for name in cache_dtypes():
        register_kv_cache_dtype(name)(type("Handler", (Handler,), {"name": name}))
    register_backend(AttentionBackendEnum.CUSTOM, "kvq_cli.vllm.backend.KvqBackend")
