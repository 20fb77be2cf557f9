"""Entry point `vllm.platform_plugins`: vLLM on a machine without a GPU, where KVQ_VLLM_CPU=1 asks for it."""

import os


def platform() -> str | None:
    """The name of the platform's class; None: vLLM chooses."""
    return "kvq_vllm_cpu_platform.CpuTestPlatform" if os.environ.get("KVQ_VLLM_CPU") == "1" else None
