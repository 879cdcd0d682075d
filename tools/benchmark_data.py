"""Measure data supply on a generated video dataset: LeRobot's access pattern, random access, and decode once.

    python tools/benchmark_data.py --output benchmarks/data_supply.json

Every variant runs in a process of its own, without workers, on one thread: samples per second of CPU time are samples per
second and core, whatever else the machine does. `lerobot_pattern` is LeRobot's documented access pattern written down here (a
shuffled index; per sample one row, the rows of its action chunk, and one frame per camera by timestamp out of a cached decoder;
float pictures), not its package. It delivers raw pictures and columns; the other two deliver finished training samples of the
same picture size (normalized, tokenized, with noise).

torchcodec needs FFmpeg's shared libraries (libavcodec.so.62 and so on). Where the system has none, this tool lends it those
of PyAV's wheel: a folder of links with the plain names, and that folder and site-packages/av.libs in LD_LIBRARY_PATH. The
torchcodec must know PyAV's FFmpeg then (torchcodec 0.13 and av 18: FFmpeg 8); else it is reported as not run, with the reason.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CAMERAS = ("observation.images.base", "observation.images.wrist")
SIDE, FPS, HORIZON, MICRO_BATCH = 256, 30, 50, 8
VARIANTS = ("lerobot_pattern_pyav", "lerobot_pattern_torchcodec", "random", "decode_once")


def parse() -> argparse.Namespace:
    """Command line; `--variant` is the form in which this tool calls itself for one measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the result")
    parser.add_argument("--folder", type=Path, help="keep the datasets here and use those that are there (default: temporary)")
    parser.add_argument("--codecs", nargs="+", default=["h264", "av1"])
    parser.add_argument("--gops", nargs="+", type=int, default=[2, 30], help="key frame distances (LeRobot writes 2)")
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--frames", type=int, default=300)
    parser.add_argument("--samples", type=int, default=2000, help="samples per variant by random access; decode_once: all")
    parser.add_argument("--repeats", type=int, default=1, help="rounds over all variants; of each the median is kept")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--dataset", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def pictures(episode: int, camera: int, count: int) -> Iterator[np.ndarray]:
    """A textured scene that a camera pans over, with sensor noise: what an encoder finds hard and easy in robot videos."""
    from PIL import Image

    generator = np.random.default_rng([episode, camera])
    small = generator.integers(0, 256, (48, 48, 3), dtype=np.uint8)
    scene = np.asarray(Image.fromarray(small).resize((2 * SIDE, 2 * SIDE), Image.Resampling.BICUBIC)).astype(np.int16)
    noise = generator.normal(0, 2, (8, SIDE, SIDE, 3)).astype(np.int16)
    for k in range(count):
        top, left = (int(SIDE / 2 * (1 + np.sin(k / speed + episode)) * 0.99) for speed in (40, 57))
        yield np.clip(scene[top : top + SIDE, left : left + SIDE] + noise[k % 8], 0, 255).astype(np.uint8)


def make_dataset(root: Path, codec: Any, gop: int, episodes: int, frames: int) -> None:
    """Two cameras, 7 state and action dimensions, several episodes per file, as LeRobot v3.0 lays them out; a tokenizer."""
    from megatron_vla.data.lerobot_writer import LeRobotWriter

    features: dict[str, Any] = {key: {"dtype": "video", "shape": (SIDE, SIDE, 3)} for key in CAMERAS}
    features |= {key: {"dtype": "float32", "shape": (7,)} for key in ("observation.state", "action")}
    tasks = [f"move block {number} to the left" for number in range(10)]
    writer = LeRobotWriter(root, fps=FPS, features=features, video_codec=codec, gop=gop)
    for episode in range(episodes):
        path_TD = np.sin(0.03 * np.arange(frames + 1)[:, None] * np.arange(1, 8) + episode).astype(np.float32)
        images = {key: pictures(episode, camera, frames) for camera, key in enumerate(CAMERAS)}
        columns = {"observation.state": path_TD[:-1], "action": path_TD[1:]}
        writer.add_episode(columns, images, tasks[episode % 10])
    writer.finalize()
    words = ["--data-path", str(root), "--output", str(root.parent / "tokenizer.model"), "--vocab-size", "400"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(ROOT / "tools/train_tokenizer.py"), *words], check=True, env=environment)


