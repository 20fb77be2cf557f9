"""Compare predicted times with closed forms, the launches' own plans, and measured times."""

import heapq
import json
import os
import subprocess
import sys
from itertools import product
from math import ceil

import pytest
import torch
from kvq_kernels import fields, machine_code
from kvq_kernels.decode_attention import aot_cases, plan_splits
from kvq_kernels.decode_attention.arguments import side_spec
from kvq_kernels.decode_attention.configs import choose_tile
from kvq_kernels.transform_attention import configs
from kvq_kernels.transform_attention import launch as transform_launch
from kvq_kernels.transform_attention.arguments import EXACT_TILE
from kvq_kernels.transform_attention.configs import Config

from kvq_cli.benchmarking.gpus import GPUS
from kvq_cli.benchmarking.kernels.decode import DecodeShape
from kvq_cli.benchmarking.kernels.transform import _empty_sides
from lab.studies import predicted_times
from lab.studies.compiled_attention import DIM, MULTIPROCESSORS, TARGET, Kernel, Plan, key_profile
from lab.studies.warp_timing import LATENCIES, Instruction, busy, cycles, interval

NONE = 7


def instruction(text, stall=1, writes=NONE, reads=NONE, waits=()):
    return Instruction(text, stall, writes, reads, waits)


def test_warps_share_issue_slots_and_units():
    sums = [instruction("FADD R0, R0, R1")] * 40
    assert cycles(sums) == [40] and max(cycles(sums, 2)) == 80  # one instruction a cycle
    slow = [instruction("FADD R0, R0, R1", stall=4)] * 40
    assert cycles(slow) == [160] and max(cycles(slow, 2)) == pytest.approx(160, abs=2)  # hidden by the other warp
    logic = [instruction("LOP3.LUT R0, R0, R1, RZ, 0xc0, !PT", stall=2)] * 40
    assert interval(logic, 1) == interval(logic, 2) / 2 == 80 == busy(logic)["alu"]  # half as many results a cycle


def test_warps_wait_for_results_from_memory():
    load = [instruction("LDG.E R0, [R2.64]", writes=0), instruction("FADD R0, R0, R1", waits=(0,))]
    assert interval(load, 1) == pytest.approx(LATENCIES["memory"], abs=10)
    assert interval(load, 4) == pytest.approx(interval(load, 1), abs=20)
    ahead = [
        instruction("DEPBAR.LE SB0, 0x2"),
        instruction("LDGSTS.E [R2], [R4.64]"),
        instruction("LDGDEPBAR", writes=0),
    ]
    assert interval(ahead, 1) == pytest.approx(LATENCIES["memory"] / 3, rel=0.2)  # three groups under way


def test_products_of_a_warp_group_take_the_tensor_core_as_long_as_the_data_sheet_says():
    group = [instruction("HGMMA.64x128x16.F32 R24, R88, gdesc[UR12], R24")] * 8
    wait = instruction("WARPGROUP.DEPBAR.LE gsb0, 0x0")
    # 2 x 64 x 128 x 16 operations each, of a multiprocessor's share of the GPU's at the data sheet's clock.
    expected = 8 * 2 * 64 * 128 * 16 / (GPUS["h100-sxm"].flops / MULTIPROCESSORS / 1.83e9)
    assert busy([*group, wait])["tensor"] == pytest.approx(expected, rel=0.01)
    assert interval([*group, wait], 1) == pytest.approx(expected + LATENCIES["short"], rel=0.02)
    assert interval([*group, wait], 2) == pytest.approx(2 * expected, rel=0.02)  # one warp's wait is the other's work
    assert busy([instruction("@!P0 HMMA.16816.F32 R4, R8, R12, R4")])["tensor"] == pytest.approx(4 / 0.63)


@pytest.mark.parametrize("rate", range(4, 17))
def test_profiles_of_keys_fill_their_lanes(rate):
    widths = key_profile(rate)
    assert widths[0] > widths[-1]
    assert fields.rate(widths) == rate and sum(widths) == 4 * rate and fields.fits(widths)


