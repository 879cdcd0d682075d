"""--expert-stream: the same numbers, and what crosses to the second stream is announced. Streams themselves: tests/gpu."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from groot_model_fixtures import tiny_model as tiny_groot
from pi05_fixtures import assert_gradients_close, gradients, mean_loss, tiny_batch, tiny_model
from torch import Tensor
from torch._dynamo.utils import counters

from megatron_vla.config.check import check
from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.config.run import parse_args
from megatron_vla.models.common.attention_mask import read_mask, tensors_of
from megatron_vla.models.common.side_stream import SideStream
from megatron_vla.models.pi05.family import FAMILY
from megatron_vla.models.pi05.model import Pi05Model
from megatron_vla.models.registry import model_family
from megatron_vla.optimizations import compile as compile_optimization
from megatron_vla.optimizations.apply import apply_optimizations


def built(lines: list[str] | None = None, *, skip_dead_compute: bool = True, **options: Any) -> Pi05Model:
    config = OptimizationConfig(**{"attention_backend": "sdpa", "skip_dead_compute": skip_dead_compute, **options})
    model = tiny_model(skip_dead_compute=skip_dead_compute)
    report = (lambda line: None) if lines is None else lines.append
    assert apply_optimizations(model, config, FAMILY, report) is model
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"skip_dead_compute": False},
        {"compile": True, "merge_projections": True},
        {"activation_checkpoint_module_patterns": ("layers.*.prefix", "layers.*.suffix")},
    ],
    ids=str,
)
def test_on_equals_off(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_optimization, "BACKEND", "aot_eager")
    results = []
    for expert_stream in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model, batch = built(expert_stream=expert_stream, **options), tiny_batch()
        results.append((float(mean_loss(model, batch).detach()), gradients(model, batch)))
        # Compiled: a vision layer; two kinds of joint layers, or of prefix layers and of experts: where its last layer computes
        # no queries, the prefix's keys and values lie otherwise in memory.
        assert counters["stats"]["unique_graphs"] == (0 if "compile" not in options else 5 if expert_stream else 3)
    torch._dynamo.reset()
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-14)
    assert_gradients_close(results[1][1], results[0][1])


def test_what_the_expert_reads_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of every layer; its own inputs and the plan's tensors once; its output where the first stream reads."""
    told: list[list[Tensor]] = []

    class Told(SideStream):
        @contextmanager
        def beside(self, inputs: Iterable[Tensor]) -> Iterator[None]:
            told.append(list(inputs))
            yield

        def join(self, outputs: Iterable[Tensor]) -> None:
            told.append(list(outputs))

    model = built(expert_stream=True)
    model.expert_stream = Told(torch.device("cpu"))
    mean_loss(model, tiny_batch())
    # Suffix, condition, cosines, sines, mask.
    assert [len(tensors) for tensors in told] == [5 + 2, 2, 1]
    assert all(t.ndim == 4 for t in told[1])


@pytest.mark.parametrize(
    ("backend", "count"), [("sdpa", 1), ("eager", 1), ("varlen", 2), ("flash_attn", 2), ("flex", 8)], ids=str
)
def test_every_form_of_a_mask_is_announced(backend: Any, count: int) -> None:
    """Backward reads what is in it on the second stream, when the first could long have its memory again."""
    is_valid_BK = torch.ones(2, 200, dtype=torch.bool)
    tensors = tensors_of(read_mask(backend, torch.ones(2, 3, dtype=torch.bool), is_valid_BK, torch.float32))
    assert len({t.data_ptr() for t in tensors}) >= count and all(isinstance(t, Tensor) for t in tensors)
    if backend == "flex":  # its rule reads validity, filled up to whole blocks
        assert any(t.dtype == torch.bool and t.shape == (2, 256) for t in tensors)


def test_it_is_printed_and_needs_an_expert() -> None:
    lines: list[str] = []
    built(lines, expert_stream=True)
    assert lines == ["expert stream: no effect without a GPU"]
    with pytest.raises(ValueError, match="--expert-stream: only whole pi05 models"):
        apply_optimizations(tiny_groot(), OptimizationConfig(expert_stream=True), model_family("groot_n1_7"), lambda line: None)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--tensor-model-parallel-size", "2"), "--tensor-model-parallel-size"),
        (("--data-parallel-strategy", "fsdp2"), "--data-parallel-strategy"),
        (("--compile", "--compile-scope", "backbone"), "--compile-scope"),
        (("--activation-checkpoint-module-patterns", "vision_tower.layers.*", "layers.*"), "layers.*: both halves"),
        (("--activation-checkpoint-module-patterns", "layers.*.prefix"), None),
        ((), None),
    ],
    ids=str,
)
def test_what_wraps_joint_layers_is_refused(flags: tuple[str, ...], named: str | None) -> None:
    config = parse_args(["--mock-data", "--model-variant", "tiny", "--train-iters", "1", "--expert-stream", *flags])
    found = [str(f) for f in check(config, FAMILY, 2) if f.severity == "error" and "--expert-stream" in str(f)]
    assert len(found) == (named is not None) and (named is None or named in found[0])


def test_groot_refuses_it() -> None:
    words = ["--model-name", "groot_n1_7", "--model-variant", "tiny", "--mock-data", "--train-iters", "1", "--expert-stream"]
    found = [str(f) for f in check(parse_args(words), model_family("groot_n1_7"), 1) if f.severity == "error"]
    assert any("--expert-stream" in f and "no expert" in f for f in found)
