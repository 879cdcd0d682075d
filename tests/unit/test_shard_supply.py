"""--data-access decode_once on a tiny video dataset: same samples as random access, decoded once, whatever the workers do."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from make_fixture_dataset import CAMERAS, make_dataset
from preprocess_fixtures import write_tokenizer

from megatron_vla.config.check import check
from megatron_vla.config.run import parse_args
from megatron_vla.data.batch import Batch
from megatron_vla.data.build import build_data
from megatron_vla.data.frame_source import FrameSource
from megatron_vla.data.lerobot_writer import LeRobotWriter
from megatron_vla.data.loader import SampleError
from megatron_vla.data.prefetch import ShardStream
from megatron_vla.data.shard_cache import SampleLayout
from megatron_vla.data.shard_order import ShardOrder
from megatron_vla.data.supply import DataSupply
from megatron_vla.data.watch import DataStallError, DataWorkerError
from megatron_vla.findings import CheckError
from megatron_vla.models.registry import model_family
from megatron_vla.training.logging import data_wait_hint

FAMILY = model_family("pi05")
LENGTHS = (23, 18, 40, 17, 9, 31)
TOTAL = sum(LENGTHS)
FRAME_BYTES = 2 * 48 * 64 * 3
SHARDS = ("--data-access", "decode_once", "--shard-bytes", str(30 * FRAME_BYTES), "--decode-lanes", "2")
AHEAD = ("--num-workers", "2", "--prefetch-shards", "8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    make_dataset(folder / "data", lengths=LENGTHS)
    write_tokenizer(folder)
    return folder


def supply_of(folder: Path, *flags: str) -> DataSupply:
    words = ["--model-variant", "tiny", "--image-size", "28", "--data-path", str(folder / "data")]
    words += ["--tokenizer-model", str(folder / "tokenizer.model")]
    words += ["--camera-map", f"base={CAMERAS[0]}", f"left_wrist={CAMERAS[1]}", "--action-horizon", "4"]
    words += ["--max-prompt-length", "120", "--num-workers", "0", "--micro-batch-size", "4", "--prompt-padding", "max"]
    return build_data(parse_args([*words, *SHARDS, *flags]), FAMILY)


def batches_of(supply: DataSupply, count: int, consumed: int = 0, rank: int = 0, ranks: int = 1) -> list[Batch]:
    batches = list(supply.iterator(consumed, rank, ranks, count, False))
    supply.close()
    return batches


def assert_equal(first: list[Batch], second: list[Batch]) -> None:
    assert len(first) == len(second)
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        for name, tensor in one.tensors().items():
            assert torch.equal(tensor, other.tensors()[name]), (number, name)


def keys_of(batches: list[Batch]) -> list[tuple[int, int]]:
    return [key for batch in batches for key in zip(batch.epoch_B.tolist(), batch.sample_index_B.tolist(), strict=True)]


def delay_decoding(monkeypatch: pytest.MonkeyPatch, wait: Callable[[int], None]) -> None:
    """Call `wait(episode row)` before frames are decoded, in this process and in workers forked later."""
    frames = FrameSource.frames

    def slow(self: FrameSource, camera: str, episode: int, *arguments: Any) -> np.ndarray:
        wait(episode)
        return frames(self, camera, episode, *arguments)

    monkeypatch.setattr(FrameSource, "frames", slow)


@pytest.fixture(autouse=True)
def leaves_no_worker() -> Iterator[None]:
    """Every worker that a test starts is gone when it ends (processes of other test modules may still be there)."""
    others = set(multiprocessing.active_children())
    yield
    assert not set(multiprocessing.active_children()) - others


def test_shards_ahead_or_none_and_random_access_give_bit_equal_batches(folder: Path) -> None:
    count = 2 * TOTAL // 4
    supply = supply_of(folder, "--prefetch-shards", "0")
    assert isinstance(supply.order, ShardOrder) and supply.order.table.num_shards >= 4
    inline = batches_of(supply, count)
    assert_equal(inline, batches_of(supply_of(folder, *AHEAD), count))
    # The same keys by random access: decoding in one pass gives the very same pictures.
    samples = supply._samples
    for batch in inline[:20]:
        for place, (epoch, index) in enumerate(keys_of([batch])):
            arrays = samples[epoch, index][0]
            assert np.array_equal(arrays["images_BVCHW"], batch.images_BVCHW[place].numpy())
            assert np.array_equal(arrays["actions_BTA"], batch.actions_BTA[place].numpy())
            assert np.array_equal(arrays["noise_BTA"], batch.noise_BTA[place].numpy())
    assert sorted(keys_of(inline)[:TOTAL]) == [(0, index) for index in range(TOTAL)]
    assert_equal([supply.first_batch()], inline[:1])


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures that have the model's size already, with values that no picture shares with another."""
    folder = tmp_path_factory.mktemp("square")
    features: dict[str, Any] = {key: {"dtype": "video", "shape": (56, 56, 3)} for key in CAMERAS}
    features |= {key: {"dtype": "float32", "shape": (7,)} for key in ("observation.state", "action")}
    writer = LeRobotWriter(folder / "data", fps=30, features=features, video_codec="h264", gop=2)
    for episode, length in enumerate(LENGTHS):
        walk_TD = np.cumsum(np.random.default_rng(episode).normal(size=(length, 7)), axis=0).astype(np.float32)
        columns = {"observation.state": walk_TD, "action": walk_TD + np.float32(0.1)}
        noise = [np.random.default_rng([episode, camera]).integers(0, 256, (length, 56, 56, 3), np.uint8) for camera in (0, 1)]
        writer.add_episode(columns, dict(zip(CAMERAS, noise, strict=True)), f"task {episode}")
    writer.finalize()
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize("ahead", [("--prefetch-shards", "0"), AHEAD], ids=["here", "ahead"])
def test_pictures_decoded_to_their_place_are_the_interleaved_ones(square: Path, ahead: tuple[str, ...]) -> None:
    supply = supply_of(square, "--image-size", "56", *ahead)
    dataset = supply.source.dataset  # type: ignore[attr-defined]
    batches = batches_of(supply, TOTAL // 4)
    assert len({index for _, index in keys_of(batches)}) == TOTAL - TOTAL % 4
    for batch in batches:
        for place, (_, index) in enumerate(keys_of([batch])):
            raw = dataset[index]
            for view, camera in enumerate(CAMERAS):
                expected_CHW = raw.images[camera].transpose(2, 0, 1)
                assert np.array_equal(batch.images_BVCHW[place, view].numpy(), expected_CHW), (index, camera)


def test_N04_a_bad_value_names_its_sample_among_those_decoded_with_it(folder: Path) -> None:
    supply = supply_of(folder, "--prefetch-shards", "0")
    supply.source.dataset.actions_ND[LENGTHS[0] + 9] = np.nan  # type: ignore[attr-defined]
    # Chunks have 4 steps: frame 6 is the first that reads frame 9.
    first = LENGTHS[0] + 6
    with pytest.raises(SampleError, match=rf"^sample {first} \(episode 1, frame 6, .*ValueError: action has NaN or Inf"):
        list(supply.source.in_storage_order(np.arange(TOTAL), 0, {}))  # type: ignore[attr-defined]
    supply.close()


def test_each_episode_and_camera_is_decoded_once_per_visit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[tuple[str, int, int]] = Counter()
    passes: list[tuple[str, int, int]] = []
    frames = FrameSource.frames

    def counted(self: FrameSource, camera: str, episode: int, frame_indices: Any, *more: Any) -> np.ndarray:
        assert list(frame_indices) == sorted(frame_indices)
        asked.update((camera, episode, int(frame)) for frame in frame_indices)
        passes.append((camera, episode, int(frame_indices[0])))
        return frames(self, camera, episode, frame_indices, *more)

    supply = supply_of(folder, "--prefetch-shards", "0")
    stream = supply.iterator(0, 0, 1, TOTAL // 4 + 1, False)  # the iterator's first step looks at one sample
    monkeypatch.setattr(FrameSource, "frames", counted)
    next(stream)
    supply._watch.metrics()
    asked.clear(), passes.clear()
    supply.close()
    seen = batches_of(supply, TOTAL // 4)  # the first epoch but for two samples
    assert len(seen) * 4 == TOTAL - TOTAL % 4
    probe = {(camera, 0, 0) for camera in CAMERAS}  # the layout's sample
    assert {key for key, times in asked.items() if times > 1} <= probe
    episodes_in_pieces = 0
    order = supply.order
    assert isinstance(order, ShardOrder)
    episode_of_N = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    for piece in range(len(order.plan(0).cut_Q) - 1):
        episodes_in_pieces += len(np.unique(episode_of_N[order.piece_samples(0, piece)]))
    times = supply._watch.metrics()
    assert times["data_decoded_frames_per_sample"] == pytest.approx(2.0, abs=0.05)
    # One pass per camera, episode and piece (plus the layout's sample).
    chunks = Counter((camera, episode) for camera, episode, _ in passes)
    assert sum(chunks.values()) <= 2 * (episodes_in_pieces + 1 + sum(length // 32 for length in LENGTHS))


@pytest.mark.parametrize(("ranks", "micro", "lanes"), [(2, 4, 2), (2, 2, 4), (4, 1, 2)])
def test_S01_ranks_get_disjoint_samples_and_together_the_same(folder: Path, ranks: int, micro: int, lanes: int) -> None:
    flags = ("--decode-lanes", str(lanes), "--global-batch-size", "8")
    whole = batches_of(supply_of(folder, *flags, "--micro-batch-size", "8"), 12)
    split = [
        keys_of(batches_of(supply_of(folder, *flags, "--micro-batch-size", str(micro), *AHEAD), 12, rank=rank, ranks=ranks))
        for rank in range(ranks)
    ]
    union = [key for part in split for key in part]
    assert len(set(union)) == len(union) and sorted(union) == sorted(keys_of(whole))


@pytest.mark.parametrize("consumed", [4, 60, TOTAL - 6])
def test_resume_is_exact_anywhere_and_with_another_world_size(folder: Path, consumed: int) -> None:
    flags = ("--micro-batch-size", "2", "--global-batch-size", "4")
    straight = batches_of(supply_of(folder, *flags), consumed // 4 + 12)
    position = consumed // 4 * 4
    resumed = batches_of(supply_of(folder, *flags, *AHEAD), 6, consumed=position)
    assert_equal(resumed, straight[position // 2 : position // 2 + 12])
    ranks = [keys_of(batches_of(supply_of(folder, *flags), 6, consumed=position, rank=r, ranks=2)) for r in range(2)]
    assert sorted(ranks[0] + ranks[1]) == sorted(keys_of(resumed))


def test_random_sleeps_in_workers_change_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline = batches_of(supply_of(folder, "--prefetch-shards", "0"), 40)
    delay_decoding(monkeypatch, lambda episode: time.sleep(random.Random(os.getpid() + episode).random() * 0.02))
    for ahead in ("1", "5"):
        slow = batches_of(supply_of(folder, "--num-workers", "3", "--prefetch-shards", ahead), 40)
        assert_equal(inline, slow)


def test_a_killed_worker_is_named_and_nothing_hangs(folder: Path) -> None:
    supply = supply_of(folder, *AHEAD)
    batches = supply.iterator(0, 0, 1, 500, False)
    next(batches)
    victim = next(p for p in multiprocessing.active_children() if p.name == "data-worker-1")
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(
        DataWorkerError, match=r"rank 0: data worker 1 \(pid \d+\) was killed by signal SIGKILL; worker 1: .*-> "
    ):
        for _ in batches:
            pass
    supply.close()


@pytest.mark.parametrize("access", ["decode_once", "random"])
def test_a_stopped_worker_is_named_and_does_not_outlive_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, access: str
) -> None:
    said: list[str] = []

    def end(message: str) -> None:
        said.append(message)
        os.kill(victim, signal.SIGKILL)  # a run ends here; this one goes on, with the pipe closed

    # When it stops in the middle of handing over a batch, only the watching thread can end the run.
    monkeypatch.setattr("megatron_vla.data.supply.end_all_ranks", end)
    supply = supply_of(folder, *AHEAD, "--data-access", access, "--data-stall-timeout-seconds", "6")
    batches = supply.iterator(0, 0, 1, 500, False)
    next(batches)
    victim = supply._watch.worker_pids[1]
    os.kill(victim, signal.SIGSTOP)  # like a worker whose disk is gone, it does not hear SIGTERM
    with pytest.raises((DataStallError, DataWorkerError)) as problem:
        for _ in batches:
            pass
    assert f"worker 1 (pid {victim}) is stopped by a signal" in (said[0] if said else str(problem.value))
    supply.close()
    assert victim not in {process.pid for process in multiprocessing.active_children()}
    with pytest.raises(ProcessLookupError):
        os.kill(victim, 0)


@pytest.mark.parametrize("access", ["decode_once", "random"])
def test_a_disk_that_hangs_is_named_before_anything_times_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, access: str
) -> None:
    flags = ("--data-access", access, "--num-workers", "1", "--data-stall-timeout-seconds", "6")
    supply = supply_of(folder, *flags)
    parent = os.getpid()
    delay_decoding(monkeypatch, lambda episode: time.sleep(60 if episode == 2 and os.getpid() != parent else 0))
    started = time.monotonic()
    with pytest.raises(
        DataStallError, match=r"rank 0: no batch for 6 s .*worker \d: decode of sample \d+ \(episode 2, .*\.mp4"
    ):
        list(supply.iterator(0, 0, 1, 60, False))
    supply.close()
    assert time.monotonic() - started < 50


def test_loading_in_the_training_process_is_watched_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("megatron_vla.data.supply.end_all_ranks", said.append)
    supply = supply_of(folder, "--data-access", "random", "--data-stall-timeout-seconds", "1.5")
    delay_decoding(monkeypatch, lambda episode: time.sleep(4 if not said else 0))
    next(supply.iterator(0, 0, 1, 1, False))
    assert len(said) == 1 and "training process: decode of sample" in said[0] and ".mp4" in said[0]


def test_a_broken_file_is_named_by_the_worker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supply = supply_of(folder, *AHEAD)

    def fail(episode: int) -> None:
        if episode == 3:
            raise OSError("camera file is cut off")

    delay_decoding(monkeypatch, fail)
    with pytest.raises(SampleError, match=r"sample \d+ \(episode 3, frame \d+, .*mp4.*\): OSError: camera file is cut off"):
        list(supply.iterator(0, 0, 1, 500, False))
    supply.close()


def test_early_close_stops_workers_and_thread(folder: Path) -> None:
    supply = supply_of(folder, *AHEAD)
    batches = supply.iterator(0, 0, 1, 500, False)
    list(itertools.islice(batches, 3))
    started = time.monotonic()
    supply.close()
    assert time.monotonic() - started < 5


def test_V01_open_decoders_stay_bounded(folder: Path) -> None:
    plain = batches_of(supply_of(folder, "--prefetch-shards", "0"), TOTAL // 4)
    supply = supply_of(folder, "--prefetch-shards", "0", "--video-decoder-cache-size", "1")
    assert_equal(plain, batches_of(supply, TOTAL // 4))
    assert len(supply.source.dataset.frames._decoders) == 1  # type: ignore[attr-defined]


def test_V02_decoders_opened_here_are_not_used_by_workers(folder: Path) -> None:
    supply = supply_of(folder, "--prefetch-shards", "0")
    inline = batches_of(supply, 30)  # opens every file in this process
    ahead = supply_of(folder, *AHEAD)
    for index in range(0, TOTAL, 7):
        ahead._samples[0, index]
    assert_equal(inline, batches_of(ahead, 30))


def test_V09_memory_is_bounded_by_slots_and_predicted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    supply = supply_of(folder, "--prefetch-shards", "3")
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("decode once:"))
    assert "(2 open + 3 ahead)" in line and "--shard-bytes" in line and "micro-batches" not in line
    ahead = supply_of(folder, *AHEAD, "--prefetch-factor", "6", "--micro-batch-size", "64").prefetch_line()
    size = sum(value.nbytes for value in batches_of(supply, 1)[0].tensors().values()) * 64 / 4
    assert float(ahead.split("6 micro-batches that are ready: ")[1].split(" MiB")[0]) == pytest.approx(
        6 * size / 2**20, abs=0.1
    )
    with pytest.raises(CheckError, match=r"--shard-cache-bytes.*100000 are allowed.*use --shard-cache-bytes \d+ or more"):
        supply_of(folder, "--shard-cache-bytes", "100000")
    assert isinstance(supply.order, ShardOrder)


def test_every_worker_decodes_a_shard_within_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker builds one shard at a time: with fewer shards ahead than workers, the others would idle unseen."""
    streams: list[ShardStream] = []

    class Seen(ShardStream):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            streams.append(self)

    monkeypatch.setattr("megatron_vla.data.supply.ShardStream", Seen)
    inline = batches_of(supply_of(folder), 12)
    assert_equal(batches_of(supply_of(folder, "--num-workers", "5"), 12), inline)
    assert [stream.num_workers for stream in streams] == [0, 5]

    def ahead(*flags: str) -> int:
        return int(supply_of(folder, *flags).prefetch_line().split("open + ")[1].split(" ahead")[0])

    assert [ahead(), ahead("--num-workers", "1"), ahead("--num-workers", "5")] == [0, 2, 5]
    layout = SampleLayout.of(supply_of(folder)._samples[0, 0][0])
    slot = layout.slot_bytes(cast(ShardOrder, supply_of(folder).order).largest_piece)
    assert ahead("--num-workers", "5", "--shard-cache-bytes", str(5 * slot)) == 3, "two lanes are open, three fit beside them"
    with pytest.raises(CheckError, match="--shard-cache-bytes"):
        supply_of(folder, "--num-workers", "5", "--shard-cache-bytes", str(2 * slot))


def test_V09_resident_memory_is_flat_over_2000_batches(folder: Path) -> None:
    def resident() -> float:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    supply = supply_of(folder, "--micro-batch-size", "1", "--num-workers", "2")
    batches = supply.iterator(0, 0, 1, 2000, False)
    list(itertools.islice(batches, 300))
    before, workers_before = resident(), supply.metrics()["data_worker_memory_gib"]
    assert sum(1 for _ in itertools.islice(batches, 1690)) == 1690
    after, workers_after = resident(), supply.metrics()["data_worker_memory_gib"]
    supply.close()
    assert after - before < 30 and workers_before > 0
    assert (workers_after - workers_before) * 1024 < 60


def test_complete_chunks_only(folder: Path) -> None:
    supply = supply_of(folder, "--action-horizon-policy", "complete", "--no-shuffle")
    assert supply.num_samples == TOTAL - 3 * len(LENGTHS) and supply.expected_padded_fraction == 0.0
    batches = batches_of(supply, supply.num_samples // 4)
    assert all(bool(batch.action_is_valid_BTA[..., :7].all()) for batch in batches)
    ends = set(np.cumsum(LENGTHS) - 1)
    assert not ends & {index for _, index in keys_of(batches)}
    first_row = np.cumsum((0, *LENGTHS))[:-1]
    wanted = [int(f) + k for f, n in zip(first_row, LENGTHS, strict=True) for k in range(n - 3)]
    assert [index for _, index in keys_of(batches)] == wanted[: len(batches) * 4]


@pytest.mark.parametrize("kind", ["openpi_torch", "openpi_jax"])
def test_augmentation_is_the_same_in_workers_here_and_on_the_device(folder: Path, kind: str) -> None:
    flags = ("--augmentation", kind)
    here = batches_of(supply_of(folder, *flags, "--prefetch-shards", "0"), 12)
    assert_equal(here, batches_of(supply_of(folder, *flags, *AHEAD), 12))
    on_device = batches_of(supply_of(folder, *flags, "--augmentation-device", "gpu", *AHEAD), 12)
    plain = batches_of(supply_of(folder), 12)
    for one, other, before in zip(here, on_device, plain, strict=True):
        torch.testing.assert_close(one.images_BVCHW, other.images_BVCHW, rtol=0, atol=1e-5)
        assert float((one.images_BVCHW - (before.images_BVCHW / 255 * 2 - 1)).abs().max()) > 0.05
        assert torch.equal(one.actions_BTA, before.actions_BTA)
    by_chance = supply_of(folder, *flags, "--data-access", "random", "--num-workers", "1", "--micro-batch-size", "2")
    batch = next(by_chance.iterator(0, 0, 1, 1, False))
    again = by_chance._samples[keys_of([batch])[1]][0]
    assert np.array_equal(batch.images_BVCHW[1].numpy(), again["images_BVCHW"])
    by_chance.close()


def test_P01_stall_timeout_must_be_below_the_collective_timeout() -> None:
    words = ("--model-variant", "tiny", "--mock-data", "--train-iters", "5", "--micro-batch-size", "1")
    long = parse_args([*words, "--data-stall-timeout-seconds", "700"])
    text = "\n".join(str(finding) for finding in check(long, FAMILY, 1))
    assert "700 is not below the 600 s" in text and "use --data-stall-timeout-seconds 300 or less" in text
    short = "\n".join(str(finding) for finding in check(parse_args(words), FAMILY, 1))
    assert "--data-stall-timeout-seconds" not in short


def test_V08_a_slow_decoder_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supply = supply_of(folder, "--prefetch-shards", "0", "--micro-batch-size", "2")
    frames = FrameSource._video_frames

    def slow(self: FrameSource, *arguments: Any) -> np.ndarray:
        time.sleep(0.05)
        return frames(self, *arguments)

    monkeypatch.setattr(FrameSource, "_video_frames", slow)
    list(supply.iterator(0, 0, 1, 8, False))
    times = supply.metrics()
    assert max(("read", "decode", "transform", "copy"), key=lambda stage: times[f"data_{stage}_ms"]) == "decode"
    record = {"data_wait_share": 0.5, "data_wait_rank": 0, **times}
    hint = data_wait_hint(record, supply.config)
    assert hint is not None and "mostly decode" in hint and "raise --prefetch-shards (now 0)" in hint
