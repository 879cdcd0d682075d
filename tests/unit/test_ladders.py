"""Committed ladders: every rung is a run that the flags of today accept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_vla.config.check import check
from megatron_vla.config.run import parse_args
from megatron_vla.models.registry import model_family

LADDERS = sorted((Path(__file__).resolve().parents[2] / "benchmarks/ladders").glob("*.json"))


@pytest.mark.parametrize("path", LADDERS, ids=lambda path: path.stem)
def test_every_rung_is_accepted(path: Path) -> None:
    ladder = json.loads(path.read_text())
    refused = {}
    for rung in ladder["rungs"]:
        config = parse_args([*ladder["common_flags"], *rung["flags"]])
        findings = check(config, model_family(config.model.model_name), rung.get("num_processes", 1))
        if errors := [str(f) for f in findings if f.severity == "error" and "installed" not in f.what]:
            refused[rung["name"]] = errors
    assert not refused and len({rung["name"] for rung in ladder["rungs"]}) == len(ladder["rungs"]) > 0
