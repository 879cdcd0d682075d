"""Make a small deterministic robot dataset, healthy or with one named defect, to see what the checks and the loader do with it.

    python tools/make_fixture_dataset.py --output /tmp/fixture --codebase-version v3.0 --defect merged_offsets

Every frame shows its own (camera, episode, frame) as black and white blocks with a checksum, and action[0] = episode + frame
/ 1000, so that a test reads the pairing of pictures and rows from what it loaded. Shape legend: T frames, H height, W width,
C colours, D dimensions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megatron_vla.config.cli import StrictParser, add_section, build_section
from megatron_vla.data.lerobot_writer import LeRobotWriter
from megatron_vla.data.metadata import read_metadata
from megatron_vla.data.video_encoder import VideoEncoder

LENGTHS = (23, 18, 40, 17)
FPS = 10
CAMERAS = ("observation.images.base", "observation.images.wrist")
INSTRUCTIONS = ("Open a drawer", "Pick up the puck")
STATE_NAMES = ["x", "y", "z", "roll", "pitch", "yaw", "gripper"]
HEIGHT, WIDTH, BLOCK = 48, 64, 8
CODE_BITS = 32  # 4 camera, 12 episode, 16 frame; 16 more hold a checksum
WALL_CLOCK = 1.7e9


def code_frame(camera: int, episode: int, frame: int) -> np.ndarray:
    """uint8 [H, W, C] picture that says which frame it is."""
    code = (camera << 28) | (episode << 16) | frame
    bits = [(code >> i) & 1 for i in range(CODE_BITS)] + [(_checksum(code) >> i) & 1 for i in range(16)]
    blocks = np.array(bits, dtype=bool).reshape(HEIGHT // BLOCK, WIDTH // BLOCK)
    pixels = blocks.repeat(BLOCK, axis=0).repeat(BLOCK, axis=1)[..., None]
    return np.where(pixels, np.array([235, 235, 225]), np.array([20, 20, 45])).astype(np.uint8)


def read_code(image_HWC: np.ndarray) -> tuple[int, int, int]:
    """(camera, episode, frame) of a picture made by `code_frame`. Raises ValueError if it is none, or too damaged."""
    means = image_HWC.reshape(HEIGHT // BLOCK, BLOCK, WIDTH // BLOCK, BLOCK, 3).mean(axis=(1, 3, 4)).ravel()
    bits = (means > 128).astype(np.int64)
    code = int((bits[:CODE_BITS] << np.arange(CODE_BITS)).sum())
    if int((bits[CODE_BITS:] << np.arange(16)).sum()) != _checksum(code):
        raise ValueError("the picture holds no valid code")
    return code >> 28, (code >> 16) & 0xFFF, code & 0xFFFF


def _checksum(code: int) -> int:
    return (code * 40503 + (code >> 16) * 30011 + 12345) & 0xFFFF


def coded_frames(camera: int, episode: int, length: int) -> Iterator[np.ndarray]:
    """Pictures of one episode."""
    return (code_frame(camera, episode, k) for k in range(length))


def motion(episode: int, length: int, size: int = 7) -> tuple[np.ndarray, np.ndarray]:
    """(state, action) float32 [T, D]: smooth, the action is the next state, the last dimension a two-valued gripper."""
    k, d = np.arange(length + 1)[:, None], np.arange(size)[None]
    path = np.sin(0.11 * k * (1 + 0.2 * d) + 0.7 * episode + d)
    path[:, -1] = np.where((k[:, 0] // 9) % 2, 1.0, -1.0)
    state, action = path[:-1].astype(np.float32), path[1:].astype(np.float32)
    action[:, 0] = (episode + np.arange(length) / 1000).astype(np.float32)
    return state, action


def make_dataset(
    root: Path,
    codebase_version: Literal["v2.0", "v2.1", "v3.0"] = "v3.0",
    *,
    lengths: Sequence[int] = LENGTHS,
    cameras: Sequence[str] = CAMERAS,
    camera_dtype: str = "video",
    codec: Literal["h264", "av1", "hevc"] = "h264",
    gop: int = 2,
    fps: float = FPS,
    size: int = 7,
    change: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None,
    instructions: Sequence[str] = INSTRUCTIONS,
) -> Path:
    """The healthy base at `root`; in v3.0 data and cameras are split over files differently. `change` maps (state, action)."""
    names = STATE_NAMES if size == len(STATE_NAMES) else None
    features: dict[str, Any] = {
        "observation.state": {"dtype": "float32", "shape": (size,), "names": names},
        "action": {"dtype": "float32", "shape": (size,), "names": names},
    }
    for camera in cameras:
        features[camera] = {"dtype": camera_dtype, "shape": (HEIGHT, WIDTH, 3), "names": ["height", "width", "channel"]}
    split = {"data": 3, **{camera: 2 + i for i, camera in enumerate(cameras)}}
    writer = LeRobotWriter(
        root,
        fps=fps,
        features=features,
        robot_type="fixture",
        codebase_version=codebase_version,
        video_codec=codec,
        gop=gop,
        episodes_per_file=split,
    )
    for episode, length in enumerate(lengths):
        state, action = motion(episode, length, size)
        if change is not None:
            state, action = change(state, action)
        images = {camera: coded_frames(i, episode, length) for i, camera in enumerate(cameras)}
        columns = {"observation.state": state, "action": action}
        writer.add_episode(columns, images, instructions[episode % len(instructions)])
    return writer.finalize()


def encode_again(root: Path, *, codec: str = "h264", gop: int = 250, b_frames: int = 0, start_frame: int = 0) -> None:
    """Replace every mp4 of the dataset: other codec, sparse key frames, B-frames, a start time that is not 0."""
    table, _ = read_metadata(root)
    for number, camera in enumerate(table.videos):
        video = table.videos[camera]
        for file, episodes in video.files.episodes_by_file():
            path = video.files.path(file)
            path.unlink()
            encoder = VideoEncoder(path, fps=table.fps, codec=codec, gop=gop, b_frames=b_frames, start_frame=start_frame)
            codes = [(int(e), k) for e in episodes for k in range(int(table.length_E[e]))]
            for episode, frame in codes:
                encoder.add(code_frame(number, episode, frame))
            encoder.close()
    features = edit_info(root)["features"]
    for feature in features.values():
        if feature["dtype"] == "video":
            feature["info"]["video.codec"] = codec
    edit_info(root, features=features)


def edit_info(root: Path, **changes: Any) -> dict[str, Any]:
    """Change top-level fields of info.json; returns it."""
    path = root / "meta/info.json"
    info: dict[str, Any] = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(info, indent=4))
    return info


def edit_table(path: Path, edit: Callable[[pa.Table], pa.Table]) -> None:
    """Rewrite one parquet file."""
    table = edit(pq.read_table(path))
    pq.write_table(table, path)


def edit_episodes(root: Path, column: str, values: dict[int, Any]) -> None:
    """Set cells (episode -> value) of one column of the v3.0 episode table."""

    def edit(table: pa.Table) -> pa.Table:
        cells = table[column].to_pylist()
        for row, value in values.items():
            cells[row] = value
        position = table.column_names.index(column)
        return table.set_column(position, column, pa.array(cells, table.schema.field(column).type))

    edit_table(root / "meta/episodes/chunk-000/file-000.parquet", edit)


def data_files(root: Path) -> list[Path]:
    """Parquet files with rows."""
    return sorted((root / "data").glob("*/*.parquet"))


def video_files(root: Path, camera: str = CAMERAS[0]) -> list[Path]:
    """mp4 files of one camera."""
    return sorted(path for path in (root / "videos").rglob("*.mp4") if camera in path.parts)


def _merged_offsets(root: Path, version: Any) -> None:
    make_dataset(root, "v3.0")
    edit_episodes(root, f"videos/{CAMERAS[0]}/from_timestamp", {1: 0.0})
    edit_episodes(root, f"videos/{CAMERAS[0]}/to_timestamp", {1: LENGTHS[1] / FPS})


def _stale_file_index(root: Path, version: Any) -> None:
    make_dataset(root, "v3.0")
    edit_episodes(root, "data/file_index", {3: 0})
    edit_episodes(root, f"videos/{CAMERAS[0]}/file_index", {2: 0})


def _scrambled_ranges(root: Path, version: Any) -> None:
    make_dataset(root, "v3.0")
    edit_episodes(root, "dataset_from_index", {1: LENGTHS[0] + LENGTHS[1], 2: LENGTHS[0]})


def _wall_clock(root: Path, version: Any) -> None:
    make_dataset(root, version)
    random = np.random.default_rng(0)

    def edit(table: pa.Table) -> pa.Table:
        seconds = table["timestamp"].to_numpy().astype(np.float64) + WALL_CLOCK + random.uniform(-0.003, 0.003, table.num_rows)
        return table.set_column(table.column_names.index("timestamp"), "timestamp", pa.array(seconds))

    for path in data_files(root):
        edit_table(path, edit)


def _float_drift(root: Path, version: Any) -> None:
    lengths = (7000, 6000, 7000)
    make_dataset(root, "v3.0", lengths=lengths, cameras=CAMERAS[:1], fps=30, gop=30)
    edit_table(
        root / "meta/episodes/chunk-000/file-000.parquet",
        lambda table: table.set_column(
            table.column_names.index(f"videos/{CAMERAS[0]}/from_timestamp"),
            f"videos/{CAMERAS[0]}/from_timestamp",
            table[f"videos/{CAMERAS[0]}/from_timestamp"].cast(pa.float32()),
        ),
    )


def _names_null(root: Path, version: Any) -> None:
    make_dataset(root, version)
    features = edit_info(root)["features"]
    edit_info(root, features={name: {**feature, "names": None} for name, feature in features.items()})
    stats = root / "meta/stats.json"
    if stats.exists():
        kept = {name: value for name, value in json.loads(stats.read_text()).items() if "images" not in name}
        stats.write_text(json.dumps(kept))


def _jsonl_quirks(root: Path, version: Any) -> None:
    make_dataset(root, "v2.1" if version == "v3.0" else version)
    for name in ("tasks.jsonl", "episodes.jsonl"):
        path = root / "meta" / name
        lines = path.read_text().split("\n")
        path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(lines).encode() + b"\n\n")


def _extra_columns(root: Path, version: Any) -> None:
    make_dataset(root, version)

    def edit(table: pa.Table) -> pa.Table:
        boxes = [[{"label": "cup", "score": 0.5}] * (i % 3) for i in range(table.num_rows)]
        notes = [None if i % 5 else f"note {i}" for i in range(table.num_rows)]
        return table.append_column("boxes", pa.array(boxes)).append_column("notes", pa.array(notes, pa.string()))

    for path in data_files(root):
        edit_table(path, edit)


def _truncate(path: Path, keep: Callable[[int], int]) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: keep(len(data))])


def _truncated_parquet(root: Path, version: Any) -> None:
    make_dataset(root, version)
    _truncate(data_files(root)[0], lambda size: size - 64)


def _half_mp4(root: Path, version: Any) -> None:
    make_dataset(root, version)
    _truncate(video_files(root)[0], lambda size: size // 2)


def _off_by_one(root: Path, version: Any) -> None:
    make_dataset(root, version)
    _drop_last_frame(root, CAMERAS[1], -1)


def _drop_last_frame(root: Path, camera: str, place: int) -> None:
    table, _ = read_metadata(root)
    video = table.videos[camera]
    file, episodes = list(video.files.episodes_by_file())[place]
    encoder = VideoEncoder(video.files.path(file), fps=table.fps)
    codes = [(int(e), k) for e in episodes for k in range(int(table.length_E[e]))]
    for episode, frame in codes[:-1]:
        encoder.add(code_frame(table.cameras.index(camera), episode, frame))
    encoder.close()


def _broken_files(root: Path, version: Any) -> None:
    make_dataset(root, "v2.1" if version == "v3.0" else version)
    _truncate(data_files(root)[0], lambda size: size - 64)
    _truncate(video_files(root)[1], lambda size: size // 2)
    _drop_last_frame(root, CAMERAS[1], 2)


def _nan_state(root: Path, version: Any) -> None:
    make_dataset(root, version)

    def edit(table: pa.Table) -> pa.Table:
        rows = np.flatnonzero((table["episode_index"].to_numpy() == 2) & (table["frame_index"].to_numpy() == 11))
        cells = table["observation.state"].to_pylist()
        for row in rows:
            cells[row][3] = float("nan")
        kind = table.schema.field("observation.state").type
        return table.set_column(table.column_names.index("observation.state"), "observation.state", pa.array(cells, kind))

    for path in data_files(root):
        edit_table(path, edit)


def _empty_instruction(root: Path, version: Any) -> None:
    make_dataset(root, version, lengths=(*LENGTHS, 9), instructions=("Open a drawer", "", "Pick up the puck", "", "Push"))

    def edit(table: pa.Table) -> pa.Table:
        last = pc.equal(table["episode_index"], 4)
        tasks = pc.if_else(last, pa.scalar(77, pa.int64()), table["task_index"])
        return table.set_column(table.column_names.index("task_index"), "task_index", tasks)

    for path in data_files(root):
        edit_table(path, edit)


def _unfinished(root: Path, version: Any) -> None:
    make_dataset(root, version)
    (root / "meta/info.json").unlink()


def _as_delta(state: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    delta = np.diff(state, axis=0, append=state[-1:]) / 0.3
    delta[:, -1] = action[:, -1]
    return state, np.clip(delta, -1, 1)


def _mostly_idle(state: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    moving = max(1, len(state) // 5)
    state, action = state.copy(), action.copy()
    state[moving:] = state[moving]
    return state, action


def _encoded(**options: Any) -> Callable[[Path, Any], None]:
    def make(root: Path, version: Any) -> None:
        make_dataset(root, version)
        encode_again(root, **options)

    return make


def _built(**options: Any) -> Callable[[Path, Any], None]:
    def make(root: Path, version: Any) -> None:
        make_dataset(root, version, **options)

    return make


DEFECTS: dict[str, Callable[[Path, Any], None]] = {
    "merged_offsets": _merged_offsets,
    "stale_file_index": _stale_file_index,
    "scrambled_ranges": _scrambled_ranges,
    "wall_clock": _wall_clock,
    "float_drift": _float_drift,
    "names_null": _names_null,
    "image_only": _built(camera_dtype="image"),
    "jsonl_quirks": _jsonl_quirks,
    "extra_columns": _extra_columns,
    "truncated_parquet": _truncated_parquet,
    "half_mp4": _half_mp4,
    "off_by_one": _off_by_one,
    "broken_files": _broken_files,
    "codec_av1": _encoded(codec="av1", gop=2),
    "codec_hevc": _encoded(codec="hevc", gop=12),
    "gop250_start": _encoded(codec="h264", gop=250, b_frames=2, start_frame=14),
    "many_files": lambda root, version: (make_dataset(root, "v2.1", lengths=(6,) * 150), None)[1],
    "nan_state": _nan_state,
    "already_delta": _built(change=_as_delta),
    "copy_action": _built(change=lambda state, action: (state, state.copy())),
    "idle": _built(change=_mostly_idle),
    "wide_action": _built(size=35),
    "odd_cameras": _built(cameras=("cam_a", "cam_b")),
    "empty_instruction": _empty_instruction,
    "unfinished": _unfinished,
}


def make_defect(root: Path, name: str, codebase_version: str = "v3.0") -> Path:
    """The dataset with defect `name` at `root` (defects of one format are made in that format). Raises ValueError."""
    if name not in DEFECTS:
        raise ValueError(f"--defect {name}: known are {', '.join(DEFECTS)}")
    DEFECTS[name](root, codebase_version)
    return root


@dataclass(frozen=True, kw_only=True)
class FixtureConfig:
    """Fixture dataset"""

    output: str = "fixture_dataset"
    """Folder to make; must not exist, or be empty."""

    codebase_version: Literal["v2.0", "v2.1", "v3.0"] = "v3.0"
    """Dataset format."""

    defect: str | None = None
    """Name of the defect; "list" prints them. Not set: a healthy dataset."""


def main(arguments: Sequence[str]) -> int:
    """Make one dataset."""
    parser = StrictParser(description=(__doc__ or "").split("\n")[0])
    add_section(parser, FixtureConfig)
    config: FixtureConfig = build_section(FixtureConfig, parser.parse_flags(arguments))
    if config.defect == "list":
        print("\n".join(DEFECTS))
        return 0
    try:
        if config.defect is None:
            make_dataset(Path(config.output), config.codebase_version)
        else:
            make_defect(Path(config.output), config.defect, config.codebase_version)
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 1
    print(config.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
