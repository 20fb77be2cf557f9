"""Progress where stderr is no terminal: plain lines, with a clock that the test sets."""

import pytest

from kvq_cli.cli.output import Output
from kvq_cli.cli.progress_lines import ProgressLines


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def lines():
    return []


@pytest.fixture
def progress(lines, clock):
    return ProgressLines(lines.append, clock)


def test_line_at_the_start_then_every_30_seconds_and_at_the_end(progress, lines, clock):
    with progress:
        task = progress.add_task("capture", total=64)
        assert lines == ["capture: 0/64"]
        for _ in range(64):
            clock.now += 7
            progress.advance(task)
    elapsed = range(35, 448, 35)  # the first multiples of 7 that are 30 s behind the line before
    assert len(lines) == 1 + len(elapsed) + 1
    assert lines[1] == "capture: 5/64, 0:00:35 elapsed, about 0:06:53 left"
    assert [line.split(",")[0] for line in lines[1:-1]] == [f"capture: {seconds // 7}/64" for seconds in elapsed]
    assert lines[-1] == "capture: 64/64, 0:07:28 elapsed"


def test_remaining_time_ignores_what_an_earlier_run_has_done(progress, lines, clock):
    with progress:
        task = progress.add_task("vt-4096", total=100, completed=60)
        clock.now += 40
        progress.update(task, completed=80)
        clock.now += 1
        progress.update(task, completed=80)  # no news
        done = progress.add_task("qa_1-4096", total=50, completed=50)
        progress.update(done, completed=50)
    assert lines == [
        "vt-4096: 60/100",
        "vt-4096: 80/100, 0:00:40 elapsed, about 0:00:40 left",
        "qa_1-4096: 50/50",
    ]


def test_interrupted_step_says_where_it_stopped(progress, lines, clock):
    with pytest.raises(KeyboardInterrupt), progress:
        known, unknown = progress.add_task("cluster", total=9), progress.add_task("measuring", total=None)
        clock.now += 5
        progress.advance(known, 2)
        progress.advance(unknown, 3)
        raise KeyboardInterrupt
    assert lines[2:] == ["cluster: 2/9, 0:00:05 elapsed, about 0:00:18 left", "measuring: 3, 0:00:05 elapsed"]


def test_phase_that_is_done_again_begins_again(progress, lines, clock):
    with progress:
        task = progress.add_task("windows", total=2)
        for completed in (1, 2, 0, 1, 2):
            clock.now += 4
            progress.update(task, completed=completed)
    assert lines == ["windows: 0/2", "windows: 2/2, 0:00:08 elapsed"] * 2


def test_phases_write_to_stderr_unless_quiet(capsys):
    for quiet in (False, True):
        with Output(quiet=quiet).phases() as show:
            for done in range(3):
                show("capture", done, 2)
            show("write", 1, 1)
        stdout, stderr = capsys.readouterr()
        lines = [] if quiet else ["capture: 0/2", "capture: 2/2, 0:00:00 elapsed", "write: 1/1"]
        assert (stdout, stderr.splitlines()) == ("", lines)


def test_a_line_every_30_seconds_also_where_nothing_is_reported(progress, lines, clock):
    with progress:
        progress.add_task("loading", total=1, completed=1)
        task = progress.add_task("measuring", total=3)
        for seconds in (29, 1, 30):
            clock.now += seconds
            progress.say_running()
        assert lines[2:] == ["measuring: 0/3, 0:00:30 elapsed", "measuring: 0/3, 0:01:00 elapsed"]
        progress.advance(task, 3)
        clock.now += 100
        progress.say_running()
    assert lines[4:] == ["measuring: 3/3, 0:01:00 elapsed"]
