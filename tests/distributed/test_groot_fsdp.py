"""GR00T N1.7 under fsdp2: a frozen backbone in another dtype, and tables that every sample reads, are gathered in time."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import groot_parallel_cases
import pytest
import torch
from groot_parallel_cases import TRAIN_FLAGS
from pipeline_cases import Result
from test_pipeline_parallel import assert_close
from worker_pool import WorkerPool, pool_fixture

from megatron_vla.training.checkpoint_folder import iteration_folder
from megatron_vla.training.distributed_checkpoint import PartReader

FSDP = ("--data-parallel-strategy", "fsdp2")
HSDP = (*FSDP, "--fsdp-replicate-size", "2")
ALL = ("--tune-llm", "--tune-visual")
ROUNDED = ("--frozen-dtype", "bf16")
FULL = pytest.mark.distributed_full


two = pool_fixture(2, "groot_parallel_cases")
four = pool_fixture(4, "groot_parallel_cases")


def assert_equal(pool: WorkerPool, flags: tuple[str, ...], own: tuple[str, ...], limits: tuple[float, float, float]) -> Result:
    """One process with `flags` against all ranks with `own` beside them; limits: of loss, norm and gradients, relative."""
    alone = groot_parallel_cases.take_steps(0, [*flags, "--micro-batch-size", "1"], 2)
    for rank in (o.value for o in pool.run("take_steps", [*flags, "--micro-batch-size", "1", *own], 2)):
        assert rank.counts == alone.counts
        assert rank.losses == pytest.approx(alone.losses, rel=limits[0])
        assert rank.norms == pytest.approx(alone.norms, rel=limits[1])
        assert_close(rank.gradients, alone.gradients, limits[2])
        assert {n: p.dtype for n, p in rank.parameters.items()} == {n: p.dtype for n, p in alone.parameters.items()}
    return alone


@pytest.mark.parametrize("tuned", [(), pytest.param(ALL, marks=FULL)], ids=["frozen", "all"])
def test_fp64_equals_one_process(two: WorkerPool, tuned: tuple[str, ...]) -> None:
    """Two micro-batches per rank."""
    alone = assert_equal(two, ("--fp64", *tuned), FSDP, (1e-12, 1e-12, 1e-9))
    assert ("vision_tower.position_embedding.weight" in alone.gradients) == bool(tuned)


@pytest.mark.parametrize(
    ("flags", "limits"),
    [
        (ROUNDED, (1e-6, 1e-6, 1e-5)),
        pytest.param((*ROUNDED, "--autocast-bf16"), (1e-6, 1e-6, 1e-5), marks=FULL),
        # fsdp2 rounds each bf16 gradient once more.
        ((*ROUNDED, "--bf16"), (1e-4, 1e-3, 1e-2)),
        pytest.param((*ROUNDED, "--tune-top-llm-layers", "2"), (1e-6, 1e-6, 1e-5), marks=FULL),
        pytest.param((*ROUNDED, "--bf16", "--tune-visual"), (1e-4, 1e-3, 1e-2), marks=FULL),
    ],
    ids=lambda value: " ".join(value) if isinstance(value[0], str) else None,
)
def test_a_bf16_backbone_equals_the_unsharded_one(
    two: WorkerPool, flags: tuple[str, ...], limits: tuple[float, float, float]
) -> None:
    alone = assert_equal(two, flags, FSDP, limits)
    assert alone.parameters["text_layers.0.attention.q_proj.weight"].dtype == torch.bfloat16


def test_switches_on_sharded_layers(two: WorkerPool) -> None:
    """Merged projections stay inside a block, whose weights exist during its forward alone; recomputation gathers again."""
    switches = ("--merge-projections", "--activation-checkpoint-module-patterns", "dit_layers.*")
    assert_equal(two, ("--fp64",), (*FSDP, *switches), (1e-12, 1e-12, 1e-9))


@FULL
@pytest.mark.parametrize(
    "own",
    [FSDP, ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2", "--pipeline-layout", "8", "4")],
    ids=" ".join,
)
def test_without_vision_language_layers(two: WorkerPool, own: tuple[str, ...]) -> None:
    """As other releases are."""
    flags = ("--fp64", "--vl-num-layers", "0", "--micro-batch-size", "1")
    alone = groot_parallel_cases.take_steps(0, list(flags), 2)
    for rank in (o.value for o in two.run("take_steps", [*flags, *own], 2)):
        assert rank.losses == pytest.approx(alone.losses, rel=1e-12)
        assert rank.norms == pytest.approx(alone.norms, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["per_layer", "multi_group"])
def test_compiled_layers_of_a_bf16_backbone(two: WorkerPool, scope: str) -> None:
    """Frozen norms in fp32 are gathered with their layer, outside of its graph."""
    flags = [*TRAIN_FLAGS, *ROUNDED, "--micro-batch-size", "2", *FSDP]
    plain, compiled = (
        two.run("train_compiled", [*flags, *extra], 2)[0].value for extra in ((), ("--compile", "--compile-scope", scope))
    )
    assert compiled.num_graphs > 0 == plain.num_graphs
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-6)


@FULL
@pytest.mark.parametrize("flags", [("--fp64",), ROUNDED], ids=" ".join)
def test_replicated_shards_equal_one_process(four: WorkerPool, flags: tuple[str, ...]) -> None:
    assert_equal(four, flags, HSDP, (1e-6, 1e-6, 1e-9 if "--fp64" in flags else 1e-5))


def tensors(root: Path) -> dict[str, torch.Tensor]:
    reader = PartReader(iteration_folder(root, 2) / "tensors")
    return {name: reader.read(name) for name in reader.entries}


def test_checkpoints_travel_between_strategies(two: WorkerPool, tmp_path: Path) -> None:
    """Trained under fsdp2, loaded and saved by each of the others in turn, and by fsdp2 again: the same bytes."""

    def run(name: str, *flags: str) -> None:
        words = [*TRAIN_FLAGS, *ROUNDED, "--micro-batch-size", "1", "--train-iters", "2", "--lr-warmup-iters", "1"]
        words += ["--lr-decay-iters", "2", "--save", str(tmp_path / name), *flags]
        if name == "alone":
            with contextlib.redirect_stdout(io.StringIO()):
                groot_parallel_cases.train(0, words)
        else:
            two.run("train", words)

    tp2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
    run("sharded", *FSDP)
    source = "sharded"
    for name, flags in (("alone", ()), ("tp2", tp2), ("zero", ("--use-distributed-optimizer",)), ("last", FSDP)):
        run(name, *flags, "--load", str(tmp_path / source))
        source = name
    expected = tensors(tmp_path / "sharded")
    assert expected["model.text_layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    for name in ("alone", "tp2", "zero", "last"):
        found = tensors(tmp_path / name)
        assert found.keys() == expected.keys()
        different = [n for n in expected if found[n].dtype != expected[n].dtype or not torch.equal(found[n], expected[n])]
        assert different == [], name
