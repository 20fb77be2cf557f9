"""The goals' table against ratios computed by hand."""

import math

from lab.goals.klt import goals_table, interpolated, perplexity_ratio, reached


def document(bits, measured, kl, ratio=1.02):
    texts = {f"perplexity_{name}": (ratio + shift) * own for name, shift, own in (("a", 0.0, 5.0), ("b", 0.02, 20.0))}
    own = {"perplexity_a": 5.0, "perplexity_b": 20.0}
    results = {
        name: {"perplexity,none": value, "perplexity_uncompressed,none": own[name], "kl,none": kl}
        for name, value in texts.items()
    }
    # The mean over texts is no text of its own.
    results["perplexity"] = {"perplexity,none": 9.0, "perplexity_uncompressed,none": 1.0, "kl,none": kl}
    cache = {"perplexity_a-1024": {"measured_bits": measured, "tokens": 1024}}
    return {"results": results, "cache": cache, "config": {"method": {"name": "x", "bits": bits}}}


METHODS = {
    "fp16": document(None, 16.0, 1e-6),
    "kivi-1bit": document(1, 2.0, 0.4),
    "kivi-3bit": document(3, 4.0, 0.1),
    "temporalkv-2bit": document(2, 3.0, 0.3),
    "klt-2bit": document(2.0, 3.0, 0.06, 1.0),
    "klt-3bit": document(3.0, 4.0, 0.06, 1.0),
    "klt-4bit,join_keys=on": document(4.0, 5.0, 0.02),
}


def test_best_other_method_is_interpolated_in_log_kl_at_equal_measured_bits():
    at_2, at_3, at_4 = reached(METHODS)
    assert (at_2.other, at_3.other, at_4.other) == ("kivi", "kivi", "")
    assert math.isclose(at_2.other_kl, math.sqrt(0.4 * 0.1)) and math.isclose(at_2.ratio, 0.3)
    assert math.isclose(at_3.ratio, 0.6) and at_4.ratio is None


def test_verdicts_name_each_goal():
    _, rows = goals_table(METHODS)
    assert [row[-1] for row in rows] == [
        "KL met, perplexity met (at most 1.03)",
        "KL not met, perplexity not met (at most 1.005)",
        "",
    ]
    assert [row[0] for row in rows] == ["klt-2bit", "klt-3bit", "klt-4bit,join_keys=on"]


def test_perplexity_ratio_is_the_mean_over_texts():
    assert math.isclose(perplexity_ratio(METHODS["kivi-1bit"]), 1.03)


def test_bits_outside_of_a_methods_points_have_no_value():
    points = [(2.0, 0.4), (4.0, 0.1)]
    assert interpolated(points, 1.9) is None and interpolated(points, 4.1) is None
    assert math.isclose(interpolated(points, 3.0), 0.2)


def answered(score, measured):
    mean = {"alias": "ruler", "1024,none": score, "1024_stderr,none": 0.05, "2048,none": score / 2}
    scores = {"vt": {"1024,none": 0.1}, "ruler": mean}
    cache = {"vt-1024": {"measured_bits": measured, "tokens": 1024}}
    return {"results": scores, "cache": cache, "config": {"method": {"bits": 2}}}


def test_rulers_mean_is_compared_with_fp16s():
    methods = {
        "fp16": answered(1.0, 16.0),
        "kivi-2bit": answered(0.4, 4.0),
        "gear-2bit": answered(0.6, 5.0),
        "klt-1bit": answered(0.9, 2.0),
        "klt-2bit": answered(0.98, 3.0),
    }
    _, rows = goals_table(methods)
    assert rows == [
        ["klt-1bit", "2.00", "67.5", "75.0", "gear-2bit", "45.0", "RULER not met (at most 2 below)"],
        ["klt-2bit", "3.00", "73.5", "75.0", "gear-2bit", "45.0", "RULER met (at most 2 below)"],
    ]


def test_methods_that_were_left_out_have_no_part_in_rulers_table():
    """A model that leaves its dtype's range with a method is not scored; fp16 does where the model itself does."""
    _, rows = goals_table({"kivi-2bit": answered(0.4, 4.0), "klt-1bit": answered(0.9, 2.0)})
    assert rows == [["klt-1bit", "2.00", "67.5", "", "kivi-2bit", "30.0", ""]]
    _, rows = goals_table({"fp16": answered(1.0, 16.0), "klt-1bit": answered(0.9, 2.0)})
    assert rows == [["klt-1bit", "2.00", "67.5", "75.0", "none", "", "RULER not met (at most 2 below)"]]