class LeRobotPattern:
    """Samples as LeRobot's dataset class makes them: row, delta timestamps, frames by time from one cache of decoders."""

    def __init__(self, root: Path, decoder: str) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        from megatron_vla.data.metadata import read_metadata

        self.table, _ = read_metadata(root)
        files = [self.table.data.path(file) for file in range(self.table.data.num_files)]
        self.rows: Any = pa.concat_tables([pq.read_table(path) for path in files])
        self.first_row_E = np.concatenate([[0], np.cumsum(self.table.length_E)])
        self.decoder = decoder
        self.decoders: dict[Path, Any] = {}
        self.num_decodes = 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        row = self.rows.slice(index, 1).to_pylist()[0]
        episode = int(row["episode_index"])
        last = int(self.first_row_E[episode + 1]) - 1
        wanted = np.minimum(index + np.arange(HORIZON), last)
        chunk = self.rows.select(["action"]).take(wanted).column(0).to_pylist()
        sample: dict[str, Any] = {"observation.state": torch.tensor(row["observation.state"])}
        sample["action"] = torch.stack([torch.tensor(action) for action in chunk])
        for key in CAMERAS:
            video = self.table.videos[key]
            frame = int(video.first_frame_E[episode]) + int(row["frame_index"])
            pixels = torch.from_numpy(self._frame(video.files.path_of(episode), frame))
            sample[key] = pixels.permute(2, 0, 1).to(torch.float32) / 255
        return sample

    def _frame(self, path: Path, frame: int) -> np.ndarray:
        self.num_decodes += 1
        if path not in self.decoders:
            self.decoders[path] = self._open(path)
        decoder = self.decoders[path]
        if self.decoder == "pyav":
            pixels: np.ndarray = decoder.frames_at([frame])[0]
            return pixels
        found = decoder.get_frames_at([frame])
        assert abs(float(found.pts_seconds[0]) - frame / FPS) < 1e-4, "LeRobot's tolerance"
        return np.asarray(found.data[0].numpy())

    def _open(self, path: Path) -> Any:
        if self.decoder == "pyav":
            from megatron_vla.data.video_backends import open_decoder

            return open_decoder("pyav", path, FPS)
        from torchcodec.decoders import VideoDecoder

        return VideoDecoder(str(path), dimension_order="NHWC", seek_mode="approximate")


def measure(variant: str, root: Path, num_samples: int) -> dict[str, Any]:
    """Figures of one variant in this process."""
    import torch

    torch.set_num_threads(1)
    run = _lerobot(variant, root) if variant.startswith("lerobot") else _ours(variant, root)
    total = next(run)[0]  # imports and start-up checks are not what is measured
    idle_mib = _resident_mib()
    cpu, wall, done, early_mib = time.process_time(), time.perf_counter(), 0, None
    figures: dict[str, Any] = {}
    for taken, latest in run:
        done, figures = done + taken, latest
        # Memory fills until every slot was used once, which half an epoch sees to.
        if early_mib is None and done >= (num_samples if variant != "decode_once" else total) // 2:
            early_mib = _resident_mib()
        if variant != "decode_once" and done >= num_samples:
            break
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {
        "name": variant,
        "samples": done,
        "samples_per_cpu_second": round(done / cpu, 1),
        "samples_per_s_wall": round(done / wall, 1),
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "rss_before_mib": round(idle_mib),
        "rss_growth_second_half_mib": round(_resident_mib() - (early_mib or idle_mib), 1),
        **figures,
    }


