"""Pipeline stages on megatron-core's schedules: losses, every gradient and ten updates equal to one process."""

from __future__ import annotations

import pipeline_cases
import pytest
import torch
from pipeline_cases import Result
from torch import Tensor
from worker_pool import WorkerPool, pool_fixture

PP2 = ("--pipeline-model-parallel-size", "2")
INTERLEAVED = (*PP2, "--virtual-pipeline-model-parallel-size", "2")
ONE_PASS = ("--micro-batch-size", "4", "--global-batch-size", "4")
FOUR_PASSES = ("--micro-batch-size", "1", "--global-batch-size", "4")
CHECKPOINTING = ("--activation-checkpoint-module-patterns", "vision_tower.layers.*", "layers.*")


pool = pool_fixture(2, "pipeline_cases")
four = pool_fixture(4, "pipeline_cases")


@pytest.fixture(scope="module")
def alone() -> dict[str, Result]:
    """One process, one micro-batch per step, by precision."""
    return {
        "fp64": pipeline_cases.take_steps(0, ["--fp64", *ONE_PASS], 3),
        "fp32": pipeline_cases.take_steps(0, [*ONE_PASS], 10),
    }


def whole(ranks: list[Result], kind: str) -> dict[str, Tensor]:
    """Tensors of all stages of data-parallel rank 0, put together; each name is held by one stage."""
    found: dict[str, Tensor] = {}
    stages = sorted({result.place[1] for result in ranks})
    for stage in stages:
        parts = sorted((r for r in ranks if r.place[1:] == (stage, 0)), key=lambda r: r.place[0])
        names = getattr(parts[0], kind)
        assert names and not set(names) & set(found)
        for name in names:
            dim = parts[0].cut_dims.get(name)
            tensors = [getattr(part, kind)[name] for part in parts]
            found[name] = tensors[0] if dim is None else torch.cat(tensors, dim)
    return found


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Relative to each tensor's largest element."""
    assert set(actual) == set(expected)
    largest = max(float(t.abs().max()) for t in expected.values())
    for name, wanted in expected.items():
        difference = float((actual[name].double() - wanted.double()).abs().max())
        # A key bias moves all scores of a query alike: its gradient is zero but for rounding, which Adam then blows up.
        scale = largest if name.endswith("k_proj.bias") else float(wanted.abs().max())
        assert difference <= tolerance * scale, name


def assert_same(ranks: list[Result], expected: Result, tolerance: float) -> None:
    steps = len(ranks[0].losses)
    for result in ranks:  # every rank knows the loss and the norm
        assert result.counts == expected.counts[:steps]
        assert result.losses[0] == pytest.approx(expected.losses[0], rel=tolerance)
        assert result.norms[0] == pytest.approx(expected.norms[0], rel=tolerance)
        assert result.losses == pytest.approx(expected.losses[:steps], rel=1e-4)
        assert result.norms == pytest.approx(expected.norms[:steps], rel=1e-3)
        assert result.extra[0] == pytest.approx(expected.extra[0], rel=1e-6)
    assert_close(whole(ranks, "gradients"), expected.gradients, tolerance)


@pytest.mark.parametrize(
    "flags",
    [
        (*PP2, *ONE_PASS),
        (*PP2, *FOUR_PASSES),
        (*PP2, *FOUR_PASSES, "--no-skip-dead-compute", "--overlap-grad-reduce"),
        (*PP2, *FOUR_PASSES, "--pipeline-layout", "0", "4"),
        (*PP2, *FOUR_PASSES, "--pipeline-layout", "3", "1", *CHECKPOINTING),
        (*INTERLEAVED, *FOUR_PASSES),
        (*INTERLEAVED, *FOUR_PASSES, *CHECKPOINTING, "--overlap-grad-reduce"),
    ],
    ids=lambda flags: " ".join(flags).replace("model-parallel-size ", ""),
)
def test_two_stages_fp64(pool: WorkerPool, alone: dict[str, Result], flags: tuple[str, ...]) -> None:
    ranks = [o.value for o in pool.run("take_steps", ["--fp64", *flags], 2)]
    assert_same(ranks, alone["fp64"], 1e-9)


def test_stages_send_every_draw_of_noise(pool: WorkerPool) -> None:
    flags = ["--fp64", "--flow-draws", "3"]
    expected = pipeline_cases.take_steps(0, [*flags, *ONE_PASS], 2)
    ranks = [o.value for o in pool.run("take_steps", [*flags, *PP2, *FOUR_PASSES], 2)]
    assert_same(ranks, expected, 1e-9)


