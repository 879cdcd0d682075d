"""A checkpoint of any layout continues in any other: the same tensors, the same samples, the same curve.

Every case trains through the entry's own path. "Loaded and saved again" is a resume with nothing left to do and another --save:
what the second checkpoint holds has been through the other layout's memory.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import training_cases
from worker_pool import WorkerPool

from megatron_vla.models.pi05.convert import CONVERTER
from megatron_vla.training.checkpoint_folder import iteration_folder, open_folder
from megatron_vla.training.distributed_checkpoint import PartReader

HALF, WHOLE = 3, 6
FLAGS = (
    *("--global-batch-size", "8", "--micro-batch-size", "2", "--log-interval", "2"),
    *("--train-iters", str(WHOLE), "--lr-decay-iters", str(WHOLE), "--lr-warmup-iters", "1"),
)
# Frozen and decay-only parameters, replicated key/value heads and an uneven vocabulary are all in the tiny model.
TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2", "--prompt-padding", "max")
SP = ("--sequence-parallel",)
ZERO = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
PACKED = (
    *("--packing", "--pack-token-budget", "140", "--pack-pool-size", "8", "--mock-camera-counts", "1", "3"),
    *("--mock-min-prompt-length", "3", "--micro-batch-size", "10", "--global-batch-size", "20", "--mock-num-samples", "200"),
)
FSDP = ("--data-parallel-strategy", "fsdp2")

# name -> (ranks, flags)
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "alone": (1, ()),
    "tp2_sp": (2, (*TP2, *SP)),
    "pp2": (2, PP2),
    "dp2": (2, ()),
    "zero2": (2, ZERO),
    "fsdp2": (2, FSDP),
    "tp2_dp2_zero": (4, (*TP2, *SP, *ZERO)),
    "tp2_pp2": (4, (*TP2, *SP, *PP2)),
    "pp2_dp2_zero": (4, (*PP2, *ZERO)),
    "hsdp": (4, (*FSDP, "--fsdp-replicate-size", "2")),
    "tp2_fsdp2": (4, (*TP2, *FSDP)),
}
PACKED_LAYOUTS = {"packed_alone": (1, PACKED), "packed_zero2": (2, (*PACKED, *ZERO)), "packed_fsdp2": (2, (*PACKED, *FSDP))}
# Each layout is saved by one and loaded by another; with (tp 2, dp 1) <-> (1, 1), (1, 2), (pp 2) among them.
PAIRS = [
    ("alone", "alone"),
    ("tp2_sp", "tp2_sp"),
    ("tp2_sp", "alone"),
    ("tp2_sp", "dp2"),
    ("dp2", "tp2_sp"),
    ("tp2_sp", "pp2"),
    ("pp2", "zero2"),
    ("zero2", "fsdp2"),
    ("fsdp2", "tp2_sp"),
    ("alone", "tp2_dp2_zero"),
    ("tp2_dp2_zero", "zero2"),
]
# To and from one process, every layout with itself, and round the list: 121 pairs would tell no more.
_NAMES = list(LAYOUTS)
_STAR = [pair for name in _NAMES for pair in (("alone", name), (name, "alone"), (name, name))]
OTHER_PAIRS = [p for p in dict.fromkeys([*_STAR, *zip(_NAMES, _NAMES[1:] + _NAMES[:1], strict=True)]) if p not in PAIRS]


class Runs:
    """Starts a run on as many ranks as its layout has, and keeps first halves for all tests."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._pools: dict[int, WorkerPool] = {}
        self._done: dict[str, Any] = {}

    def train(self, layout: str, *flags: str) -> list[training_cases.Ids]:
        """Samples that each rank used; its output stays in `printed`."""
        world_size, own = {**LAYOUTS, **PACKED_LAYOUTS}[layout]
        words = [*FLAGS, *own, *flags]
        if world_size == 1:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                used = [training_cases.train(0, words)]
            self.printed = printed.getvalue()
            return used
        if world_size not in self._pools:
            self._pools[world_size] = WorkerPool(world_size)
        outcomes = self._pools[world_size].run("train", words)
        self.printed = outcomes[0].printed
        return [o.value for o in outcomes]

    def half(self, layout: str) -> tuple[Path, list[training_cases.Ids]]:
        """A checkpoint after half of the run, and the samples used."""
        key = f"half_{layout}"
        if key not in self._done:
            self._done[key] = self.train(layout, "--save", str(self.folder / key), "--exit-interval", str(HALF))
        return self.folder / key, self._done[key]

    def whole(self, layout: str) -> tuple[Path, list[training_cases.Ids]]:
        """The uninterrupted run."""
        key = f"whole_{layout}"
        if key not in self._done:
            self._done[key] = self.train(layout, "--save", str(self.folder / key))
        return self.folder / key, self._done[key]

    def close(self) -> None:
        """End the workers."""
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    started = Runs(tmp_path_factory.mktemp("layouts"))
    yield started
    started.close()


