"""A recording that can be interrupted: episodes are written in the shards of a conversion, and finished shards stay.

The dataset's files are those of its shards, so a recording that went on after an interruption has the bytes of one that had
none.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from megatron_vla.data.conversion import ConversionSettings, ShardPlan, ShardResult, merge_shards, stamp, stamped
from megatron_vla.data.lerobot_writer import EncodedPictures, LeRobotWriter
from megatron_vla.file_lock import LOCK_FILE
from megatron_vla.whole_file import replace_text

FACTS_FILE, LOG_FILE = "recording.json", "log.json"
# What an interruption costs at most; finishing a shard and merging it take 0.1 s each.
EPISODES_PER_SHARD = 50


@dataclass(frozen=True)
class RecordedEpisode:
    """One episode as `LeRobotWriter.add_episode` takes it, and what is told of it (JSON-ready)."""

    columns: Mapping[str, np.ndarray]
    images: Mapping[str, np.ndarray | EncodedPictures]
    instruction: str
    facts: Mapping[str, Any]


def differences(there: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """`seed: 3 there, 4 asked` for every entry of `asked` that `there` does not have."""
    return [f"{name}: {there.get(name)} there, {value} asked" for name, value in asked.items() if there.get(name) != value]


def go_on_or_begin(work: Path, facts: Mapping[str, Any], overwrite: bool) -> None:
    """Prepare `work` (held by the caller) for a recording that `facts` describe; its finished shards stay.

    Raises ValueError when another recording's shards lie there, unless `overwrite` lets them be deleted.
    """
    path = work / FACTS_FILE
    left = [entry for entry in work.iterdir() if entry.name != LOCK_FILE]
    if left:
        if path.is_file():
            other = differences(json.loads(path.read_text()), facts)
        else:
            other = ["files that cannot be gone on with"]
        if not other:
            return
        if not overwrite:
            raise ValueError(
                f"{work}: left by an interrupted recording ({'; '.join(other)}) -> ask for the same to go on with it, name "
                "another --output, or delete it with --overwrite"
            )
        for entry in left:
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    # Renamed into place: an interruption must not leave half of it.
    replace_text(path, json.dumps(facts, indent=1))


class ShardedRecording:
    """The shards of one recording in `work`. facts: all that decides the files' bytes; tasks: all instructions in order.

    results, log: of the shards that are finished, and what was told of their episodes.
    """

    def __init__(
        self,
        work: Path,
        facts: Mapping[str, Any],
        num_episodes: int,
        tasks: Sequence[str],
        writer_options: Mapping[str, Any],
        episodes_per_shard: int = EPISODES_PER_SHARD,
    ) -> None:
        self.work, self.num_episodes, self.tasks = work, num_episodes, tuple(dict.fromkeys(tasks))
        self.writer_options, self.episodes_per_shard = writer_options, episodes_per_shard
        content = json.dumps([facts, episodes_per_shard], sort_keys=True)
        self._identity = hashlib.sha256(content.encode()).hexdigest()[:24]
        self.plans: list[ShardPlan] = []
        self.results: list[ShardResult] = []
        self.log: list[dict[str, Any]] = []
        while not self.is_complete and (result := stamped(plan := self._next_plan())) is not None:
            self._keep(plan, result)

    @property
    def num_finished(self) -> int:
        """Episodes in finished shards: the first ones."""
        return sum(result.episodes for result in self.results)

    @property
    def is_complete(self) -> bool:
        """Whether all shards are finished."""
        return self.num_finished == self.num_episodes

    def write(self, episodes: Iterator[RecordedEpisode]) -> None:
        """Write all episodes that are missing; `episodes` begins with the first of them."""
        while not self.is_complete:
            plan = self._next_plan()
            folder = Path(plan.folder)
            if folder.exists():
                shutil.rmtree(folder)  # unfinished: its files cannot be gone on with
            writer = LeRobotWriter(
                folder, first_episode=plan.start, first_frame=plan.first_frame, tasks=self.tasks, **self.writer_options
            )
            told = []
            for episode in islice(episodes, plan.stop - plan.start):
                writer.add_episode(episode.columns, episode.images, episode.instruction)
                told.append(dict(episode.facts))
            writer.finalize()
            (folder / LOG_FILE).write_text(json.dumps(told))
            self._keep(plan, stamp(plan, writer, {}, {}))

    def merge(self) -> Path:
        """The complete dataset, a folder in `work`. May be repeated."""
        return merge_shards(self.plans, self.results, self.work)

    def _next_plan(self) -> ShardPlan:
        number, start = len(self.results), self.num_finished
        return ShardPlan(
            number=number,
            source="",
            mapping=None,
            cache_path="",
            folder=str(self.work / f"shard-{number:05d}"),
            start=start,
            stop=min(start + self.episodes_per_shard, self.num_episodes),
            first_frame=sum(result.frames for result in self.results),
            tasks=self.tasks,
            settings=ConversionSettings(),
            identity=self._identity,
        )

    def _keep(self, plan: ShardPlan, result: ShardResult) -> None:
        self.plans.append(plan)
        self.results.append(result)
        self.log += json.loads((Path(plan.folder) / LOG_FILE).read_text())
