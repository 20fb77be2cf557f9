"""The rotary embedding of a model's keys, as vLLM applies it.

vLLM gives its attention keys after RoPE only. Methods that cache them before RoPE undo it when they write. Which
channels are rotated in which layer is found as for `attach`, in a model of the same configuration with one head and
random weights; the angles are compared with the tables of vLLM's own rotary modules.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvq_cli.attention.capture_points import attention_layers
from kvq_cli.attention.rotary import Rotation
from kvq_cli.errors import UsageError
from kvq_cli.models import text_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def unrotated(head_dim: int) -> Rotation:
    """No rotation, for methods that cache keys after RoPE."""
    return Rotation("none", torch.zeros(0, dtype=torch.float32), head_dim)


def layer_rotations(config: PretrainedConfig, head_dim: int) -> list[Rotation]:
    """The rotation of each layer's keys. Raises UsageError for a model without one that kvq knows."""
    from transformers import AutoModelForCausalLM

    small = copy.deepcopy(text_config(config))
    one_head = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": head_dim, "hidden_size": head_dim}
    for name, value in {**one_head, "intermediate_size": 8, "vocab_size": 8, "pad_token_id": None}.items():
        if hasattr(small, name):
            setattr(small, name, value)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).eval()
        with torch.no_grad():
            return [layer.rotation for layer in attention_layers(model)]


def unrotate(rotation: Rotation, keys: Tensor, positions: Tensor) -> Tensor:
    """Keys `[..., tokens, head_dim]` of `positions` `[..., tokens]`, integers, before RoPE, in their dtype."""
    return unrotated_by(inverse_tables(rotation, positions), rotation, keys)


def inverse_tables(rotation: Rotation, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The cosines and sines that undo the rotation of keys of `positions`, for `unrotated_by`.

    In float64, and the inverse of the rounded tables: what is left is the error with which vLLM rounded the rotated
    keys, which flips a code now and then.
    """
    if rotation.style == "none":
        return rotation.frequencies, rotation.frequencies
    cos, sin = (table.double() for table in rotation.tables(positions))
    half = rotation.width // 2
    first, second = (slice(0, half), slice(half, 2 * half))
    if rotation.style == "interleaved":
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    norm = cos[..., first] ** 2 + sin**2
    for channels in (first, second):
        cos[..., channels] /= norm
    return cos, -sin / norm


def unrotated_by(tables: tuple[Tensor, Tensor], rotation: Rotation, keys: Tensor) -> Tensor:
    """Keys `[..., tokens, head_dim]` before RoPE, in their dtype. tables: `inverse_tables` of their positions."""
    return keys if rotation.style == "none" else rotation.rotate(keys.double(), *tables).to(keys.dtype)


def check_tables(rotations: list[Rotation], positions: int) -> None:
    """Raise UsageError unless vLLM's rotary modules rotate by the same angles, up to `positions`."""
    from vllm.model_executor.layers import rotary_embedding

    tables = [module.cos_sin_cache for module in rotary_embedding._ROPE_DICT.values()]
    probes = sorted({0, 1, 2, 17, positions // 3, positions - 1} & set(range(positions)))
    for rotation in rotations:
        if rotation.style != "none" and not any(_agree(rotation, table, probes) for table in tables):
            raise UsageError(
                "vLLM and transformers apply different RoPE angles to this model's keys (its RoPE may depend on the "
                "sequence length): use a method that caches keys after RoPE, such as kivi"
            )


def _agree(rotation: Rotation, table: Tensor, positions: list[int]) -> bool:
    """Whether `table` `[positions, width]`, cosines and then sines, is that of the rotation."""
    if table.ndim != 2 or table.shape[1] != rotation.width or table.shape[0] <= positions[-1]:
        return False
    rows = table[positions].float().cpu()
    cos, sin = (torch.cat([part, part], dim=-1) for part in rows.chunk(2, dim=-1))
    step = torch.finfo(table.dtype).eps * max(1.0, rotation.scale)
    return all(
        rotation.agrees(cos[i], sin[i], position) or _within(rotation, rows[i], position, step)
        for i, position in enumerate(positions)
    )


def _within(rotation: Rotation, row: Tensor, position: int, step: float) -> bool:
    """Whether a row that was rounded to 16 bits is that of `position`."""
    angles = position * rotation.frequencies.cpu()
    expected = torch.cat([angles.cos(), angles.sin()]) * rotation.scale
    return bool((row - expected).abs().max() <= step)
