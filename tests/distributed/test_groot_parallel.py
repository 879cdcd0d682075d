"""GR00T N1.7 split over processes: tensor parallelism, pipeline stages and data parallelism give one process's numbers."""

from __future__ import annotations

import groot_parallel_cases
import pytest
import torch
from groot_parallel_cases import Spec
from pipeline_cases import Result
from test_pipeline_parallel import assert_close, whole
from worker_pool import WorkerPool, pool_fixture

PP2 = ("--pipeline-model-parallel-size", "2")
INTERLEAVED = (*PP2, "--virtual-pipeline-model-parallel-size", "2")
TP2 = ("--tensor-model-parallel-size", "2")
ONE_PASS, FOUR_PASSES = ("--micro-batch-size", "4"), ("--micro-batch-size", "1")
ALL = ("--tune-llm", "--tune-visual")
FULL = pytest.mark.distributed_full


two = pool_fixture(2, "groot_parallel_cases")
four = pool_fixture(4, "groot_parallel_cases")


@pytest.fixture(scope="module")
def alone() -> dict[bool, Result]:
    """One process, one micro-batch per step, by whether everything is trained."""
    return {
        tuned: groot_parallel_cases.take_steps(0, ["--fp64", *ONE_PASS, *(ALL if tuned else ())], 2) for tuned in (False, True)
    }


def assert_equal(pool: WorkerPool, specs: list[Spec]) -> list[dict[str, tuple[int, ...]]]:
    """All differences are rounding; returns the ranks' shapes of the first spec."""
    outcomes = [outcome.value for outcome in pool.run("compare", specs)]
    for found in outcomes:
        for spec, difference in zip(specs, found, strict=True):
            worst = max(difference.gradients, key=lambda name: difference.gradients[name])
            assert difference.loss <= 1e-9, spec
            assert difference.gradients[worst] <= 1e-9, (spec, worst, difference.gradients[worst])
            assert difference.actions <= 1e-9, spec
    return [found[0].shapes for found in outcomes]


def test_two_tensor_parallel_ranks_equal_one(two: WorkerPool) -> None:
    specs = [
        Spec(),
        Spec(sequence_parallel=False),
        Spec(equal_images=True),
        Spec(equal_images=True, sequence_parallel=False, changes={"mask_vl_self_attention": True}),
        Spec(equal_images=True, changes={"flow_draws": 3}),
        Spec(sequence_parallel=False, changes={"flow_draws": 2}),
    ]
    for shapes in assert_equal(two, specs):
        assert shapes["vision_tower.layers.0.self_attn.q_proj.weight"] == (16, 32)
        assert shapes["vision_tower.merger.mlp.fc1.weight"] == (64, 128)
        assert shapes["text_layers.3.attention.k_proj.weight"] == (16, 64)
        assert shapes["dit_layers.2.attention.k_proj.weight"] == (32, 64)
        assert shapes["dit_layers.1.mlp.fc2.weight"] == (64, 64)
        assert shapes["state_encoder.fc1.weight"] == (4, 12, 32)  # small: whole on every rank


@FULL
def test_four_tensor_parallel_ranks_equal_one(four: WorkerPool) -> None:
    specs = [Spec(), Spec(sequence_parallel=False), Spec(equal_images=True, changes={"num_query_groups": 4})]
    assert_equal(four, specs)


def assert_same(ranks: list[Result], expected: Result) -> None:
    for result in ranks:  # every rank knows the loss and the norm
        assert result.counts == expected.counts
        assert result.losses == pytest.approx(expected.losses, rel=1e-9)
        assert result.norms == pytest.approx(expected.norms, rel=1e-7)
        assert result.extra[0] == pytest.approx(expected.extra[0], rel=1e-6)


def gradients_of(ranks: list[Result]) -> dict[str, torch.Tensor]:
    """Gradients of all stages that train something."""
    return whole([result for result in ranks if result.gradients], "gradients")


