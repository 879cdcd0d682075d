"""Jobs on processes that die, raise or hang: every result once, in order; what fails again and again is named."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from megatron_vla.evaluation.ordered_processes import OrderedProcesses

HANG_SECONDS = 5.0


def squares(marks: str, faults: dict[int, str], job: range, done: int) -> Iterator[int | None]:
    """Squares of the job's numbers. faults: number -> what goes wrong at it once ("always_die": each time)."""
    for number in job[done:]:
        yield None
        mark, fault = Path(marks) / str(number), faults.get(number)
        (Path(marks) / f"begun_{number}").touch()
        if fault is not None and not mark.exists():
            if fault != "always_die":
                mark.touch()
            if fault in ("die", "always_die"):
                os._exit(7)
            if fault == "hang":
                time.sleep(600)
            raise ValueError("no square") if fault == "refuse" else RuntimeError("it exploded")
        yield number**2


def described(job: range, done: int, signs: int) -> str:
    return f"number {job[min(done, len(job) - 1)]} after {signs} sign(s)"


def results(
    marks: Path, faults: dict[int, str], num_processes: int, say: list[str], timeout_seconds: float = 600.0
) -> Iterator[int]:
    processes: OrderedProcesses[range, int] = OrderedProcesses(
        partial(squares, str(marks), faults), num_processes, timeout_seconds, described, "stop counting", say.append
    )
    return processes.results(range(first, first + 3) for first in range(0, 15, 3))


@pytest.mark.parametrize("num_processes", [1, 2])
def test_results_of_lost_processes_come_once_and_in_order(tmp_path: Path, num_processes: int) -> None:
    said: list[str] = []
    found = list(results(tmp_path, {1: "die", 6: "raise", 14: "die"}, num_processes, said))
    assert found == [number**2 for number in range(15)]
    assert [line.split(":")[0] for line in sorted(said)] == [f"number {n} after 1 sign(s)" for n in (1, 14, 6)]
    assert sum("exit status 7; tried again" in line for line in said) == 2 and sum("it exploded" in line for line in said) == 1


def test_a_hanging_process_is_replaced(tmp_path: Path) -> None:
    said: list[str] = []
    assert list(results(tmp_path, {4: "hang"}, 1, said, HANG_SECONDS)) == [number**2 for number in range(15)]
    assert "number 4 after 1 sign(s): it gave no answer within 5 s; tried again in a new process" in said


def test_what_always_fails_is_named(tmp_path: Path) -> None:
    said: list[str] = []
    going = results(tmp_path, {4: "always_die"}, 1, said)
    assert [next(going) for _ in range(4)] == [0, 1, 4, 9]
    with pytest.raises(ValueError, match=r"number 4 after 1 sign.*exit status 7 \(3 times in a row\) -> stop counting"):
        next(going)
    assert len(said) == 2


def test_a_refusal_ends_everything_at_once(tmp_path: Path) -> None:
    """Jobs that wait are not begun, a process that would sleep for ten minutes is not waited for."""
    with pytest.raises(ValueError, match=r"^no square$"):
        list(results(tmp_path, {2: "refuse", 3: "hang"}, 2, []))
    assert not (tmp_path / "begun_6").exists() and not (tmp_path / "begun_12").exists()
