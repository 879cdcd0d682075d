"""The rules of --pretrained-checkpoint and --pretrained-reinitialize, equal for every family."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_vla.config.run import RunConfig
from megatron_vla.findings import Finding, error


def pretrained_findings(config: RunConfig, converter: Any, *, can_build: bool) -> Iterator[Finding]:
    """Reads the checkpoint's headers. can_build: the family's dimensions are sound, so that its shapes can be compared."""
    checkpoint, reinitialize = config.model.pretrained_checkpoint, config.model.pretrained_reinitialize
    # A path that does not exist is reported with the other paths.
    if can_build and checkpoint is not None and Path(checkpoint).exists():
        yield from converter.check_file(checkpoint, config.family, reinitialize)
    if reinitialize and checkpoint is None:
        where = "--pretrained-reinitialize " + " ".join(reinitialize)
        yield error(where, "no --pretrained-checkpoint is given", "give one, or drop the flag")
