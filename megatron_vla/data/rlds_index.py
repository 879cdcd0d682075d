"""One pass over the record files of an RLDS dataset: where every episode is, how long it is, and its numbers.

Pictures are not decoded. The result stays in memory; with a cache folder it is also written there and found again as long as
no record file, and nothing of the mapping, has changed.

Shape legend: E episodes, F files, R rows (all steps of all episodes), D dimensions.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron_vla.data.rlds_example import feature_values, numeric_steps, parse_example, text_steps
from megatron_vla.data.rlds_features import RldsFeature, RldsInfo
from megatron_vla.data.rlds_mapping import RldsMapping
from megatron_vla.data.tfrecord import RecordError, RecordPlace, open_record_file

INDEX_VERSION = 1
READER_THREADS = 4
FIRST_STEP = "steps/is_first"
STORED = ("file_E", "record_E", "offset_E", "size_E", "length_E", "text_of_R")


@dataclass(frozen=True)
class RldsIndex:
    """What the pass found.

    file_E, record_E (number in the file), offset_E, size_E: int64 [E]; length_E: kept steps; columns: name -> float32 [R, D];
    texts and text_of_R: instructions and the code of each step's; image_shapes: camera -> (H, W, 3) of the first picture.
    """

    file_E: np.ndarray
    record_E: np.ndarray
    offset_E: np.ndarray
    size_E: np.ndarray
    length_E: np.ndarray
    columns: dict[str, np.ndarray]
    texts: tuple[str, ...]
    text_of_R: np.ndarray
    image_shapes: dict[str, tuple[int, int, int]]


@dataclass(frozen=True)
class EpisodeFacts:
    """What the pass takes from one record."""

    place: RecordPlace
    length: int
    columns: dict[str, np.ndarray]
    texts_T: list[str]


def build_index(
    info: RldsInfo, mapping: RldsMapping, files: tuple[str, ...], expected: tuple[int, ...], cache_path: str | None
) -> RldsIndex:
    """Index of `files` (relative names; `expected` records in each). Raises ValueError naming file and record."""
    if cache_path is None:
        return _scan(info, mapping, files, expected)
    folder = Path(cache_path)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"rlds_{info.name}_{_cache_key(info, mapping, files)}.npz"
    # One process per node makes the file, the others wait for it; a killed one releases the lock.
    with (folder / f"{target.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_file():
            _save(_scan(info, mapping, files, expected), target)
        return _load(target)


def _cache_key(info: RldsInfo, mapping: RldsMapping, files: tuple[str, ...]) -> str:
    digest = hashlib.sha256(f"{INDEX_VERSION} {info.root.resolve()} {mapping.identity()}".encode())
    for name in files:
        path = info.root / name
        if not path.is_file():
            raise RecordError(f"{path}: missing -> restore the file")
        # Size and time, not content: the point of the cache is not to read the files.
        status = path.stat()
        digest.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:24]


def _scan(info: RldsInfo, mapping: RldsMapping, files: tuple[str, ...], expected: tuple[int, ...]) -> RldsIndex:
    def read(number: int) -> list[EpisodeFacts]:
        return _scan_file(info, mapping, files[number], expected[number])

    # None: tqdm shows itself on terminals only.
    quiet = True if os.environ.get("RANK", "0") != "0" else None
    # Reading and checksums release the interpreter lock; parsing does not, so more threads gain nothing.
    with ThreadPoolExecutor(READER_THREADS) as pool:
        facts = list(tqdm(pool.map(read, range(len(files))), total=len(files), unit="file", desc="index", disable=quiet))
    flat = [(file, episode) for file, episodes in enumerate(facts) for episode in episodes]
    if not flat:
        raise ValueError(
            f"{info.root}: no episode in split {'+'.join(mapping.splits)} -> choose another split in {mapping.where}"
        )
    texts = tuple(dict.fromkeys(text for _, episode in flat for text in episode.texts_T))
    code = {text: number for number, text in enumerate(texts)}
    return RldsIndex(
        file_E=np.array([file for file, _ in flat], dtype=np.int64),
        record_E=np.array([episode.place.number for _, episode in flat], dtype=np.int64),
        offset_E=np.array([episode.place.offset for _, episode in flat], dtype=np.int64),
        size_E=np.array([episode.place.size for _, episode in flat], dtype=np.int64),
        length_E=np.array([episode.length for _, episode in flat], dtype=np.int64),
        columns={name: np.concatenate([episode.columns[name] for _, episode in flat]) for name in mapping.columns},
        texts=texts,
        text_of_R=np.array([code[text] for _, episode in flat for text in episode.texts_T], dtype=np.int32),
        image_shapes=_image_shapes(info, mapping, files[flat[0][0]], flat[0][1].place),
    )


def _scan_file(info: RldsInfo, mapping: RldsMapping, name: str, expected: int) -> list[EpisodeFacts]:
    path = info.root / name
    file = open_record_file(path, info.file_format)
    try:
        episodes = []
        for place, data in file.records():
            try:
                episodes.append(_episode(place, parse_example(data), info.features, mapping))
            except RecordError:
                raise
            except ValueError as problem:
                raise ValueError(f"{path}, record {place.number}: {problem} -> correct {mapping.where}") from problem
    finally:
        file.close()
    # A file cut at a record's end has correct checksums: only the count tells.
    if len(episodes) != expected:
        raise RecordError(
            f"{path}: {len(episodes)} records, dataset_info.json says {expected}: the file is cut off or of another version "
            "-> restore the file"
        )
    return episodes


def _episode(
    place: RecordPlace, example: Mapping[str, Any], features: Mapping[str, RldsFeature], mapping: RldsMapping
) -> EpisodeFacts:
    # Each source once, however many columns take a slice of it.
    sources = {part.source for parts in mapping.columns.values() for part in parts}
    values = {key: numeric_steps(example, features[key]).reshape(-1, features[key].size) for key in sources}
    lengths = {key: len(array) for key, array in values.items()}
    if FIRST_STEP in example:
        lengths[FIRST_STEP] = len(feature_values(example, FIRST_STEP))
    # Counted, not decoded: decoding would make this pass a hundred times slower.
    for key in mapping.cameras.values():
        lengths[key] = len(feature_values(example, key))
    texts_T = [] if mapping.instruction is None else text_steps(example, mapping.instruction)
    if mapping.instruction is not None:
        lengths[mapping.instruction] = len(texts_T)
    if len(set(lengths.values())) != 1:
        raise ValueError(f"features have different numbers of steps: {', '.join(f'{k} {n}' for k, n in lengths.items())}")
    steps_T = next(iter(lengths.values()))
    first, last = mapping.skip_first_steps, steps_T - mapping.skip_last_steps
    if last <= first:
        raise ValueError(f"{steps_T} steps, skip_first_steps and skip_last_steps leave none")
    columns = {
        name: np.concatenate([part.apply(values[part.source]) for part in parts], axis=1)[first:last]
        for name, parts in mapping.columns.items()
    }
    return EpisodeFacts(place, last - first, columns, texts_T[first:last] or [""] * (last - first))


def _image_shapes(info: RldsInfo, mapping: RldsMapping, name: str, place: RecordPlace) -> dict[str, tuple[int, int, int]]:
    """features.json may leave sizes open: the first picture decides what is printed (no sample depends on it)."""
    if not mapping.cameras:
        return {}
    from megatron_vla.data.frame_source import decode_image

    file = open_record_file(info.root / name, info.file_format)
    try:
        example = parse_example(file.read(place))
        shapes: dict[str, tuple[int, int, int]] = {}
        for camera, key in mapping.cameras.items():
            try:
                height, width, colours = decode_image(feature_values(example, key)[0], info.root).shape
            except (ValueError, OSError) as problem:
                raise ValueError(f"{info.root / name}, record {place.number}, {key}, step 0: {problem}") from problem
            shapes[camera] = (height, width, colours)
        return shapes
    finally:
        file.close()


def _save(index: RldsIndex, target: Path) -> None:
    arrays = {name: getattr(index, name) for name in STORED}
    arrays |= {f"column/{name}": values for name, values in index.columns.items()}
    about = json.dumps({"texts": index.texts, "image_shapes": index.image_shapes})
    temporary = target.with_suffix(f".{os.getpid()}.tmp")
    with temporary.open("wb") as stream:
        np.savez(stream, about=np.frombuffer(about.encode(), dtype=np.uint8), **arrays)
    # Whole or not at all, for readers that hold no lock.
    os.replace(temporary, target)


def _load(target: Path) -> RldsIndex:
    try:
        with np.load(target) as content:
            about = json.loads(content["about"].tobytes())
            columns = {name.removeprefix("column/"): content[name] for name in content.files if name.startswith("column/")}
            places = {name: content[name] for name in STORED}
    except (OSError, ValueError, KeyError) as problem:
        raise ValueError(f"{target}: unreadable ({problem}) -> delete the file, it is made again") from problem
    shapes = {camera: tuple(shape) for camera, shape in about["image_shapes"].items()}
    return RldsIndex(columns=columns, texts=tuple(about["texts"]), image_shapes=shapes, **places)