def tensors(root: Path, iteration: int) -> dict[str, torch.Tensor]:
    reader = PartReader(iteration_folder(root, iteration) / "tensors")
    return {name: reader.read(name) for name in reader.entries}


def losses(root: Path) -> list[float]:
    lines = (root / "logs" / "metrics.jsonl").read_text().splitlines()
    return [loss for line in lines for loss in json.loads(line)["losses"]]


def samples(layout: str, used: list[training_cases.Ids]) -> list[tuple[int, int]]:
    """Sample ids in the global order; ranks of one model replica must have used the same ones."""
    world_size, flags = {**LAYOUTS, **PACKED_LAYOUTS}[layout]
    tp, pp = 2 if "--tensor-model-parallel-size" in flags else 1, 2 if "--pipeline-model-parallel-size" in flags else 1
    dp = world_size // (tp * pp)
    # Ranks are numbered tensor first, then data, then pipeline.
    replicas = [[used[(p * dp + d) * tp + t] for p in range(pp) for t in range(tp)] for d in range(dp)]
    assert all(ids == replica[0] for replica in replicas for ids in replica)
    return [sample for micro in zip(*(r[0] for r in replicas), strict=True) for ids in micro for sample in ids]


def check(runs: Runs, tmp_path: Path, before: str, after: str) -> None:
    """Save under `before`; load under `after`: bit-equal tensors, same samples, the curve goes on."""
    saved, first = runs.half(before)
    runs.train(after, "--load", str(saved), "--save", str(tmp_path / "copied"), "--train-iters", str(HALF))
    expected, found = tensors(saved, HALF), tensors(tmp_path / "copied", HALF)
    assert expected.keys() == found.keys()
    different = [n for n in expected if expected[n].dtype != found[n].dtype or not torch.equal(expected[n], found[n])]
    assert not different, different
    for flag in {f for f in (*LAYOUTS[before][1], *LAYOUTS[after][1]) if f.startswith("--")}:
        if (flag in LAYOUTS[before][1]) != (flag in LAYOUTS[after][1]):
            assert f"resume with changed flag {flag}: " in runs.printed

    second = runs.train(after, "--load", str(saved), "--save", str(tmp_path / "on"))
    weights = sum(name.startswith("model.") for name in expected)
    assert f"loaded {weights}/{weights} tensors" in runs.printed and "max |difference| 0\n" in runs.printed
    reference, order = runs.whole("alone")
    assert samples(before, first) + samples(after, second) == samples("alone", order)
    ends = [open_folder(iteration_folder(root, WHOLE)).state for root in (reference, tmp_path / "on")]
    assert ends[0]["order_hash"] == ends[1]["order_hash"] and ends[0]["consumed_samples"] == ends[1]["consumed_samples"]
    curve = losses(saved) + losses(tmp_path / "on")
    assert len(curve) == WHOLE and curve == pytest.approx(losses(reference), rel=1e-6)
    if before == after:
        whole, _ = runs.whole(after)
        assert curve == losses(whole)
        one, two = tensors(tmp_path / "on", WHOLE), tensors(whole, WHOLE)
        assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


