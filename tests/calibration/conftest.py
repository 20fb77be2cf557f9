"""What tests of calibration share: the tiny model, quick options, a run that is interrupted."""

from __future__ import annotations

import pytest
from tiny_folder import tiny, tiny_folder  # noqa: F401  # fixtures

from kvq_cli.calibration.settings import CalibrationOptions


@pytest.fixture(scope="session")
def quick() -> CalibrationOptions:
    """Options of a calibration of the tiny model that takes a second."""
    return CalibrationOptions(samples=6, seqlen=100, gradients=4, points=300, iterations=5)


@pytest.fixture
def interrupted(monkeypatch):
    """`interrupted(module, name, run)`: run() is interrupted by Ctrl-C in the second call of the function; returns the
    list of the layers that it was called with, which grows with later calls."""

    def interrupt_run(module, name, run):
        function, calls = getattr(module, name), []

        def interrupt(layer, *more):
            calls.append(layer.index)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return function(layer, *more)

        monkeypatch.setattr(module, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            run()
        return calls

    return interrupt_run
