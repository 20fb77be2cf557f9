"""Blocks of random numbers for tests of the prefix store: caches of vLLM's own shapes, and klt's plans."""

import torch
from random_transforms import random_layer

from kvq_cli.attention.rotary import Rotation
from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.registry import build_parsed
from kvq_cli.vllm.prefix_store.pages import ExactPages, stock_sides
from kvq_cli.vllm.prefix_store.records import ExactBlocks, coded_records, exact_records
from kvq_cli.vllm.rope import unrotated

SHAPE = ModelShape(layers=2, query_heads=4, kv_heads=2, head_dim=64, hidden_size=128, dtype="bfloat16")
ROTATION = Rotation("half", 10000 ** -(torch.arange(32) / 32), 64)
SIZE = 32


def key(number):
    """The hash of a block."""
    return number.to_bytes(32, "big")


def plans(text="klt", bits=2, shape=SHAPE):
    method = build_parsed(text, bits=bits)
    generator = torch.Generator().manual_seed(3)
    return [
        method.plan(layer, shape, random_layer(method.calibration(shape), shape, generator))
        for layer in range(shape.layers)
    ]


def stock_caches(count=9, tokens=SIZE, order=(0, 1, 2, 3), seed=1):
    """Caches of vLLM's own attention, `[pages, kv_heads, tokens, 2 * head_dim]`, that lie in memory in this order."""
    shape = (count, SHAPE.kv_heads, tokens, 2 * SHAPE.head_dim)
    generator = torch.Generator().manual_seed(seed)
    caches = []
    for _ in range(SHAPE.layers):
        memory = torch.randn([shape[i] for i in order], generator=generator).to(torch.bfloat16)
        caches.append(memory.permute(*sorted(range(4), key=lambda i: order[i])))
    return caches


def stock_pages(caches, backend="FLASH_ATTN"):
    return ExactPages([stock_sides(cache, backend, 2, 64, torch.bfloat16) for cache in caches], SIZE)


def coded_blocks(pages, layer_plans, exact_blocks=1):
    exact = exact_records(SHAPE, SIZE, unrotated(64))
    coded = exact if layer_plans is None else coded_records(layer_plans, SHAPE, SIZE, [ROTATION] * SHAPE.layers)
    return ExactBlocks(pages, exact, coded, exact_blocks)
