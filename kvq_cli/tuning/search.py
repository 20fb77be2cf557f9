"""Search the mixed configuration of least KL divergence within a budget of bits, or of fewest bits for a KL divergence.

1. All streams are served by klt, with codes given out by expected losses over the whole model, as klt itself does.
2. KL is measured with each stream alone compressed. The ratio of this to the expected loss of the stream replaces what
   the Fisher metric misses: that a stream is read mostly from the window in full precision, or where it saturates.
   Other methods are scaled by the same ratio, through errors of both on captured data. Where the KL of single streams
   would be lost in rounding, they are measured at fewer bits.
3. The choice of least predicted KL within the budget is found exactly, and measured. Steps 2 and 3 repeat.
4. Bits are exchanged between pairs of streams, least predicted loss first; what lowers the measured KL is kept.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvq_cli.calibration import estimate
from kvq_cli.calibration.parallel import run_parallel
from kvq_cli.calibration.plan import MixedPlan
from kvq_cli.calibration.streams import Progress, calibrate_part, read_captured, stored_transform, streams_of
from kvq_cli.calibration.transforms import held_out_errors
from kvq_cli.calibration.work_folder import WorkFolder
from kvq_cli.codecs.base import Codec
from kvq_cli.methods.base import Method, TransformSpec
from kvq_cli.methods.mixed import Mixed
from kvq_cli.methods.registry import build, parse, to_config
from kvq_cli.tuning.measure import Meter
from kvq_cli.tuning.menus import Anchor, Floats, Item, Stream, choose, klt_losses, klt_name, scaled
from kvq_cli.tuning.settings import TuneOptions

#: Least KL of a stream alone, as a share of the mean of all: measured differences below are noise.
_FLOOR = 1e-3
#: KL of a stream alone is measured at bits at which the mean of all streams is this many times the KL of rounding.
_CLEAR = 3
#: Share of a stream's mean bytes that a swap moves.
_SWAP = 0.1
#: Share of `--kl` that is aimed at, so that the measured KL is seldom above it.
_MARGIN = 0.95
_UNCOMPRESSED = "fp16"


@dataclass(frozen=True)
class Tried:
    """A configuration and what it measured. names: of each stream. bits: packed, per number. kl: nats per token."""

    step: str
    names: Mapping[Stream, str]
    bits: float
    kl: float


class Search:
    """Finished calibrations and measurements are kept in `work`, so that an interrupted search continues from them."""

    def __init__(
        self,
        plan: MixedPlan,
        options: TuneOptions,
        work: WorkFolder,
        captures: WorkFolder,
        meter: Meter,
        progress: Progress,
    ) -> None:
        self.plan, self.options, self.work, self.captures = plan, options, work, captures
        self.meter, self.progress = meter, progress
        self.shape = plan.loaded.shape
        self.streams = streams_of(plan)
        self.numbers = self.shape.kv_heads * self.shape.head_dim
        self.tried: list[Tried] = []
        self.alone: dict[Stream, list[Anchor]] = {stream: [] for stream in self.streams}
        self._measured: dict[str, Any] = work.read_json("measured") or {}
        self._expected: dict[Stream, Floats] = {}
        self._deadline = time.monotonic() + 60 * options.minutes if options.minutes is not None else float("inf")

    def run(self) -> Tried:
        """The best configuration; `tried` lists all."""
        self._fit_transforms()
        budget = self._bytes(self.options.budget)
        start = choose({stream: self._klt_menu(stream, self._expected[stream]) for stream in self.streams}, budget)
        best = self.measure("klt, by expected loss", start)
        for number in range(1, self.options.rounds + 1):
            if self._late():
                break
            self._measure_alone(self._measurable(best))
            if self.options.objective == "memory":
                budget = self._budget_for(_MARGIN * (self.options.kl or 0.0))
            names = self._named(choose(self._menus(), budget))
            if any(names == tried.names for tried in self.tried):
                break
            best = self._better(best, self.measure(f"choice {number}", names))
        return self._swap(best)

    def curve(self) -> list[tuple[float, float]]:
        """Predicted (bits, KL) of the best choices from 0.5 to 4.25 bits; empty before streams were measured alone."""
        if not all(self.alone.values()):
            return []
        menus = self._menus()
        points = []
        for quarter in range(2, 18):
            if quarter / 4 * self.numbers * len(self.streams) / 8 >= len(self.streams):
                points.append((quarter / 4, sum(x.loss for x in choose(menus, self._bytes(quarter / 4)).values())))
        return points

    # -- steps -------------------------------------------------------------------------------------------------------

    def _swap(self, best: Tried) -> Tried:
        """Exchange bytes between pairs of streams while this lowers the measured KL."""
        step = max(1, round(_SWAP * self._bytes(best.bits) / len(self.streams)))
        failed: set[tuple[Stream, Stream]] = set()
        for number in range(1, self.options.swaps + 1):
            found = self._next_swap(best.names, step, failed)
            if found is None or self._late():
                break
            pair, names = found
            tried = self.measure(f"swap {number}", names)
            better = self._better(best, tried)
            if better is best:
                failed |= {pair}
            best = better
        return best

    def _next_swap(
        self, names: Mapping[Stream, str], step: int, failed: set[tuple[Stream, Stream]]
    ) -> tuple[tuple[Stream, Stream], dict[Stream, str]] | None:
        """The untried pair (giver, taker), with the streams' new names, whose exchange has the least predicted loss."""
        change: dict[Stream, dict[int, tuple[float, str]]] = {}
        for stream in self.streams:
            by_codes = {item.cost: item for item in self._klt_menu(stream, self._scaled(stream))}
            now = self._codes(stream, names[stream])
            if now is None:
                continue
            change[stream] = {
                sign: (by_codes[now + sign * step].loss - by_codes[now].loss, by_codes[now + sign * step].name)
                for sign in (-1, 1)
                if now + sign * step in by_codes
            }
        pairs = [
            (change[giver][-1][0] + change[taker][1][0], (giver, taker))
            for giver in change
            for taker in change
            if giver != taker and -1 in change[giver] and 1 in change[taker] and (giver, taker) not in failed
        ]
        if not pairs:
            return None
        giver, taker = min(pairs)[1]
        return (giver, taker), {**names, giver: change[giver][-1][1], taker: change[taker][1][1]}

    def _measurable(self, best: Tried) -> Mapping[Stream, str]:
        """The names of `best`, or, where rounding would drown the KL of streams alone, of the best choice with fewer
        bits."""
        least = _CLEAR * self._rounding() * len(self.streams)
        return best.names if best.kl >= least else self._named(choose(self._menus(), self._budget_for(least)))

    def _rounding(self) -> float:
        """KL with nothing compressed: that of a cache in the model's dtype, and of other orders of additions."""
        return self._kl(dict.fromkeys(self.streams, _UNCOMPRESSED))[0]

    def _budget_for(self, target: float) -> int:
        """The least bytes whose predicted KL, times measured over predicted of the choice nearest to `target`, is
        `target` at most."""
        menus = self._menus()
        nearest = min(self.tried, key=lambda tried: abs(tried.kl - target))
        ratio = nearest.kl / max(self._predicted(nearest.names), 1e-12)
        low, high = sum(min(item.cost for item in menu) for menu in menus.values()), self._bytes(8.0)
        while low < high:
            middle = (low + high) // 2
            enough = ratio * sum(item.loss for item in choose(menus, middle).values()) <= target
            low, high = (low, middle) if enough else (middle + 1, high)
        return low

    def _better(self, best: Tried, tried: Tried) -> Tried:
        if self.options.objective == "kl":
            return min(best, tried, key=lambda each: each.kl)
        target = self.options.kl or 0.0
        within = [each for each in (best, tried) if each.kl <= target]
        return min(within, key=lambda each: each.bits) if within else min(best, tried, key=lambda each: each.kl)

    def _late(self) -> bool:
        return time.monotonic() > self._deadline

    # -- measurements ------------------------------------------------------------------------------------------------

    def measure(self, step: str, choice: Mapping[Stream, Item] | Mapping[Stream, str]) -> Tried:
        """Calibrate what is missing, and measure the KL of a configuration."""
        names = self._named(choice)
        self._calibrate([(stream, name) for stream, name in names.items()])
        kl, bits = self._kl(names)
        self.tried.append(Tried(step, names, bits, kl))
        return self.tried[-1]

    def _measure_alone(self, names: Mapping[Stream, str]) -> None:
        """Anchor each stream's predicted losses at the KL of the stream alone, without that of rounding."""
        self._calibrate(list(names.items()))
        rounding = self._rounding()
        measured: dict[Stream, tuple[int, float]] = {}
        for done, stream in enumerate(self.streams):
            self.progress("sensitivity", done, len(self.streams))
            codes = self._codes(stream, names[stream])
            if codes is None or any(anchor.codes == codes for anchor in self.alone[stream]):
                continue
            others = dict.fromkeys(self.streams, _UNCOMPRESSED)
            measured[stream] = codes, self._kl({**others, stream: names[stream]})[0] - rounding
        self.progress("sensitivity", len(self.streams), len(self.streams))
        known = [kl for _, kl in measured.values()] + [anchor.kl for each in self.alone.values() for anchor in each]
        floor = max(_FLOOR * sum(known) / len(known), 1e-12)
        for stream, (codes, kl) in measured.items():
            self.alone[stream].append(Anchor(codes, max(kl, floor)))

    def _kl(self, names: Mapping[Stream, str]) -> tuple[float, float]:
        """(KL, packed bits), measured once for each configuration."""
        method = self.method(names)
        key = f"{method.keys} | {method.values}"
        if key not in self._measured:
            kl, bits = self.meter({**self.plan.request(), "method": to_config(method)}, self.tensors(names))
            self._measured[key] = [kl, bits]
            self.work.write_json("measured", self._measured)
        kl, bits = self._measured[key]
        return kl, bits

    def _relative_loss(self, stream: Stream, name: str) -> float:
        """Squared products of error and gradient on held-out captured data, relative to those of dropping all."""
        key = f"loss {_step(stream, name)}"
        if key not in self._measured:
            self._calibrate([(stream, name)])
            tensors = {f"{stream[1]}.{key}": x for key, x in self.work.read_tensors(_step(stream, name)).items()}
            plan = self.component(stream, name).stream_plan(stream[1], stream[0], self.shape, tensors)
            assert isinstance(plan.codec, Codec)
            captured = read_captured(self.plan, self.captures, *stream)
            x = captured.x[:1, : plan.codec.block_tokens * 8].float().transpose(1, 2)
            packed = plan.codec.encode(x)
            self._measured[f"cost {_step(stream, name)}"] = packed.nbytes / packed.tokens
            self._measured[key] = held_out_errors(captured, plan.codec, 1)["loss"]
            self.work.write_json("measured", self._measured)
        return self._measured[key]

    def _calibrate(self, parts: list[tuple[Stream, str]]) -> None:
        """Calibrate the streams by these methods, as far as this was not done."""
        missing = [part for part in parts if self.work.read_json(_step(*part)) is None]

        def run(part: tuple[Stream, str]) -> None:
            stream, name = part
            component = self.component(stream, name)
            tensors, errors = calibrate_part(self.plan, self.work, self.captures, stream, component)
            self.work.write_tensors(_step(*part), {key: tensor.cpu() for key, tensor in tensors.items()})
            self.work.write_json(_step(*part), errors)  # last: marks the part as finished

        for done, _ in enumerate(run_parallel(run, missing, estimate.cluster_workers(self.plan)), 1):
            self.progress("calibrate", done, len(missing))

    def _fit_transforms(self) -> None:
        name, options = parse(self.options.candidates[0])
        spec = build(name, **options).calibration(self.shape)
        assert isinstance(spec, TransformSpec)  # the first candidate is klt
        for done, (layer, kind) in enumerate(self.streams, 1):
            groups = spec.groups(kind, self.shape)[0]
            fitted = stored_transform(self.plan, self.work, self.captures, (layer, kind), groups, spec.metric)
            self._expected[layer, kind] = klt_losses([row.cpu().numpy() for row in fitted.variances])
            self.progress("transform", done, len(self.streams))

    # -- menus -------------------------------------------------------------------------------------------------------

    def _menus(self) -> dict[Stream, list[Item]]:
        """What each stream can choose from, with losses in KL."""
        menus = {}
        for stream in self.streams:
            menus[stream] = self._klt_menu(stream, self._scaled(stream))
            if not self.alone[stream]:
                continue
            anchor = self.alone[stream][0]
            name = self.klt(anchor.codes)
            for other in self.options.candidates[1:]:
                loss = self._relative_loss(stream, other)
                own = max(self._relative_loss(stream, name), 1e-12)
                cost = math.ceil(self._measured[f"cost {_step(stream, other)}"])
                menus[stream].append(Item(other, cost, anchor.kl * loss / own))
        return menus

    def _scaled(self, stream: Stream) -> Floats:
        return scaled(self._expected[stream], self.alone[stream]) if self.alone[stream] else self._expected[stream]

    def _klt_menu(self, stream: Stream, losses: Floats) -> list[Item]:
        return [Item(self.klt(codes), codes, float(loss)) for codes, loss in enumerate(losses) if loss < float("inf")]

    def klt(self, codes: int) -> str:
        """The name of klt with this many codes of a stream."""
        return klt_name(self.options.candidates[0], codes, self.numbers)

    def _codes(self, stream: Stream, name: str) -> int | None:
        """The codes of a stream that klt serves."""
        found = [codes for codes in range(1, len(self._expected[stream])) if self.klt(codes) == name]
        return found[0] if found else None

    def _predicted(self, names: Mapping[Stream, str]) -> float:
        menus = self._menus()
        return sum(next(item.loss for item in menus[stream] if item.name == name) for stream, name in names.items())

    def _bytes(self, bits: float) -> int:
        return int(bits * self.numbers * len(self.streams) / 8)

    # -- configurations ----------------------------------------------------------------------------------------------

    def _named(self, choice: Mapping[Stream, Item] | Mapping[Stream, str]) -> dict[Stream, str]:
        return {stream: item.name if isinstance(item, Item) else item for stream, item in choice.items()}

    def component(self, stream: Stream, name: str) -> Method:
        return self.method(dict.fromkeys(self.streams, name)).component(*stream)

    def method(self, names: Mapping[Stream, str], bits: float = 16.0) -> Mixed:
        """The method with these streams; its windows are the plan's."""
        keys, values = (" ".join(names[layer, kind] for layer in range(self.shape.layers)) for kind in "kv")
        windows = {key: getattr(self.plan.method, key) for key in ("sinks", "recent", "buffer")}
        return Mixed(bits=bits, keys=keys, values=values, **windows)

    def tensors(self, names: Mapping[Stream, str]) -> dict[str, Tensor]:
        """The tensors of an artifact with these streams."""
        return {
            f"layers.{stream[0]}.{stream[1]}.{key}": tensor
            for stream, name in names.items()
            if name != _UNCOMPRESSED
            for key, tensor in self.work.read_tensors(_step(stream, name)).items()
        }

    def errors(self, names: Mapping[Stream, str]) -> list[dict[str, Any]]:
        """The calibration errors of each layer."""
        return [
            {kind: self.work.read_json(_step((layer, kind), names[layer, kind])) for kind in "kv"}
            for layer in range(self.shape.layers)
        ]


def _step(stream: Stream, name: str) -> str:
    """The name of a calibrated stream in the work folder."""
    return f"{stream[0]}.{stream[1]}.{name.replace(':', '.')}"
