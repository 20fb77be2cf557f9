"""Attach a compression method to a model.

Uses transformers' extension points: forward hooks, `past_key_values`, and the registries of attention and mask
functions. No model code is copied. Two methods of this one object are replaced: `model.generate`, to pass a compressed
cache to it, and `model.forward` with CUDA graphs, since no hook can skip a forward pass that a graph replays, and where
long passes are split (`split_passes`). `close`, or the end of a `with` block, undoes everything.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from kvq_cli.artifact import Artifact
from kvq_cli.artifact.adapters import Applied
from kvq_cli.artifact.fingerprint import fingerprint, weights_digest
from kvq_cli.attention.attention_hooks import NAME, AttentionHooks, recorded_score_forms, register
from kvq_cli.attention.backend import ChosenBackend, check_backend, choose_backend
from kvq_cli.attention.capture_points import AttentionLayer, attention_layers, attention_modules, decoder_of
from kvq_cli.attention.drafts import Drafts
from kvq_cli.attention.generation import takes_new_cache
from kvq_cli.attention.graphs import captured_steps
from kvq_cli.attention.projections import projections
from kvq_cli.attention.replaced_attribute import replaced_attribute
from kvq_cli.attention.rotary import shared
from kvq_cli.attention.score_form import PLAIN
from kvq_cli.attention.split_passes import split_passes
from kvq_cli.attention.weight_factors import check_factors
from kvq_cli.attention.whole_prefill import forget_masks
from kvq_cli.cache.cache import CompressedCache
from kvq_cli.cache.cross_layer import CrossLayerSum
from kvq_cli.cache.joined import JoinedLayers
from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.cache.rematerialize import Rematerialize
from kvq_cli.cache.report import CacheReport
from kvq_cli.cache.saved_cache import LayerShape, Origin, SavedCache
from kvq_cli.cache.states import HybridLayer, own_layers
from kvq_cli.cache_argument import cache_argument, without_cache
from kvq_cli.errors import UsageError
from kvq_cli.layer_kinds import has_states, layer_kinds
from kvq_cli.methods.base import LayerPlan, Method
from kvq_cli.methods.registry import from_config, to_config
from kvq_cli.models import model_context, model_shape, text_config
from kvq_cli.offload import compute_devices
from kvq_cli.resolve import named

PREFILLS = ("exact", "compressed")
#: The attribute of a decoder that holds what was attached to it last.
_NEWEST = "kvq_attached"


class Attached(AbstractContextManager["Attached"]):
    """A model with a compression method attached; returned by `attach`."""

    def __init__(
        self,
        model: PreTrainedModel,
        method: Method,
        plans: list[LayerPlan],
        layers: list[AttentionLayer],
        prefill: str,
        backend: ChosenBackend,
        artifact: str | None = None,
    ) -> None:
        self.model, self.method, self.prefill, self.backend = model, method, prefill, backend
        self._artifact, self._generate = artifact, getattr(model, "generate", None)
        #: Takes the method off the model; None once that is done.
        self._undo: ExitStack | None = None
        self.plans, self.layers = plans, layers
        self._rematerializers = [_rematerializers(layer, plan) for layer, plan in zip(layers, plans, strict=True)]
        backends = [backend.of(layer.index) for layer in layers]
        #: Whether caches also hold what layers store that are not compressed.
        self.has_states = has_states(text_config(model.config))
        #: What caches belong to, and the adapters that the model applied then.
        self._origin: tuple[Applied, Origin] | None = None
        self.hooks = AttentionHooks(
            decoder_of(model), layers, plans, backends, prefill == "compressed", model_context(model.config)
        )

    def install(self, graphs: bool, undo: ExitStack) -> None:
        """Put the hooks on the model until `close`, which runs `undo`; graphs: see `attach`."""
        # Caches refer to `self`: without this, one would be freed only when Python looks for cycles.
        undo.callback(self.forget_cache)
        undo.callback(forget_masks)
        undo.enter_context(replaced_attribute(decoder_of(self.model), _NEWEST, self))
        self.hooks.install(undo)
        undo.callback(self.model.register_forward_hook(self.hooks.check_logits, with_kwargs=True).remove)
        Drafts(self.model, self.hooks).install(undo)
        if self._generate is not None:
            undo.enter_context(replaced_attribute(self.model, "generate", self.generate))
        if graphs and self.model.device.type == "cuda" and self.backend.engine is not None:
            undo.enter_context(captured_steps(self.model, self.hooks, self.backend))
        if self.hooks.longest_pass is not None:
            undo.enter_context(split_passes(self.model, self.hooks, self.hooks.longest_pass))
        self._undo = undo.pop_all()

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None:  # which a refusal to close must not replace
            self._close_later()
        self.close()

    def _close_later(self) -> None:
        """Close what was attached to the model after this one."""
        while self._undo is not None and (newest := getattr(decoder_of(self.model), _NEWEST)) is not self:
            if newest._undo is None:  # another thread is attaching it
                return
            newest.close()

    def close(self) -> None:
        """Take the method off the model, as the end of a `with` block does; does nothing the second time.

        UsageError where another method was attached later and is still there: close that first.
        """
        if self._undo is None:
            return
        if getattr(decoder_of(self.model), _NEWEST) is not self:
            raise UsageError("another method was attached to this model later: close that one first")
        undo, self._undo = self._undo, None
        undo.close()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run `model.generate` of transformers, with its arguments; `model.generate` itself does the same until
        `close`.

        Without `past_key_values`, it takes a `new_cache()`, of which `report()` then tells, unless `use_cache` is
        False. Raises UsageError for another `cache_implementation`, NotFiniteError for logits that are NaN or infinite.
        """
        if self._generate is None or self._undo is None:
            raise UsageError("this model has no generate()" if self._undo else "this attach() is closed: attach again")
        if not takes_new_cache(self.model, args, kwargs):
            return self._generate(*args, **kwargs)
        output = self._generate(*args, **{**without_cache(kwargs), **cache_argument(self.new_cache())})
        self.check_steps()
        return output

    def new_cache(self, tokens: int = 0, rollback: int = 0) -> CompressedCache:
        """An empty cache for one batch of sequences, to pass to the model as `past_key_values`.

        tokens: final length of each row, where known: layers read by kernels then allocate it at once, so that no
        later step allocates or moves tensors.
        rollback: how many of the newest tokens `CompressedCache.crop` may remove, exactly: as many more stay in full
        precision, too. Assisted generation sets it by itself.
        """
        self.forget_cache()  # its memory may be what the new one needs
        cross_layer, joined = CrossLayerSum(), (JoinedLayers(), JoinedLayers())
        kinds = layer_kinds(text_config(self.model.config))
        caches = [
            (HybridLayer if kinds[layer.index] == "hybrid" else CompressedLayer)(
                layer.index, plan, layer.rotation, layer.sliding_window, rematerializers, cross_layer, joined
            )
            for layer, plan, rematerializers in zip(self.layers, self.plans, self._rematerializers, strict=True)
        ]
        nominal = self.method.nominal_bits
        own: Callable[[], list[Any]] = partial(own_layers, self.model.config) if self.has_states else list
        made = CompressedCache(caches, self.prefill, nominal, self.backend.summary, self._origin_of, own)
        made.allow_rollback(rollback)
        for cache in caches:
            if tokens and self.backend.by_kernels(cache.index):
                cache.reserve(tokens)
        self.hooks.newest = made  # returned by name: another thread may make one meanwhile
        return made

    def forget_cache(self) -> None:
        """Let the newest cache be freed: `report` then needs it. A new cache and the block's end do the same."""
        self.hooks.newest = None

    def load_cache(self, path: str | os.PathLike, room: int = 0) -> CompressedCache:
        """The cache that `CompressedCache.save` wrote, with its prompt as `cache.loaded`; it continues bit for bit.

        room: tokens that will follow, where known; see `new_cache`. Raises UsageError, naming both, for a cache of
        another model, method, option or artifact; KvqError, naming the file, for one that is missing, truncated or
        altered.
        """
        saved = SavedCache(path)
        saved.check_origin(self.origin)
        config = text_config(self.model.config)
        prompt = saved.prompt(config.vocab_size)
        cache = self.new_cache(prompt.ids.shape[1] + room if room else 0)
        cache.check_saved()
        cache.adapters = self.hooks.adapters.applied()
        cache.rows, cache.loaded = saved.rows(prompt.ids.shape[1], model_context(config)), prompt
        shapes = [_layer_shape(*each) for each in zip(self.layers, self.plans, strict=True)]
        other_local = "packed" if self.method.keeps_local(model_shape(self.model)) else "16bit"
        saved.restore(cache, shapes, other_local)
        return cache

    def _origin_of(self, cache: CompressedCache) -> Origin:
        self.hooks.check_adapters(cache)
        return self.origin

    @property
    def origin(self) -> Origin:
        """What a cache belongs to that this attach makes now."""
        applied = self.hooks.adapters.applied()
        if self._origin is None or self._origin[0] != applied:
            dtype = str(self.model.dtype).removeprefix("torch.")
            identity = fingerprint(self.model), weights_digest(self.model)
            self._origin = applied, Origin(*identity, dtype, to_config(self.method), self._artifact, self.prefill)
        return self._origin[1]

    def one_by_one(self) -> AbstractContextManager[None]:
        """Inside the block, a pass over several tokens gives what decoding them one by one would, whatever `prefill`
        says: the prompt's pass comes before the block."""
        return self.hooks.one_by_one()

    def check_steps(self) -> None:
        """Raise NotFiniteError where a decode step of this thread gave logits that are NaN or infinite: on a GPU, steps
        do not wait for that answer. Call it when an answer is complete."""
        self.hooks.check_steps()

    def report(self, cache: CompressedCache | None = None) -> CacheReport:
        """Bytes and bits of `cache`, or of the newest cache."""
        cache = cache or self.hooks.newest
        if cache is None:
            raise UsageError("there is no cache to report on: make one with new_cache()")
        return cache.report()