def _resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _lerobot(variant: str, root: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """First (samples in the dataset, {}), then (samples of a batch, figures so far)."""
    from torch.utils.data import default_collate

    pattern = LeRobotPattern(root, variant.rsplit("_", 1)[1])
    total = int(pattern.first_row_E[-1])
    order = np.random.default_rng(0).permutation(total)
    yield total, {}
    for start in range(0, total, MICRO_BATCH):
        default_collate([pattern[int(index)] for index in order[start : start + MICRO_BATCH]])
        per_epoch = pattern.num_decodes / (start + MICRO_BATCH) * total
        yield MICRO_BATCH, {"decodes_per_episode_and_camera": round(per_epoch / len(CAMERAS) / pattern.table.num_episodes, 2)}


def _ours(variant: str, root: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """As `_lerobot`."""
    from megatron_vla.config.run import parse_args
    from megatron_vla.data.build import build_data
    from megatron_vla.models.registry import model_family

    words = [
        "--data-path",
        str(root),
        "--tokenizer-model",
        str(root.parent / "tokenizer.model"),
        "--image-size",
        str(SIDE),
        "--action-horizon",
    ]
    words += [str(HORIZON), "--micro-batch-size", str(MICRO_BATCH), "--num-workers", "0", "--data-access", variant]
    words += ["--camera-map", f"base={CAMERAS[0]}", f"left_wrist={CAMERAS[1]}", "--prefetch-shards", "0"]
    words += ["--video-backend", "pyav"]
    config = parse_args(["--model-variant", "tiny", *words])
    supply = build_data(config, model_family("pi05"))
    episodes = len(np.unique(supply.source.dataset.episode_of_N))  # type: ignore[attr-defined]
    steps = supply.num_samples // MICRO_BATCH
    visits = frames = samples = 0.0
    supply.take_times()
    yield supply.num_samples, {}
    for batch in supply.iterator(0, 0, 1, steps, False):
        times = supply.take_times()
        visits, frames, samples = visits + times.num_visits, frames + times.num_decoded_frames, samples + batch.size
        # A visit of a shard that is still open serves samples that are not out yet: the figure is exact at the end.
        per_epoch = visits / samples * supply.num_samples
        yield (
            batch.size,
            {
                "decodes_per_episode_and_camera": round(per_epoch / len(CAMERAS) / episodes, 2),
                "frames_asked_per_sample_and_camera": round(frames / samples / len(CAMERAS), 3),
            },
        )


def main() -> None:
    """Make the datasets, run every variant on each, write the JSON."""
    arguments = parse()
    if arguments.variant is not None:
        print(json.dumps(measure(arguments.variant, arguments.dataset, arguments.samples)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        results = []
        for codec in arguments.codecs:
            for gop in arguments.gops:
                root = folder / f"{codec}_gop{gop}" / "data"
                if not (root / "meta/info.json").is_file():
                    make_dataset(root, codec, gop, arguments.episodes, arguments.frames)
                results.append(_measured(root, codec, gop, arguments))
                print(json.dumps(results[-1]), flush=True)
                _write(arguments, results)


def _library_path(folder: Path) -> str:
    """LD_LIBRARY_PATH with which torchcodec finds FFmpeg: as it is, then PyAV's own libraries by their plain names."""
    import av

    bundled = Path(av.__file__).resolve().parents[1] / "av.libs"
    folder.mkdir(parents=True, exist_ok=True)
    for library in sorted(bundled.glob("lib*.so.*")):
        # libavcodec-5e6b81c2.so.62.28.102 -> libavcodec.so.62
        stem, _, number = library.name.partition(".so.")
        link = folder / f"{stem.rsplit('-', 1)[0]}.so.{number.split('.')[0]}"
        if link.name.startswith(("libav", "libsw")) and not link.is_symlink():
            link.symlink_to(library)
    return ":".join(filter(None, [os.environ.get("LD_LIBRARY_PATH"), str(folder), str(bundled)]))


def _run(variant: str, root: Path, samples: int) -> dict[str, Any]:
    """One variant in a process of its own."""
    command = [sys.executable, __file__, "--variant", variant, "--dataset", str(root), "--samples", str(samples)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if variant.endswith("torchcodec"):
        environment["LD_LIBRARY_PATH"] = _library_path(root.parents[1] / "ffmpeg")
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode == 0:
        figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return figures
    reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
    return {"name": variant, "not_run": reason[:200]}


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run with the median speed, and the speeds of all."""
    key = "samples_per_cpu_second"
    if len(runs) == 1 or any(key not in run for run in runs):
        return runs[0]
    ordered = sorted(runs, key=lambda run: run[key])
    return {**ordered[(len(ordered) - 1) // 2], "samples_per_cpu_second_of_all_rounds": [run[key] for run in runs]}


def _measured(root: Path, codec: str, gop: int, arguments: argparse.Namespace) -> dict[str, Any]:
    # Round by round, so that a busy neighbour meets every variant.
    rounds = [[_run(variant, root, arguments.samples) for variant in VARIANTS] for _ in range(arguments.repeats)]
    rungs = [_median(list(runs)) for runs in zip(*rounds, strict=True)]
    speeds = {rung["name"]: rung["samples_per_cpu_second"] for rung in rungs if "samples_per_cpu_second" in rung}
    base = [speed for name, speed in speeds.items() if name.startswith("lerobot")]
    ratio = round(speeds["decode_once"] / max(base), 2) if base and "decode_once" in speeds else None
    size = sum(path.stat().st_size for path in root.rglob("*.mp4"))
    return {
        "codec": codec,
        "gop": gop,
        "video_mib": round(size / 2**20, 1),
        "rungs": rungs,
        "decode_once_over_fastest_lerobot_pattern": ratio,
    }


def _write(arguments: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    if arguments.output is None:
        return
    content = {
        "gpu": None,
        "num_gpus": 0,
        "machine": f"{os.cpu_count()}-core CPU, {platform.machine()}, one thread per variant",
        "load_average_at_end": round(os.getloadavg()[0], 1),
        "date": datetime.date.today().isoformat(),
        "versions": {name: version(name) for name in ("torch", "av", "torchcodec")} | {"python": platform.python_version()},
        "command": "python tools/benchmark_data.py " + " ".join(sys.argv[1:]),
        "workload": {
            "episodes": arguments.episodes,
            "frames_per_episode": arguments.frames,
            "cameras": len(CAMERAS),
            "pixels": [SIDE, SIDE],
            "fps": FPS,
            "action_horizon": HORIZON,
            "micro_batch_size": MICRO_BATCH,
        },
        "datasets": results,
    }
    arguments.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
