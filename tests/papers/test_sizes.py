"""Counted cache sizes, against those that the papers print."""

import pytest

from kvq_cli.papers.sizes import compare_sizes


@pytest.mark.slow
def test_counted_sizes_agree_with_the_printed_ones():
    """Within the rounding of the printed number and 5 %, with two exceptions: Table 7 leaves out the indices of
    outliers, and Llama-2-7B's centroids in Table 13 contradict the formula that fits the other models."""
    for row in compare_sizes():
        differs = row["table"] == "7" or (row["shape"], row["table"]) == ("llama-2-7b", "13")
        averaged = row["figure"] in ("MB", "ratio %")  # the papers average over lengths; kvq counts a single length
        printed = 0.5 * 10 ** -len(str(row["published"]).partition(".")[2])
        allowed = printed + (0.1 if averaged else 0.05) * row["published"]
        assert differs or abs(row["counted"] - row["published"]) <= allowed, row