@pytest.mark.parametrize("flags", [PP2, INTERLEAVED], ids=["1F1B", "interleaved"])
def test_two_stages_fp32_stay_equal_for_ten_steps(pool: WorkerPool, alone: dict[str, Result], flags: tuple[str, ...]) -> None:
    ranks = [o.value for o in pool.run("take_steps", [*flags, *FOUR_PASSES], 10)]
    assert_same(ranks, alone["fp32"], 1e-5)
    wanted = {name: p for name, p in alone["fp32"].parameters.items() if not name.endswith("k_proj.bias")}
    assert_close({name: p for name, p in whole(ranks, "parameters").items() if name in wanted}, wanted, 1e-4)


@pytest.mark.parametrize(
    "flags",
    [
        (*PP2, "--micro-batch-size", "1", "--global-batch-size", "4"),
        (*INTERLEAVED, "--micro-batch-size", "1", "--global-batch-size", "4", "--overlap-grad-reduce"),
        ("--pipeline-model-parallel-size", "4", *FOUR_PASSES),
        ("--tensor-model-parallel-size", "2", "--micro-batch-size", "1", "--global-batch-size", "4"),
        ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--micro-batch-size", "1", "--global-batch-size", "4"),
        (*PP2, "--tensor-model-parallel-size", "2", *FOUR_PASSES),
        (*PP2, "--tensor-model-parallel-size", "2", "--sequence-parallel", *FOUR_PASSES),
        (*INTERLEAVED, "--tensor-model-parallel-size", "2", "--sequence-parallel", *FOUR_PASSES),
    ],
    ids=lambda flags: " ".join(flags).replace("model-parallel-size ", ""),
)
def test_four_processes_fp64(four: WorkerPool, alone: dict[str, Result], flags: tuple[str, ...]) -> None:
    ranks = [o.value for o in four.run("take_steps", ["--fp64", *flags], 2)]
    assert_same(ranks, alone["fp64"], 1e-9)


@pytest.mark.parametrize("stages", [PP2, INTERLEAVED], ids=["1F1B", "interleaved"])
def test_sharded_optimizer_over_stages(four: WorkerPool, alone: dict[str, Result], stages: tuple[str, ...]) -> None:
    """Gradients end in shards here, so losses and norms after updates are compared."""
    sharded = ("--use-distributed-optimizer", "--overlap-param-gather", "--overlap-grad-reduce")
    ranks = [o.value for o in four.run("take_steps", ["--fp64", *stages, *FOUR_PASSES, *sharded], 3)]
    for result in ranks:
        assert result.losses == pytest.approx(alone["fp64"].losses, rel=1e-7)
        assert result.norms == pytest.approx(alone["fp64"].norms, rel=1e-7)


def test_bf16_stages_round_nothing_more_than_one_process(pool: WorkerPool) -> None:
    """Activations and their gradients travel in fp32: the same bits arrive as in one process."""
    alone = pipeline_cases.take_steps(0, ["--bf16", *FOUR_PASSES], 2)
    ranks = [o.value for o in pool.run("take_steps", ["--bf16", *PP2, *FOUR_PASSES], 2)]
    assert ranks[0].losses[0] == alone.losses[0]
    gradients = whole(ranks, "gradients")
    assert set(gradients) == set(alone.gradients)
    unequal = [name for name, wanted in alone.gradients.items() if not torch.equal(gradients[name], wanted)]
    # The condition collects fp32 gradients from every layer; stages add them up in another order.
    assert all(name.startswith("time_mlp_") for name in unequal), unequal


def test_finite_check_names_the_stage(pool: WorkerPool) -> None:
    """A fault in layer 2's expert: found by its own stage, on whatever rank that is."""
    texts = [o.value for o in pool.run("train_with_a_fault", [*PP2, *FOUR_PASSES, "--pipeline-layout", "2", "2"], "layers.2")]
    assert texts[0] == texts[1]
    assert "rank 1 (pipeline stage 1 of 2), micro-batch 0" in texts[0] and "rank 0" not in texts[0]
    assert "first non-finite module: layers.2.suffix.mlp.gate_proj" in texts[0] and "its input was finite" in texts[0]


def test_interleaved_finite_check_names_the_stage(pool: WorkerPool) -> None:
    texts = [o.value for o in pool.run("train_with_a_fault", [*INTERLEAVED, *FOUR_PASSES], "layers.0")]
    assert "rank 0 (pipeline stage 0 of 2)" in texts[0] and "layers.0.suffix.mlp.gate_proj" in texts[0]
    assert "rank 1 (pipeline stage 1 of 2)" in texts[0] and "its input was already" in texts[0]


def test_micro_batches_of_different_shapes_are_refused(pool: WorkerPool) -> None:
    texts = [o.value for o in pool.run("read_unequal_prompts", [*PP2, *FOUR_PASSES])]
    assert all("micro-batch 1 of this step" in text and "--prompt-padding max" in text for text in texts)


def test_stages_load_a_released_checkpoint_strictly(pool: WorkerPool) -> None:
    for loaded, problem in (o.value for o in pool.run("load_released", list(PP2))):
        assert loaded and "1 parameter(s) are not in it: layers.0.prefix.input_norm.weight" in problem