def attach(
    model: PreTrainedModel,
    method: Method | Artifact | str | os.PathLike,
    *,
    prefill: str = "exact",
    backend: str = "auto",
    graphs: bool = True,
) -> Attached:
    """Run `model` with caches compressed by `method` until `close()`, or inside a `with` block.

    method: a method by name, with bits and options where they are not the defaults ("kivi-2bit", "kivi:sinks=8"), or
    by `build`; an artifact, its folder, or its id on the Hugging Face Hub ("user/repo@revision"). The name of a method
    that is calibrated ("klt-2bit") stands for the model's artifact in `artifacts/MODEL/`.
    prefill: "exact": a pass over several tokens sees these in full precision; "compressed": it sees what one-by-one
    decoding would see (for perplexity and other scores of one pass).
    backend: of the attention of single queries, "auto", "triton" or "torch"; see `choose_backend`.
    graphs: on a GPU, capture decode steps as CUDA graphs where kernels compute the attention of all layers. This
    replaces `model.forward`; with graphs=False, `model.generate` alone is replaced.

    `model.generate` makes a compressed cache where none is passed; a forward pass uses one only where one from
    `new_cache()` is passed as `past_key_values`. Methods that are fit to the prompt (innerq, squat, gear, zipcache) are
    fit to the first pass: with `prefill_chunk_size` of `generate`, to the first chunk, of which a left-padded row may
    have a few tokens only. Of a model with linear, recurrent, convolutional or chunked attention beside full attention,
    the cache compresses the layers with full attention; others keep transformers' own states in it.

    Raises UsageError where the model, the method's options or the artifact do not fit each other, KvqError where the
    artifact is missing, damaged or cannot be downloaded.
    """
    if prefill not in PREFILLS:
        raise UsageError(f"unknown prefill {prefill!r}; valid: {', '.join(PREFILLS)}")
    check_backend(backend)
    register()
    if isinstance(method, (str, os.PathLike)):
        method = named(method, model)
    artifact = None if isinstance(method, Method) else method
    digest = None if artifact is None else artifact.config.get("checksum")
    method, plans = _plans(model, method)
    decoder = decoder_of(model)
    device, *others = compute_devices(decoder)
    if others:
        names = ", ".join(map(str, (device, *others)))
        raise UsageError(f"the model is on several devices, {names}: load it on one (--device)")
    before = decoder.config._attn_implementation
    with ExitStack() as undo:
        undo.callback(decoder.set_attn_implementation, before)
        decoder.set_attn_implementation(NAME)
        refused = UsageError(f"{type(model).__name__} does not let transformers choose its attention function")
        if decoder.config._attn_implementation != NAME:
            raise refused
        configs = [getattr(module, "config", None) for *_, module in attention_modules(model)]
        if any(getattr(config, "_attn_implementation", None) != NAME for config in configs):
            raise refused
        points = any(plan.keys.source != "post_rope" for plan in plans)
        with recorded_score_forms() as forms:
            layers = attention_layers(model, points)
        if artifact is not None:
            check_factors(artifact, method.calibration(model_shape(model)), layers)
        rotations = shared(layer.rotation for layer in layers)
        layers = [
            replace(layer, rotation=rotation, score_form=forms.get(layer.module, PLAIN))
            for layer, rotation in zip(layers, rotations, strict=True)
        ]
        chosen = choose_backend(backend, device, list(zip(layers, plans, strict=True)))
        attached = Attached(model, method, plans, layers, prefill, chosen, digest)
        attached.install(graphs, undo)
    return attached


