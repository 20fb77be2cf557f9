"""Put a compression method under a model, for the time of a `with` block.

What is used of transformers: forward hooks on the model's own modules, `past_key_values`, and the registries of
attention and mask functions. No model code is copied or patched, and everything is undone when the block ends.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kvq_cli.artifact import Artifact
from kvq_cli.attention.backend import ChosenBackend, check_backend, choose_backend
from kvq_cli.attention.graphs import repeating_steps
from kvq_cli.attention.passes import AHEAD, Pass, attention, mask
from kvq_cli.attention.projections import projections
from kvq_cli.attention.rotary import Rotation, has_fixed_rope
from kvq_cli.attention.taps import AttentionSite, attention_modules, decoder_of, iter_attention, layer_input
from kvq_cli.cache.cache import CompressedCache
from kvq_cli.cache.cross_layer import CrossLayerSum
from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.cache.remade import Remake
from kvq_cli.cache.report import CacheReport
from kvq_cli.cache.rows import stalls
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.methods.base import LayerPlan, Method
from kvq_cli.methods.registry import from_config
from kvq_cli.models import model_context, model_shape

NAME = "kvq"
PREFILLS = ("exact", "compressed")


class Attached:
    """A model with a method under it; made by `attach`."""

    def __init__(
        self, model: PreTrainedModel, method: Method, plans: list[LayerPlan], sites: list[AttentionSite], prefill: str
    ) -> None:
        self.model, self.method, self.prefill = model, method, prefill
        self.backend: ChosenBackend
        self._plans, self._sites = plans, sites
        self._remakes = [_remakes(site, plan) for site, plan in zip(sites, plans, strict=True)]
        self._context = model_context(model.config)
        self._latest: CompressedCache | None = None

    def owns(self, cache: CompressedCache) -> bool:
        """Was the cache made here?"""
        return cache.layers[0].plan is self._plans[0]

    def new_cache(self, tokens: int = 0) -> CompressedCache:
        """An empty cache for one batch of sequences, to pass to the model as `past_key_values`.

        tokens: how many each row will hold in the end, where that is known: layers that kernels read then make room
        for them at once, and no later step allocates or moves anything.
        """
        across = CrossLayerSum()
        layers = [
            CompressedLayer(site.index, plan, site.rotation, site.sliding_window, remakes, across)
            for site, plan, remakes in zip(self._sites, self._plans, self._remakes, strict=True)
        ]
        for layer in layers:
            if tokens and self.backend.by_kernels(layer.index):
                layer.reserve(tokens)
        self._latest = CompressedCache(layers, self.prefill, self.method.nominal_bits, self.backend.summary)
        return self._latest

    def report(self, cache: CompressedCache | None = None) -> CacheReport:
        """Bytes and bits of `cache`, or of the newest one."""
        cache = cache or self._latest
        if cache is None:
            raise UsageError("there is no cache to report on: make one with new_cache()")
        return cache.report()

    # -- hooks ---------------------------------------------------------------------------------------------------

    def _hook(self, undo: ExitStack) -> None:
        """Put the hooks on the model; `undo` removes them."""
        decoder = decoder_of(self.model)
        handles = [
            decoder.register_forward_pre_hook(self._before_pass, with_kwargs=True),
            decoder.register_forward_hook(self._after_pass),
        ]
        checked: list[Rotation] = []
        for site, plan in zip(self._sites, self._plans, strict=True):
            if plan.keys.source == "pre_rope":
                handles.append(site.key.module.register_forward_hook(self._key_hook(site)))
            if plan.keys.source == "input":
                handles.append(site.module.register_forward_pre_hook(self._input_hook(site), with_kwargs=True))
            if plan.keys.source == "post_rope" or any(site.rotation is rotation for rotation in checked):
                continue
            checked.append(site.rotation)
            hook = _rotation_hook(site, has_fixed_rope(decoder))
            handles.append(site.module.register_forward_pre_hook(hook, with_kwargs=True))
        undo.callback(self.forget_pass)
        for handle in handles:
            undo.callback(handle.remove)

    def _before_pass(self, decoder: nn.Module, args: tuple, kwargs: dict) -> None:
        """Before the decoder runs: describe the pass, and tell every layer and attention module of it."""
        self.forget_pass()
        if args:
            kwargs = {**inspect.signature(decoder.forward).bind_partial(*args).arguments, **kwargs}
        cache = kwargs.get("past_key_values")
        if not (isinstance(cache, CompressedCache) and self.owns(cache)):
            return
        inputs = kwargs.get("input_ids")
        batch, columns = (kwargs["inputs_embeds"] if inputs is None else inputs).shape[:2]
        mask = kwargs.get("attention_mask")
        if mask is not None and not isinstance(mask, Tensor):
            raise UsageError("a compressed cache needs a 2-D attention_mask of zeros and ones, not prepared masks")
        forward = cache.begin(columns, batch, mask, kwargs.get("position_ids"))
        longest = max(run.tokens for run in forward.runs)
        if columns > 1 and longest > self._context:
            raise UsageError(f"the prompt has {longest} tokens, the model's context is {self._context}: shorten it")
        for site, layer in zip(self._sites, cache.layers, strict=True):
            layer.begin(forward)
            AHEAD[site.module] = Pass(layer, self)

    def forget_pass(self) -> None:
        """Drop what a pass that was interrupted left."""
        for site in self._sites:
            if site.module in AHEAD and AHEAD[site.module].attached is self:
                del AHEAD[site.module]

    def _after_pass(self, _decoder: nn.Module, _args: tuple, _output: object) -> None:
        for site in self._sites:
            ahead = AHEAD.get(site.module)
            if ahead is not None and ahead.attached is self and not ahead.done:
                raise KvqError(f"{site.name} did not compute its attention with kvq: was its implementation changed?")
        self.forget_pass()

    def _key_hook(self, site: AttentionSite) -> Callable:
        def after(_module: nn.Module, _args: tuple, output: Tensor) -> None:
            ahead = AHEAD.get(site.module)
            if ahead is not None and ahead.attached is self:
                ahead.layer.tap(site.key.view(output))

        return after

    def _input_hook(self, site: AttentionSite) -> Callable:
        def before(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            ahead = AHEAD.get(site.module)
            if ahead is not None and ahead.attached is self:
                ahead.layer.tap_input(layer_input(args, kwargs))

        return before


@contextmanager
def attach(
    model: PreTrainedModel,
    method: Method | Artifact,
    *,
    prefill: str = "exact",
    backend: str = "auto",
    graphs: bool = True,
) -> Iterator[Attached]:
    """Run `model` with caches compressed by `method`, a method or a calibrated artifact, inside the block.

    prefill: "exact": a pass over several tokens sees these in full precision; "compressed": it sees what one-by-one
    decoding would see (for perplexity and other scores of one pass). backend: who computes attention of single
    queries, "auto", "triton" or "torch"; see `choose_backend`. graphs: on a GPU, record decode steps as CUDA graphs
    where kernels compute the attention of all layers.
    A forward pass uses the compressed cache only where one from `new_cache()` is passed as `past_key_values`.

    Raises UsageError where the model, the method's options or the artifact do not go together.
    """
    if prefill not in PREFILLS:
        raise UsageError(f"unknown prefill {prefill!r}; valid: {', '.join(PREFILLS)}")
    check_backend(backend)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    method, plans = _plans(model, method)
    decoder = decoder_of(model)
    before = decoder.config._attn_implementation
    with ExitStack() as undo:
        undo.callback(decoder.set_attn_implementation, before)
        decoder.set_attn_implementation(NAME)
        refused = UsageError(f"{type(model).__name__} does not let transformers choose its attention function")
        if decoder.config._attn_implementation != NAME:
            raise refused
        configs = [getattr(module, "config", None) for _, module in attention_modules(model)]
        if any(getattr(config, "_attn_implementation", None) != NAME for config in configs):
            raise refused
        taps = any(plan.keys.source != "post_rope" for plan in plans)
        sites = _with_shared_rotations(iter_attention(model, taps))
        attached = Attached(model, method, plans, sites, prefill)
        attached.backend = choose_backend(backend, model.device, list(zip(sites, plans, strict=True)))
        attached._hook(undo)
        if graphs and model.device.type == "cuda" and attached.backend.engine is not None:
            undo.enter_context(repeating_steps(attached))
        yield attached


def _plans(model: PreTrainedModel, method: Method | Artifact) -> tuple[Method, list[LayerPlan]]:
    """The method and its plan for each layer; an artifact is checked against the model first."""
    shape = model_shape(model)
    tensors: list[dict[str, Tensor]] = [{}] * shape.layers
    if not isinstance(method, Method):
        artifact = method
        artifact.check_model(model)
        method = from_config(artifact.method_config)
        tensors = [
            {name: tensor.to(model.device) for name, tensor in artifact.layer(i).items()} for i in range(shape.layers)
        ]
    elif method.needs_artifact(shape):
        raise UsageError(f"method {method.name} needs an artifact: make one with kvq calibrate --method {method.name}")
    return method, [method.plan(index, shape, tensors[index]) for index in range(shape.layers)]


def _remakes(site: AttentionSite, plan: LayerPlan) -> tuple[Remake | None, Remake | None]:
    """What makes keys and values of the layer inputs or latents that `plan` keeps."""
    if plan.keys.source != "input":
        return None, None
    keys, values = projections(site)
    sums = partial(values.remake_sums, up=plan.values.up) if values.norm is None else None
    return Remake(partial(keys.remake, up=plan.keys.up)), Remake(partial(values.remake, up=plan.values.up), sums)


def _with_shared_rotations(sites: list[AttentionSite]) -> list[AttentionSite]:
    """The sites, with one Rotation object for all layers that rotate alike."""
    shared: list[Rotation] = []
    result = []
    for site in sites:
        rotation = next((known for known in shared if known.same(site.rotation)), site.rotation)
        if rotation is site.rotation:
            shared.append(rotation)
        result.append(site.with_rotation(rotation))
    return result


def _rotation_hook(site: AttentionSite, fixed: bool) -> Callable:
    """Before an attention module that rotates keys: is the model's (cos, sin) the one that the cache will use?

    fixed: it does not depend on the length of the text, so that what was so at the prompt is so at every step.
    """

    def before(module: nn.Module, _args: tuple, kwargs: dict) -> None:
        embeddings, ahead = kwargs.get("position_embeddings"), AHEAD.get(module)
        if embeddings is None or ahead is None or site.rotation.style == "none":
            return
        forward = ahead.layer.expected
        run = forward.runs[0]
        if fixed and stalls(embeddings[0].device, forward.columns):
            return
        if run.tokens > run.past and not site.rotation.agrees(*(x[0, -1] for x in embeddings), run.last_position):
            raise UsageError(
                f"{site.name}: this model's RoPE changes with the length of the text, so that keys cached before RoPE "
                "cannot be turned later: use a method that caches keys after RoPE"
            )

    return before