# Layers: vision 0-3, text 4-7, vision-language 8-9, DiT 10-13.
CUTS = {
    "inside_the_vision_tower": ("2", "12"),
    "before_the_text": ("4", "10"),
    "after_one_text_layer": ("5", "9"),
    "before_the_head": ("8", "6"),
    "inside_the_vision_language_layers": ("9", "5"),
    "before_the_dit": ("10", "4"),
    "inside_the_dit": ("12", "2"),
    "no_layer_first": ("0", "14"),
}
DEFAULT_CUTS = ((False, "after_one_text_layer"), (False, "inside_the_dit"), (True, "inside_the_vision_tower"))


@pytest.mark.parametrize(
    ("tuned", "cut"),
    [pytest.param(t, cut, marks=() if (t, cut) in DEFAULT_CUTS else FULL) for t in (False, True) for cut in CUTS],
)
def test_two_stages(two: WorkerPool, alone: dict[bool, Result], tuned: bool, cut: str) -> None:
    """`tuned`: everything is trained, otherwise the backbone is frozen."""
    flags = ["--fp64", *PP2, *FOUR_PASSES, "--pipeline-layout", *CUTS[cut], *(ALL if tuned else ())]
    ranks = [outcome.value for outcome in two.run("take_steps", flags, 2)]
    assert_same(ranks, alone[tuned])
    assert_close(gradients_of(ranks), alone[tuned].gradients, 1e-9)


@pytest.mark.distributed_full
def test_a_frozen_stage_between_others(four: WorkerPool, alone: dict[bool, Result]) -> None:
    """Two stages without anything to train, whose neighbours still wait for a gradient."""
    flags = ["--fp64", "--pipeline-model-parallel-size", "4", *FOUR_PASSES, "--pipeline-layout", "3", "3", "6", "2"]
    ranks = [outcome.value for outcome in four.run("take_steps", flags, 2)]
    assert_same(ranks, alone[False])
    assert [bool(result.gradients) for result in ranks] == [False, False, True, True]
    assert_close(gradients_of(ranks), alone[False].gradients, 1e-9)


@pytest.mark.parametrize(
    "flags",
    [
        (*PP2, *TP2, "--sequence-parallel"),
        pytest.param((*PP2, *TP2), marks=FULL),
        pytest.param((*INTERLEAVED, *TP2, "--sequence-parallel", *ALL), marks=FULL),
        pytest.param((*PP2, "--use-distributed-optimizer", "--overlap-grad-reduce"), marks=FULL),
        pytest.param((*TP2, "--use-distributed-optimizer", "--max-prompt-length", "24", "--vocab-size", "512"), marks=FULL),
        pytest.param(("--data-parallel-strategy", "fsdp2"), marks=FULL),
        pytest.param(("--overlap-grad-reduce", "--use-distributed-optimizer", "--overlap-param-gather"), marks=FULL),
    ],
    ids=lambda flags: " ".join(flags).replace("model-parallel-size ", ""),
)
def test_four_processes(four: WorkerPool, alone: dict[bool, Result], flags: tuple[str, ...]) -> None:
    ranks = [outcome.value for outcome in four.run("take_steps", ["--fp64", *FOUR_PASSES, *flags], 2)]
    assert_same(ranks, alone["--tune-llm" in flags])


def test_several_draws_in_four_processes(four: WorkerPool) -> None:
    draws = ("--fp64", "--flow-draws", "3")
    expected = groot_parallel_cases.take_steps(0, [*draws, *ONE_PASS], 2)
    for layout in ((*PP2, *TP2, "--sequence-parallel"), ("--data-parallel-strategy", "fsdp2")):
        assert_same([outcome.value for outcome in four.run("take_steps", [*draws, *FOUR_PASSES, *layout], 2)], expected)


def test_stages_of_rounded_models_equal_one_process(two: WorkerPool) -> None:
    """bf16 backbone and autocast: what travels is not rounded again."""
    for flags in (["--bf16"], ["--autocast-bf16"]):
        precision = [*flags, "--frozen-dtype", "bf16", *FOUR_PASSES]
        expected = groot_parallel_cases.take_steps(0, precision, 1)
        for cut in ("after_one_text_layer", "inside_the_dit"):
            ranks = [o.value for o in two.run("take_steps", [*precision, *PP2, "--pipeline-layout", *CUTS[cut]], 1)]
            assert ranks[0].losses == expected.losses, (flags, cut)
