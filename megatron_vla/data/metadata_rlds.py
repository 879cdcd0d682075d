"""RLDS datasets (Open X-Embodiment, TensorFlow Datasets' files) as an `EpisodeTable`.

Episodes are numbered by their place: splits in the mapping's order, files in order, records in order.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_vla.data.episode_table import EpisodeTable, Feature, FileSet, RecordEpisodes
from megatron_vla.data.rlds_features import read_rlds_info
from megatron_vla.data.rlds_index import build_index
from megatron_vla.data.rlds_mapping import read_mapping
from megatron_vla.data.tfrecord import GZIP_MAGIC
from megatron_vla.findings import Finding, warning

TASK = "task_index"


def read_rlds(folder: Path, mapping_value: str | None, cache_path: str | None) -> tuple[EpisodeTable, list[Finding]]:
    """(the table, warnings). Reads every record once unless the cache has the index. Raises ValueError naming the place."""
    info = read_rlds_info(folder)
    mapping = read_mapping(mapping_value, info)
    chosen = [info.splits[name] for name in mapping.splits]
    files = tuple(name for split in chosen for name in split.files)
    index = build_index(info, mapping, files, tuple(n for split in chosen for n in split.records), cache_path)
    features = {
        name: Feature(name, "float32", (values.shape[1],), mapping.names.get(name)) for name, values in index.columns.items()
    }
    features |= {camera: Feature(camera, "image", shape) for camera, shape in index.image_shapes.items()}
    features[TASK] = Feature(TASK, "int64", (1,))
    # Numbered by place: records have no number of their own, and their metadata need not be unique.
    num_episodes = len(index.length_E)
    first_row_E = np.cumsum(index.length_E) - index.length_E
    table = EpisodeTable(
        root=str(info.root),
        format=f"RLDS {info.name} ({info.file_format}, split {'+'.join(mapping.splits)})",
        fps=mapping.fps,
        robot_type=mapping.robot_type,
        features=features,
        episode_index_E=np.arange(num_episodes, dtype=np.int64),
        length_E=index.length_E,
        data=FileSet(str(info.root), "", {}, index.file_E.astype(np.int32), {}, names=files),
        data_row_E=np.zeros(num_episodes, dtype=np.int64),
        videos={},
        task_texts=dict(enumerate(index.texts)),
        instructions=index.texts,
        instruction_of_E=index.text_of_R[first_row_E],
        stored_from_index_E=None,
        stored_to_index_E=None,
        info={},
        records=RecordEpisodes(
            file_format=info.file_format,
            record_E=index.record_E,
            offset_E=index.offset_E,
            size_E=index.size_E,
            first_step=mapping.skip_first_steps,
            sources=dict(mapping.cameras),
            # Per step, so that instructions which change within an episode stay what they are.
            columns={**index.columns, TASK: index.text_of_R.astype(np.int64)},
        ),
    )
    return table, _compressed(info.root, files)


def _compressed(root: Path, files: tuple[str, ...]) -> list[Finding]:
    """GZIP files work, at a price that must be known."""
    sizes = {}
    for name in files:
        # By content: TFDS names compressed files like all others.
        with (root / name).open("rb") as stream:
            if stream.read(2) == GZIP_MAGIC:
                sizes[name] = (root / name).stat().st_size
    if not sizes:
        return []
    what = (
        f"{len(sizes)} of {len(files)} files are GZIP-compressed (the largest {max(sizes.values()) / 2**20:.1f} MiB, more when "
        "decompressed): no random access, so each open one is held decompressed by every worker"
    )
    return [warning(str(root), what, "lower --video-decoder-cache-size, or convert once with tools/prepare_data.py")]
