"""Read weights that accelerate keeps elsewhere between forward passes (`cpu_offload`, `disk_offload`, `device_map`).

Such parameters are on the device "meta", without numbers; hooks of modules fetch them for each pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvq_cli.errors import KvqError
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor, nn


def compute_devices(model: nn.Module) -> list[torch.device]:
    """The devices on which a model's parameters are during a forward pass, each once."""
    meta, found = torch.device("meta"), {parameter.device: None for parameter in model.parameters()}
    hooks = [hook for module in model.modules() for hook in _hooks(module)]
    if hooks:
        found.pop(meta, None)
        found |= {torch.empty(0, device=hook.execution_device).device: None for hook in hooks}
    if list(found) == [meta]:
        raise KvqError("the model's weights are on the device meta, without numbers: load them first")
    return list(found)


def stored_weight(module: nn.Module, name: str, weight: Tensor) -> Tensor:
    """The parameter or buffer `name` of a module or its submodules, `weight`, or what accelerate keeps in its place."""
    if weight.device.type != "meta":
        return weight
    owner: Any = module
    parts = name.split(".")
    for index, part in enumerate(parts):
        for hook in _hooks(owner):
            kept = hook.weights_map.get(".".join(parts[index:]))
            if kept is not None:
                return kept
        owner = getattr(owner, part, None)
    raise KvqError(f"the weight {name} is on the device meta, without numbers: load the model's weights first")


def fetched_weight(module: nn.Module, name: str) -> Any:
    """The tensor `name` of a module on the device that computes with it; None where the module has none."""
    weight = getattr(module, name)
    if weight is None or weight.device.type != "meta":
        return weight
    return stored_weight(module, name, weight).to(compute_devices(module)[0])


def _hooks(module: Any) -> Iterator[Any]:
    """The hooks of accelerate that fetch weights for the module's passes."""
    hook = getattr(module, "_hf_hook", None)
    for each in getattr(hook, "hooks", (hook,)):
        if getattr(each, "weights_map", None) is not None:
            yield each