def _plans(model: PreTrainedModel, method: Method | Artifact) -> tuple[Method, list[LayerPlan]]:
    """The method and its plan for each compressed layer; an artifact is checked against the model first."""
    shape, device = model_shape(model), compute_devices(model)[0]
    tensors: dict[int, dict[str, Tensor]] = {index: {} for index in shape.cached_layers}
    if not isinstance(method, Method):
        artifact = method
        artifact.check_model(model)
        method = from_config(artifact.method_config)
        tensors = {i: {name: tensor.to(device) for name, tensor in artifact.layer(i).items()} for i in tensors}
    elif method.needs_artifact(shape):
        raise UsageError(f"method {method.name} needs an artifact: make one with kvq calibrate --method {method.name}")
    return method, [method.layer_plan(index, shape, tensors[index]) for index in shape.cached_layers]


def _rematerializers(layer: AttentionLayer, plan: LayerPlan) -> tuple[Rematerialize | None, Rematerialize | None]:
    """How keys and values are rematerialized from cached layer inputs or latents; None where they are cached."""
    if plan.keys.source != "input":
        return None, None
    keys, values = projections(layer)
    sums = partial(values.rematerialize_sums, up=plan.values.up) if values.norm is None else None
    return (
        Rematerialize(partial(keys.rematerialize, up=plan.keys.up)),
        Rematerialize(partial(values.rematerialize, up=plan.values.up), sums),
    )


def _layer_shape(layer: AttentionLayer, plan: LayerPlan) -> LayerShape:
    """The sizes that the model's own tensors give to the cache of a layer."""
    probe = layer.probe
    if plan.keys.source == "input":
        streams = [stream.latents(probe.input) for stream in plan.kept]
    else:
        streams = [probe.key, probe.value]
    heads = probe.key.shape[1]
    return LayerShape(streams, heads, heads * (probe.key.shape[3] + probe.value.shape[3]))
