"""Stop signals: one is remembered, repeated SIGTERM is one request, a second Ctrl-C ends at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_vla.training.signals import StopSignals

ALONE: Any = SimpleNamespace(world_size=1)


def test_repeated_sigterm_is_one_request() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals(ALONE) as signals:
        assert not signals.poll()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.poll() and signals.received == "SIGTERM"
        signals.finish()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.fixture
def interrupts_raise() -> Iterator[None]:
    """Python's own handler of Ctrl-C; pytest's worker processes ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts_raise")
def test_second_interrupt_ends_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), StopSignals(ALONE) as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.poll() and signals.received == "SIGINT"
        os.kill(os.getpid(), signal.SIGINT)
        signals.poll()
