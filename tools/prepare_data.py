"""Convert an RLDS dataset or HDF5 demonstrations (LIBERO layout) to LeRobot v3.0, in parallel, resumable, verified.

    python tools/prepare_data.py --input RLDS/1.0.0 --mapping mapping.json --output data/robot --num-processes 16

Shards of episodes are written, read back and compared with the source one by one; a run that was stopped goes on where it was.
Exit status: 0 done, 1 with the reason printed, 2 wrong flags. The mapping file is described in
megatron_vla/data/rlds_mapping.py; a run without one prints a start for it.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from megatron_vla.config.cli import StrictParser, add_section, build_section
from megatron_vla.data.conversion import (
    ConversionSettings,
    ShardPlan,
    ShardResult,
    convert_shard,
    merge_shards,
    plan_shards,
    run_in_processes,
    stamped,
)
from megatron_vla.data.conversion_source import ConversionSource, open_source
from megatron_vla.data.dataset_check import CheckSettings, check_dataset
from megatron_vla.file_lock import alone_in


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Conversion to LeRobot v3.0"""

    input: str | None = None
    """RLDS folder (NAME/VERSION), HDF5 file, or folder of HDF5 files."""

    mapping: str | None = None
    """JSON file (or the JSON itself) with the rate and, where defaults do not fit, the keys, as --rlds-mapping of training."""

    output: str | None = None
    """Folder of the new dataset. FOLDER.partial beside it holds the work in progress."""

    overwrite: bool = False
    """Replace the output if it exists, and start anew what was in progress."""

    num_processes: int = 0
    """Conversion processes; 0: one per core."""

    episodes_per_shard: int = 32
    """Episodes converted together: what is repeated after a stop, and at least one file each."""

    storage: Literal["video", "image"] = "video"
    """Pictures as video, or as PNG in the data files (lossless, several times larger)."""

    video_codec: Literal["h264", "av1", "hevc"] = "h264"
    """Codec of the videos."""

    crf: int | None = None
    """Quality of the videos (lower is better). Not set: the codec's usual one."""

    gop: int = 2
    """Distance of key frames: 2 is cheap to read at random, larger is smaller."""

    verify_frames: int = 3
    """Frames per episode and camera that are decoded again and compared; 0: all."""


def convert(config: PrepareConfig, source_path: Path, output: Path) -> int:
    """Convert what is missing, merge, check; returns the number of errors found in the result. Raises ValueError."""
    work = output.with_name(output.name + ".partial")
    source = open_source(source_path, config.mapping, str(work / "index"))
    settings = ConversionSettings(config.storage, config.video_codec, config.crf, config.gop, config.verify_frames)
    plans = plan_shards(source, source_path, config.mapping, work, settings, config.episodes_per_shard)
    with alone_in(work, "conversion"):
        if config.overwrite:
            for folder in (*work.glob("shard-*"), work / "dataset"):
                shutil.rmtree(folder, ignore_errors=True)
        return _convert_plans(config, source, plans, work, output)


def _convert_plans(
    config: PrepareConfig, source: ConversionSource, plans: Sequence[ShardPlan], work: Path, output: Path
) -> int:
    if work.is_dir() and any(work.glob("shard-*")) and not any(stamped(plan) for plan in plans):
        print(f"note: {work} holds no shard of these settings; all are made anew")
    found = {plan.number: stamped(plan) for plan in plans}
    results: dict[int, ShardResult] = {number: result for number, result in found.items() if result is not None}
    missing = [plan for plan in plans if plan.number not in results]
    total = int(source.length_E.sum())
    num_processes = min(config.num_processes or os.cpu_count() or 1, max(1, len(missing)))
    print(f"{len(source.length_E)} episodes, {total} frames, {len(plans)} shards, {len(results)} of them done before")
    with tqdm(total=total, initial=sum(r.frames for r in results.values()), unit="frame", disable=None) as bar:
        for result in run_in_processes(convert_shard, missing, num_processes):
            results[result.number] = result
            bar.update(result.frames)
    dataset = merge_shards(plans, [results[plan.number] for plan in plans], work)
    checked = check_dataset(dataset, deep=False, settings=CheckSettings(empty_instruction="keep"))
    errors = [finding for finding in checked.findings if finding.severity == "error"]
    for finding in checked.findings:
        print(finding)
    if errors:
        return len(errors)
    if output.exists():
        shutil.rmtree(output)
    os.replace(dataset, output)
    shutil.rmtree(work)
    print(f"wrote {output}: " + ", ".join(f"{name} {value}" for name, value in checked.facts.items()))
    print(f"verified: frame counts, every number, statistics, {config.verify_frames or 'all'} frames per episode and camera")
    return 0


def main(arguments: Sequence[str]) -> int:
    """Exit status."""
    parser = StrictParser(prog="tools/prepare_data.py", description=(__doc__ or "").split("\n")[0])
    add_section(parser, PrepareConfig)
    config: PrepareConfig = build_section(PrepareConfig, parser.parse_flags(arguments))
    if config.input is None or config.output is None:
        parser.error("--input and --output are needed")
    if config.episodes_per_shard < 1 or config.num_processes < 0 or config.verify_frames < 0:
        parser.error("--episodes-per-shard is at least 1, --num-processes and --verify-frames are not negative")
    output = Path(config.output)
    if output.exists() and not config.overwrite:
        print(f"--output {output} exists; add --overwrite to replace it", file=sys.stderr)
        return 1
    try:
        return 1 if convert(config, Path(config.input), output) else 0
    except (ValueError, OSError) as problem:
        # OSError: a full disk, a file that went away; its text has the name.
        print(problem, file=sys.stderr)
        print("nothing that is done is lost: the same command goes on from there", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
