"""The rematerialization analysis against the paper's figures and against its equations written out."""

import json

import numpy as np
import pytest

from kvq_cli.benchmarking.gpus import GPUS, Gpu
from kvq_cli.benchmarking.shapes import SHAPES, LlamaShape
from kvq_cli.errors import UsageError
from kvq_cli.figures import new_figure
from kvq_cli.papers.studies.roofline import Load, Roofline, plain, xquant, xquant_as_printed, xquant_cl
from kvq_cli.papers.studies.study import build

H100 = 378  # 756 TFLOP/s over 2 TB/s, section 3.4


@pytest.mark.parametrize("shape, published", [("llama-2-7b", "2.3K"), ("llama-3.1-8b", "40.6K")])
def test_the_limits_that_the_paper_prints(shape, published):
    limit = xquant_as_printed(SHAPES[shape], 2).limit(GPUS["h100-pcie"].ridge)
    assert f"{limit / 1000:.1f}K" == published


def test_equation_3_solved_by_hand():
    d = 4096
    square = LlamaShape(1, d, 0, 32, 32, 1)  # 4 d^2 numbers and two norms, where the paper's layer has 12 d^2
    load = xquant(square, 2)
    assert (load.work, load.cached) == (4 * d * d, 2 / 8 * d)
    assert load.weights == 2 * (4 * d * d + 2 * d)
    limit = Load(4 * d * d, 2 / 8 * d, 24 * d * d).limit(H100)
    assert 4 * limit * d * d / (2 / 8 * limit * d + 24 * d * d) == pytest.approx(H100)
    assert limit == pytest.approx(2281, abs=1)


def test_gqa_reads_two_latents_where_the_printed_equation_has_one():
    shape, d, g = SHAPES["llama-3.1-8b"], 4096, 4
    printed, counted = xquant_as_printed(shape, 2), xquant(shape, 2)
    assert printed.work == counted.work == 4 * (d // g) ** 2
    assert printed.cached == 2 / 8 * d / g == counted.cached / 2
    assert counted.weights == pytest.approx(26 * d * d + 4 * (d // g) ** 2, rel=1e-4)
    assert counted.cached == plain(shape, 2).cached  # as much as quantized keys and values


def test_xquant_cl_counts_the_work_of_section_3_4():
    mha, gqa = SHAPES["llama-2-7b"], SHAPES["llama-3.1-8b"]
    assert xquant_cl(mha, 2, 4).work == 4 * 4096**2 + 2 * 4096
    assert xquant_cl(gqa, 2, 4).work == 8 * 4096 * 1024 + 2 * 4096
    assert xquant_cl(gqa, 2, 4).cached - xquant(gqa, 2).cached == 2 * 4 / 8 * 4096


def test_time_becomes_compute_bound_at_the_limit():
    gpu, load = Gpu(1e12, 1e10), Load(work=1e6, cached=100, weights=1e9)
    limit = load.limit(gpu.ridge)
    below, at, above = load.seconds(np.array([limit / 2, limit, 2 * limit]), gpu)
    assert below == pytest.approx((100 * limit / 2 + 1e9) / 1e10)
    assert at == pytest.approx(1e6 * limit / 1e12)
    assert above == pytest.approx(2 * at)
    assert Load(work=100, cached=10, weights=1e9).limit(gpu.ridge) == float("inf")


def test_a_gpu_given_by_its_two_numbers():
    own = Roofline(teraflops=756.0, bandwidth=2.0, gpu="none of them")
    assert own.device.ridge == Roofline().device.ridge == H100
    assert Roofline(gpu="h200", bandwidth=2.4).device.ridge == pytest.approx(989 / 2.4)


@pytest.mark.parametrize("option", [{"gpu": "abacus"}, {"bits": "0"}, {"bandwidth": "-1"}, {"shapes": "llama-9"}])
def test_bad_options_are_refused(option):
    with pytest.raises(UsageError):
        build("roofline", option).run(lambda *_: None)


def test_the_command_needs_no_model(kvq, tmp_path):
    result = kvq("analyze", "roofline", "--set", "shapes=llama-2-7b,mistral-7b,reference", "--out", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "roofline.json").read_text())
    assert [row[0] for row in document["rows"]] == ["llama-2-7b", "mistral-7b", "reference"]
    assert document["numbers"]["shapes"]["llama-2-7b"]["limits"]["printed"] == document["rows"][0][2]
    assert (tmp_path / "roofline.png").stat().st_size > 5000


def test_measured_times_are_drawn_beside_the_estimates(tmp_path):
    rows = [
        {"operation": "rematerialize", "case": "xquant-2bit", "batch": 8, "context": 4096, "us": {"p50": 321.0}},
        {
            "operation": "rematerialize",
            "case": "xquant-2bit",
            "model": "llama-2-7b",
            "context": 512,
            "us": {"p50": 9.5},
        },
        {"operation": "rematerialize", "case": "xquant-4bit", "batch": 1, "context": 4096, "failed": "out of memory"},
        {"operation": "decode_attention", "case": "kvq fp16", "batch": 1, "context": 4096, "us": {"p50": 14.0}},
    ]
    (tmp_path / "some-gpu").mkdir()
    document = {"machine": {"gpu": {}, "device": "Some GPU"}, "rows": rows}
    (tmp_path / "some-gpu" / "kernels.json").write_text(json.dumps(document))
    found = Roofline(measured=str(tmp_path)).run(lambda *_: None)
    shapes = found.numbers["shapes"]
    own = {"device": "Some GPU", "case": "xquant-2bit"}
    assert shapes["llama-3.1-8b"]["measured"] == [
        {"shape": "llama-3.1-8b", **own, "tokens": 8 * 4096, "microseconds": 321.0}
    ]
    assert shapes["llama-2-7b"]["measured"] == [{"shape": "llama-2-7b", **own, "tokens": 512, "microseconds": 9.5}]
    figure = new_figure(9, 4)
    found.draw(figure)
    assert "Some GPU, xquant-2bit" in [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
