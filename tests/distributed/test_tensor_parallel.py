"""Pi0.5 split over 2 and 4 processes gives the loss, the gradients and the actions of the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tensor_parallel_cases import Difference, Spec
from worker_pool import WorkerPool, pool_fixture

from megatron_vla.config.run import parse_args
from megatron_vla.models.pi05.build import build

LAYERS = ("vision_tower.layers.*", "layers.*")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.1}


two = pool_fixture(2, "tensor_parallel_cases")
four = pool_fixture(4, "tensor_parallel_cases")


def assert_equal(pool: WorkerPool, specs: list[Spec]) -> list[list[Difference]]:
    """All ranks' differences are within the dtype's tolerance; returned by rank."""
    outcomes = [outcome.value for outcome in pool.run("compare", specs)]
    for found in outcomes:
        for spec, difference in zip(specs, found, strict=True):
            tolerance = TOLERANCE[spec.dtype]
            worst = max(difference.gradients, key=lambda name: difference.gradients[name])
            assert difference.loss <= tolerance, spec
            assert difference.gradients[worst] <= tolerance, (spec, worst, difference.gradients[worst])
            assert difference.actions <= tolerance, spec
    return outcomes


def groups_of(number: int) -> dict[str, int]:
    return {"num_query_groups": number}


MATRIX = [
    Spec(sequence_parallel=False),
    Spec(),
    Spec(attention_backend="eager"),
    Spec(attention_backend="eager", sequence_parallel=False, skip_dead_compute=False),
    Spec(skip_dead_compute=False),
    Spec(checkpoint=LAYERS),
    Spec(checkpoint=LAYERS, sequence_parallel=False, changes=groups_of(2)),
    Spec(changes=groups_of(2)),
    Spec(changes=groups_of(8)),
    Spec(sequence_parallel=False, changes=groups_of(8)),
    Spec(changes={"image_size": 28, "vocab_size": 64, "max_prompt_length": 8, "action_horizon": 4}, num_samples=2),
    Spec(changes={"flow_draws": 3}),
    Spec(num_samples=1),
    Spec(dtype=torch.float32),
    Spec(dtype=torch.float32, sequence_parallel=False),
    Spec(dtype=torch.bfloat16),
]


def test_two_ranks_equal_one(two: WorkerPool) -> None:
    by_rank = assert_equal(two, MATRIX)
    for spec, difference in zip(MATRIX, by_rank[0], strict=True):
        has_partial = spec.sequence_parallel or spec.config.num_query_groups % 2
        assert bool(difference.partial) == bool(has_partial), spec
        # The comparison can fail: without the sum over ranks the marked gradients are far off.
        assert difference.unsummed > 0.01 or not has_partial, spec


def test_four_ranks_equal_one(four: WorkerPool) -> None:
    """Two key/value heads on four ranks: each is read by two ranks."""
    specs = [Spec(), Spec(sequence_parallel=False), Spec(changes=groups_of(2)), Spec(changes=groups_of(8), checkpoint=LAYERS)]
    assert_equal(four, specs)


def test_matrices_are_really_split(two: WorkerPool) -> None:
    spec = Spec()
    ranks = [found[0].shapes for found in (outcome.value for outcome in two.run("compare", [spec]))]
    config = spec.config
    queries = config.num_attention_heads * config.kv_channels
    for shapes in ranks:
        assert shapes["layers.0.prefix.attention.q_proj.weight"] == (queries // 2, config.hidden_size)
        assert shapes["layers.0.prefix.attention.k_proj.weight"] == (config.kv_channels, config.hidden_size)
        assert shapes["layers.0.suffix.mlp.down_proj.weight"] == (config.expert_hidden_size, config.expert_ffn_hidden_size // 2)
        assert shapes["vision_tower.layers.1.self_attn.out_proj.weight"] == (32, 16)
        assert shapes["vision_tower.layers.1.mlp.fc1.bias"] == (28,)
    assert [shapes["token_embedding.weight"][0] for shapes in ranks] == [34, 33]


@pytest.mark.parametrize("extra", [(), ("--sequence-parallel", "--bf16")], ids=["fp32", "bf16 sequence parallel"])
def test_first_values_and_loaded_weights_are_parts_of_the_whole(
    two: WorkerPool, tmp_path: Path, extra: tuple[str, ...]
) -> None:
    other_seed = build(parse_args(["--model-variant", "tiny", "--mock-data", "--vocab-size", "67", "--seed", "5"]))
    checkpoint = tmp_path / "model.safetensors"
    save_file({name: p.detach() for name, p in other_seed.named_parameters()}, checkpoint, metadata={"format": "pt"})
    flags = ["--tensor-model-parallel-size", "2", *extra]
    # Two vision layers and three joint ones. The rows-local parameters join the key/value projections with --sequence-parallel.
    sharded, key_value, row_local = 2 * 10 + 1 + 3 * 2 * 5, 3 * 2 * 2, 2 * 6 + 2 + 2 + 3 * 2 + 1
    for outcome in two.run("build_and_load", flags, checkpoint):
        assert outcome.value["sharded"] == sharded
        assert outcome.value["partial"] == key_value + (row_local if extra else 0)
        assert outcome.value["decay_only"] == 1