def unread(operation, tokens, warps, waves, windows, exact_tile, mixed=()):
    return Kernel("", operation, 2.0, warps, tokens, 128, 0, waves, windows, (), (), (), mixed, exact_tile)


SHAPES = [(1, 4096), (1, 32768), (1, 131072), (8, 4096), (8, 131072)]


@pytest.mark.parametrize(("batch", "context"), SHAPES)
def test_plans_have_as_many_programs_as_the_launches(batch, context):
    shape = DecodeShape(batch, aot_cases.HEADS, context, torch.device("meta"))
    query = torch.empty(batch, aot_cases.HEADS * aot_cases.GROUP, DIM, dtype=torch.float16, device="meta")
    keys, values = _empty_sides("klt-2bit", shape)
    config = Config.of("cpu", DIM)
    kernel = unread("transform_attention", config.tokens, config.warps, config.programs, (8, 8, 32), EXACT_TILE)
    plan = Plan.of(kernel, batch, context)
    assert (plan.splits, plan.exact_programs) == transform_launch.programs(query, keys, values)
    check_tokens(plan, kernel, context)


@pytest.mark.parametrize(("batch", "context"), SHAPES)
@pytest.mark.parametrize("name", ["fp16", "kivi-2bit-g32"])
def test_plans_of_decode_attention_have_as_many_programs_as_its_launches(name, batch, context):
    keys, values, _ = aot_cases.storage_cases()[name]
    tile = choose_tile(TARGET, *(side_spec(side, DIM) for side in (keys, values)))
    query = torch.empty(batch, aot_cases.HEADS * aot_cases.GROUP, DIM, dtype=torch.float16, device="meta")
    tokens = min(32, tile.tokens) if name.startswith("kivi") else tile.tokens
    mixed = () if name == "fp16" else ("an instruction",)
    kernel = unread("decode_attention", tokens, tile.warps, tile.waves, (32, 96, 160), 16 * tile.warps, mixed)
    plan = Plan.of(kernel, batch, aot_cases.TOKENS)
    assert plan.programs == plan_splits(query, keys, values, None, tile) + 2
    check_tokens(Plan.of(kernel, batch, context), kernel, context)


#: (pairs of row and kv head, tiles of each): few pairs, nearly one for each place, and more, in several rounds.
SPLIT = [(3, 512), (8, 16), (8, 64), (8, 512), (8, 2048), (64, 2048), (120, 300), (184, 2048), (200, 512)]
SPLIT += [(272, 2048), (272, 300), (400, 512), (536, 2048), (560, 64), (808, 2048), (4096, 512)]


@pytest.mark.parametrize(("pairs", "tiles"), SPLIT)
def test_no_other_splits_of_klt_end_much_earlier(pairs, tiles):
    """Programs are given out in order, each to the first place that is free."""
    room, exact, edge, tail = 264, 2, configs.EDGE_COST, configs.EXACT_COST

    def end(splits):
        places = [0] * room
        for cost in [edge + ceil(tiles / splits)] * (pairs * splits) + [tail] * (pairs * exact):
            heapq.heappush(places, heapq.heappop(places) + cost)
        return max(places)

    chosen = configs.choose_splits(pairs, tiles, exact, room)
    assert end(chosen) <= 1.05 * min(map(end, range(1, min(tiles, max(16, ceil(2 * room / pairs))) + 1)))


def check_tokens(plan, kernel, context):
    """Each token is in one program."""
    assert plan.packed + plan.exact + plan.mixed == context and plan.exact >= sum(kernel.windows[:2])
    tiles = ceil(plan.packed / kernel.tokens)
    assert plan.splits * (plan.tiles - 1) < tiles <= plan.splits * plan.tiles
    assert plan.exact_programs * plan.exact_tiles * kernel.exact_tile >= plan.exact
    assert plan.mixed_programs * plan.mixed_tiles * 16 >= plan.mixed