@pytest.mark.parametrize(
    ("before", "after"), [("packed_zero2", "packed_alone"), ("packed_alone", "packed_zero2"), ("packed_fsdp2", "packed_fsdp2")]
)
def test_packs_and_pools_continue_on_any_number_of_ranks(runs: Runs, tmp_path: Path, before: str, after: str) -> None:
    saved, first = runs.half(before)
    assert all(pool for _, _, pool in open_folder(iteration_folder(saved, HALF)).state["packing"]["streams"].values())
    second = runs.train(after, "--load", str(saved), "--save", str(tmp_path / "on"))
    reference, order = runs.whole("packed_alone")
    assert samples(before, first) + samples(after, second) == samples("packed_alone", order)
    ends = [open_folder(iteration_folder(root, WHOLE)).state for root in (reference, tmp_path / "on")]
    for name in ("packing", "consumed_samples", "empty_slots", "learning_rate_of_next_step"):
        assert ends[0][name] == ends[1][name]
    real = [sample for sample in samples("packed_alone", order) if sample[1] >= 0]
    assert ends[0]["consumed_samples"] == len(set(real)) == len(real) and ends[0]["empty_slots"] == WHOLE * 20 - len(real)
    assert losses(saved) + losses(tmp_path / "on") == pytest.approx(losses(reference), rel=1e-5)
    record = json.loads((reference / "logs" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0.5 < record["pack_useful_token_share"] <= 1 and record["pack_wait_max"] >= 1
    assert record["samples_per_pack"] == pytest.approx(len(real) / WHOLE / 2, rel=0.3)


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_save_here_load_there(runs: Runs, tmp_path: Path, before: str, after: str) -> None:
    check(runs, tmp_path, before, after)


@pytest.mark.distributed_full
@pytest.mark.parametrize(("before", "after"), OTHER_PAIRS)
def test_save_anywhere_load_anywhere(runs: Runs, tmp_path: Path, before: str, after: str) -> None:
    check(runs, tmp_path, before, after)


def test_every_rank_writes_a_fair_part(runs: Runs) -> None:
    """Replicated tensors are written once, and not all by rank 0."""
    for layout in ("dp2", "tp2_dp2_zero"):
        saved, _ = runs.half(layout)
        folder = iteration_folder(saved, HALF) / "tensors"
        sizes = [(folder / f"__{rank}_0.distcp").stat().st_size for rank in range(LAYOUTS[layout][0])]
        alone = iteration_folder(runs.half("alone")[0], HALF) / "tensors" / "__0_0.distcp"
        assert min(sizes) > 0.6 * max(sizes), sizes
        assert sum(sizes) < 1.4 * alone.stat().st_size, "something is stored twice"


def test_background_save_of_two_ranks(runs: Runs, tmp_path: Path) -> None:
    """Saving every step in the background gives the same run and complete checkpoints."""
    runs.train("zero2", "--async-save", "--save-interval", "1", "--save", str(tmp_path))
    whole, _ = runs.whole("zero2")
    assert losses(tmp_path) == losses(whole)
    one, two = tensors(tmp_path, WHOLE), tensors(whole, WHOLE)
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
    saved, _ = runs.half("zero2")
    middle, half = tensors(tmp_path, HALF), tensors(saved, HALF)
    assert middle.keys() == half.keys() and all(torch.equal(middle[n], half[n]) for n in middle)


def test_bf16_main_parameters_travel(runs: Runs, tmp_path: Path) -> None:
    """Sharded fp32 main parameters of a bf16 run come back whole in one process, and the other way round."""
    bf16 = ("--bf16", "--train-iters", str(HALF))
    runs.train("zero2", *bf16, "--save", str(tmp_path / "a"))
    runs.train("alone", *bf16, "--load", str(tmp_path / "a"), "--save", str(tmp_path / "b"))
    runs.train("fsdp2", *bf16, "--load", str(tmp_path / "b"), "--save", str(tmp_path / "c"))
    one, two, three = (tensors(tmp_path / name, HALF) for name in "abc")
    assert any(name.startswith("main.") for name in one)
    assert one.keys() == two.keys() == three.keys()
    assert all(torch.equal(one[n], two[n]) and torch.equal(one[n], three[n]) for n in one)


def test_released_file_does_not_depend_on_the_layout(runs: Runs, tmp_path: Path) -> None:
    """Converted in one process without a launcher: the very bytes that a single-process checkpoint gives."""
    saved, _ = runs.half("alone")
    runs.train("tp2_dp2_zero", "--load", str(saved), "--save", str(tmp_path / "copied"), "--train-iters", str(HALF))
    for root, name in ((saved, "one"), (tmp_path / "copied", "other")):
        for averaged in (False, True):
            output = tmp_path / f"{name}_{averaged}"
            CONVERTER.to_released(iteration_folder(root, HALF), "openpi", output, averaged=averaged, report=lambda line: None)
    for averaged in (False, True):
        one, other = ((tmp_path / f"{name}_{averaged}" / "model.safetensors").read_bytes() for name in ("one", "other"))
        assert one == other and len(one) > 10_000
