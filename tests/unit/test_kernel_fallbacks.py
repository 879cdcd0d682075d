"""Calls that a kernel did not take are counted, and told of once. On a GPU: tests/gpu/test_rms_norm_kernel.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from test_metrics_logging import record
from training_fixtures import tiny_config

from megatron_vla.kernels import FALLBACKS, Fallbacks
from megatron_vla.kernels.rms_norm.op import rms_norm
from megatron_vla.training import logging
from megatron_vla.training.logging import RunLogger

LAUNCHER: Any = object()


class OnGpu:
    """What `note` reads of a tensor."""

    is_cuda, dtype, shape = True, torch.bfloat16, (3, 512)

    def data_ptr(self) -> int:
        return 256 + 8


def test_calls_are_counted_and_told_of_once() -> None:
    fallbacks, tensor = Fallbacks(), cast(torch.Tensor, OnGpu())
    assert fallbacks.news() == []
    for _ in range(3):
        fallbacks.note("rms_norm", LAUNCHER, tensor, None)
    (line,) = fallbacks.news()
    for part in ("kernels/rms_norm: 3 calls", "bfloat16 [3, 512]", "address of 8 mod 128"):
        assert part in line
    fallbacks.note("rms_norm", LAUNCHER, tensor)
    fallbacks.note("layer_norm", LAUNCHER, tensor)
    assert [line.partition(":")[0] for line in fallbacks.news()] == ["WARNING kernels/layer_norm"]
    assert fallbacks.counts == {"rms_norm": 4, "layer_norm": 1}


def test_what_was_never_to_be_taken_is_not_counted() -> None:
    fallbacks = Fallbacks()
    fallbacks.note("rms_norm", None, cast(torch.Tensor, OnGpu()))  # not built: the start says so
    fallbacks.note("rms_norm", LAUNCHER, torch.zeros(2, 512))
    assert fallbacks.counts == {} and fallbacks.news() == []
    before = dict(FALLBACKS.counts)
    rms_norm(torch.ones(2, 512), torch.ones(512), 0.0, 1e-6)
    assert before == FALLBACKS.counts


def test_the_log_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fallbacks = Fallbacks()
    monkeypatch.setattr(logging, "FALLBACKS", fallbacks)
    logger = RunLogger(tiny_config("--log-dir", str(tmp_path)), 0)
    logger.window(record(1, [1.0]))
    assert "kernels/" not in capsys.readouterr().out
    fallbacks.note("rms_norm", LAUNCHER, cast(torch.Tensor, OnGpu()))
    logger.window(record(2, [1.0]))
    logger.window(record(3, [1.0]))
    assert capsys.readouterr().out.count("WARNING kernels/rms_norm: 1 calls so far") == 1
