"""Closed-loop evaluation of a checkpoint: success per task with 95 % intervals, videos, and the gate's verdict.

    python tools/evaluate.py --checkpoint outputs/quickstart/checkpoints --eval-suite mt10 --eval-trials-per-task 20
    python tools/evaluate.py --checkpoint outputs/quickstart/checkpoints --replay 64

A run that was killed goes on where it was. Exit status: 0 evaluated or promoted, 1 error, 3 rejected by --eval-gate, 4 replay
found a difference.
"""

from __future__ import annotations

from runpy import run_module

if __name__ == "__main__":
    run_module("megatron_vla.evaluation", run_name="__main__")
