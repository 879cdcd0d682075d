"""Check a robot dataset before training: every fault in one run, one line each.

    python tools/check_dataset.py --data-path DATASET --deep --write-exclude-list exclude.txt

Exit status: 0 nothing wrong (warnings allowed), 1 errors were found, 2 wrong flags. The exclude list holds the episodes that
cannot be trained on, for --exclude-episodes-file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_vla.config.cli import StrictParser, add_section, build_section
from megatron_vla.data.dataset_check import CheckSettings, check_dataset


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """Dataset check"""

    data_path: str | None = None
    """Root folder of a LeRobot v2.0, v2.1, v3.0 or RLDS dataset."""

    rlds_mapping: str | None = None
    """JSON file (or the JSON itself) with the rate and keys of an RLDS dataset, as training will be told."""

    deep: bool = False
    """Decode every frame of every camera too (slow; finds broken pictures, not only broken files)."""

    write_exclude_list: str | None = None
    """File for the numbers of the episodes that cannot be trained on, one a line."""

    state_key: str = "observation.state"
    """Dataset feature that holds the proprioceptive state."""

    action_key: str = "action"
    """Dataset feature that holds the action."""

    dataset_action_representation: Literal["absolute", "delta"] = "absolute"
    """How the dataset's actions are written, as training will be told."""


def main(arguments: Sequence[str]) -> int:
    """Print the facts and findings; returns the exit status."""
    parser = StrictParser(description=(__doc__ or "").split("\n")[0])
    add_section(parser, CheckConfig)
    config: CheckConfig = build_section(CheckConfig, parser.parse_flags(arguments))
    if config.data_path is None:
        parser.error("--data-path is needed")
    settings = CheckSettings(
        state_key=config.state_key,
        action_key=config.action_key,
        dataset_action_representation=config.dataset_action_representation,
    )
    checked = check_dataset(config.data_path, deep=config.deep, settings=settings, rlds_mapping=config.rlds_mapping)
    for name, value in checked.facts.items():
        print(f"{name}: {value}")
    for finding in checked.findings:
        print(finding)
    if config.write_exclude_list is not None:
        lines = [f"# episodes of {config.data_path} that cannot be trained on", *map(str, checked.bad_episodes)]
        Path(config.write_exclude_list).write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{config.write_exclude_list}: {len(checked.bad_episodes)} episodes to exclude (--exclude-episodes-file)")
    errors = sum(finding.severity == "error" for finding in checked.findings)
    depth = "every frame decoded" if config.deep else "pictures not decoded (--deep)"
    print(f"{errors} errors, {len(checked.findings) - errors} warnings; {depth}")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