def command_output(launch, *shapes):
    """(GPU, launch, batch, context) -> what the command prints, without the interpreter that tests compute in."""
    try:
        machine_code.check_tools()
    except OSError as error:
        pytest.skip(str(error))
    command = [sys.executable, "-m", "lab.studies.predicted_times", "--json", "--launches", launch, "--shapes", *shapes]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return {(one["gpu"], one["kernel"], one["batch"], one["context"]): one for one in json.loads(result.stdout)}


@pytest.fixture(scope="module")
def predicted():
    return command_output("klt-2bit", "1x32768", "1x131072", "8x131072")


def test_16_bits_take_as_long_as_measured(predicted):
    """Where memory bounds them; at 1 x 32,768 the measured time is 1.4 times the predicted one."""
    for batch, context in [(1, 131072), (8, 131072)]:
        one = predicted["h100", "fp16", batch, context]
        assert one["time"][1] == pytest.approx(one["measured"], rel=0.05)


@pytest.mark.slow
def test_kivi_takes_nearly_as_long_as_measured():
    """Its loop is the machine code's: nothing is fitted to measured times. At this shape it takes nearly all of the
    time; at others exact tokens did, which other code read when these were measured."""
    predicted = command_output("kivi-2bit-g32", "8x131072")
    one = predicted["h100", "kivi-2bit-g32", 8, 131072]
    assert 0.75 < one["time"][1] / one["measured"] < 1.07


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--shapes", "8,131072"], "'8,131072': give BATCHxCONTEXT, a context above 512 tokens"),
        (["--shapes", "1x100"], "'1x100': give BATCHxCONTEXT"),
        (["--launches", "kivi"], "'kivi': give klt-K-V (bytes of a lane) or one of fp16"),
        (["--launches", "klt-2bit-x4"], "klt's may end in -x2 to -x3 (lists of heads)"),
        (["--launches", "fp16-x2"], "'fp16-x2': give klt-K-V"),
        (["--try", "half=1"], "'half=1': give NAME=N, separated by commas; names: warps"),
    ],
)
def test_wrong_arguments_are_refused_with_the_form_they_have(words, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["predicted_times", *words])
    with pytest.raises(SystemExit):
        predicted_times.main()
    assert says in capsys.readouterr().err


def test_terms_follow_the_work(predicted):
    for gpu, kernel in product(["h100", "h200"], ["fp16", "klt-2bit"]):
        short, long, wide = (predicted[gpu, kernel, *shape] for shape in [(1, 32768), (1, 131072), (8, 131072)])
        for term in ("memory", "issue", "tensor"):
            assert long[term] == pytest.approx(4 * short[term], rel=0.02)
            assert wide[term] == pytest.approx(8 * long[term], rel=0.001)
        assert max(long[term] for term in ("memory", "issue", "tensor")) < long["time"][0] <= long["time"][1]
        assert wide["loop"][1] > 4 * long["loop"][1]
    for kernel in ("fp16", "klt-2bit"):
        h100, h200 = (predicted[gpu, kernel, 1, 131072] for gpu in ("h100", "h200"))
        assert h100["memory"] / h200["memory"] == pytest.approx(4.8 / 3.35)  # data sheets
        assert h100["tensor"] == h200["tensor"] and h100["loop"] == h200["loop"]


def test_bytes_and_products_of_klt_are_those_of_its_storage(predicted):
    one = predicted["h100", "klt-2bit", 1, 131072]
    # 32 bytes of keys and of values and 2 of gains per token and head; 16 exact tokens.
    nbytes = 8 * ((131072 - 16) * 66 + 16 * 2 * 2 * DIM)
    assert one["memory"] == pytest.approx(1e6 * nbytes / (0.9 * 3.35e12))
    # Of a tile of 64 tokens: 112 components of keys in 7 products of 64 x 128 x 16, 64 cycles each; in HMMA, scores and
    # the sums of 144 components of values.
    tiles = 8 * (131072 - 16) / 64 / MULTIPROCESSORS
    hmma = (DIM // 16 + 144 // 16) * 4 / 0.63
    assert one["tensor"] == pytest.approx(1e6 * tiles * (7 * 64 + hmma) / 1.98e9, rel=0.001)
