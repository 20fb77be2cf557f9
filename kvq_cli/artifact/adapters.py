"""The adapters of a model: modules that wrap others of it, as PEFT's do (`base_layer`, and weights by adapter)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

#: By wrapped module: the adapters that it applies, with their scales and weights.
Applied = dict[str, tuple[tuple[str, Any, tuple["_Weight", ...]], ...]]


class _Weight:
    """A weight of an adapter as it is now: another adapter may get its name, or other numbers its place."""

    __slots__ = ("now", "tensor")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor  # held, so that no other tensor gets its id
        self.now = id(tensor), tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Weight) and self.now == other.now


class AdapterWatch:
    """Tells which adapters a model applies, at every pass: it looks at all modules only where some were replaced."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._wrapped: dict[str, nn.Module] = {}
        self._children: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def applied(self) -> Applied:
        """The adapters that the next pass will apply."""
        if not self._children or any(now != before for now, before in self._children):
            self._wrapped = _wrapped(self._model)
            parents = (module._modules for module in self._model.modules() if module._modules)
            self._children = [(children, dict(children)) for children in parents]
        return {name: found for name, module in self._wrapped.items() if (found := _applied(module))}

    def merged(self) -> frozenset[str]:
        """The wrapped modules whose weights adapters are merged into, as of the last call of `applied`."""
        return frozenset(name for name, module in self._wrapped.items() if getattr(module, "merged_adapters", ()))


def applied_adapters(model: nn.Module) -> Applied:
    """The adapters that the model applies."""
    return AdapterWatch(model).applied()


def applied_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Those of the named weights that the model computes with: without adapters that are disabled, not chosen, or
    merged; weights of wrapped modules have the names that they had before."""
    wrapped = _wrapped(model)
    for name, weight in weights:
        parts = name.split(".")
        owners = (".".join(parts[:end]) for end in range(1, len(parts)))
        owner = next((owner for owner in owners if owner in wrapped), None)
        if owner is None or not _is_idle(wrapped[owner], name[len(owner) + 1 :].split(".")):
            yield name.replace(".base_layer.", "."), weight


def _wrapped(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if "base_layer" in module._modules}


def _applied(wrapper: Any) -> tuple[tuple[str, Any, tuple[_Weight, ...]], ...]:
    """The adapters that are added to a wrapped module's output, or merged into its weights."""
    if getattr(wrapper, "disable_adapters", False) is True:
        return ()
    chosen, scales = getattr(wrapper, "active_adapters", ["default"]), getattr(wrapper, "scaling", None)
    chosen = getattr(wrapper, "merged_adapters", ()) or ([chosen] if isinstance(chosen, str) else chosen)
    held = {name for child in wrapper.children() if hasattr(child, "keys") for name in child}
    chosen = [name for name in chosen if name in held or not held]
    scale = scales.get if isinstance(scales, dict) else lambda _name: scales
    return tuple((name, scale(name), tuple(map(_Weight, _weights(wrapper, name)))) for name in chosen)


def _weights(wrapper: Any, adapter: str) -> Iterator[Tensor]:
    """The weights of a wrapped module's adapter; not those that accelerate offloads, which are others at each pass."""
    for child in wrapper._modules.values():
        held = child._modules.get(adapter)
        if held is None:
            found: Iterable[Tensor | None] = (child._parameters.get(adapter), child._buffers.get(adapter))
        else:  # this runs at each pass, and `parameters` takes long
            found = held.parameters() if held._modules else held._parameters.values()
        yield from (weight for weight in found if weight is not None and not weight.is_meta)


def _is_idle(wrapper: Any, parts: list[str]) -> bool:
    """Whether a weight of a wrapped module is one of an adapter that is not added to its output. parts: of its name in
    there, such as lora_A, the adapter, weight."""
    if parts[0] == "base_layer":
        return False
    added = set() if getattr(wrapper, "merged_adapters", ()) else {name for name, *_ in _applied(wrapper)}
    by_adapter = hasattr(getattr(wrapper, parts[0]), "keys")
    return parts[1] not in added if by_adapter else not added
