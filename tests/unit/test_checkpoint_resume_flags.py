"""Which changed flags a resume accepts, refuses and prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training_fixtures import tiny_config

from megatron_vla.config.run import SECTIONS, RunConfig
from megatron_vla.findings import CheckError
from megatron_vla.models.registry import MODEL_FAMILIES, model_family
from megatron_vla.training.checkpoint_folder import POINTER, CheckpointFolder, iteration_folder
from megatron_vla.training.preparation import prepare
from megatron_vla.training.resume import (
    HARMLESS_FIELDS,
    find_resume,
    order_findings,
    resume_findings,
    with_stored_preprocessing,
)


def stored(root: Path, config: RunConfig, iteration: int = 10, global_batch_size: int = 4) -> CheckpointFolder:
    """A checkpoint folder with the files that these rules read."""
    folder = iteration_folder(root, iteration)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    state = {
        "iteration": iteration,
        "consumed_samples": iteration * global_batch_size,
        "global_batch_size": global_batch_size,
        "order_hash": "abc",
        "files": {"config.json": (folder / "config.json").stat().st_size},
    }
    (folder / "state.json").write_text(json.dumps(state))
    (root / POINTER).write_text(f"{iteration}\n")
    return CheckpointFolder(folder, state)


def test_K05_same_flags_resume_silently(tmp_path: Path) -> None:
    found = stored(tmp_path, tiny_config("--save", "a"))
    assert resume_findings(found, tiny_config("--save", "b", "--load", "a"), 1) == ([], [])


def test_K05_a_flag_that_the_checkpoint_does_not_know_had_its_default(tmp_path: Path) -> None:
    content = tiny_config().to_dict()
    del content["family"]["flow_draws"], content["evaluation"]
    older = stored(tmp_path, tiny_config())
    (older.path / "config.json").write_text(json.dumps(content))
    assert resume_findings(older, tiny_config(), 1) == ([], [])
    (finding,), lines = resume_findings(older, tiny_config("--flow-draws", "4", "--eval-interval", "5"), 1)
    assert finding.severity == "error" and (finding.where, lines) == (
        "--flow-draws",
        ["resume with changed flag --eval-interval: not set -> 5"],
    )
    assert finding.what.endswith(": 1 -> 4")


def test_K05_harmless_changes_are_printed(tmp_path: Path) -> None:
    found = stored(tmp_path, tiny_config())
    now = tiny_config("--train-iters", "40", "--num-workers", "3", "--log-interval", "1", "--micro-batch-size", "1")
    findings, lines = resume_findings(found, now, 2)
    assert not findings
    text = "\n".join(lines)
    for part in (
        "--train-iters: 20 -> 40",
        "--num-workers: 0 -> 3",
        "--log-interval: 5 -> 1",
        "--micro-batch-size: 2 -> 1",
        "keep the old curve with --lr-decay-iters 20",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--seed", "5"),
        ("--hidden-size", "48"),
        ("--normalization", "mean_std"),
        ("--camera-map", "base=observation.images.other"),
        ("--lr", "1e-2"),
        ("--weight-decay", "0.5"),
        ("--ema-decay", "0.5"),
        ("--global-batch-size", "8"),
        ("--no-shuffle", None),
        ("--bf16", None),
        ("--action-horizon", "5"),
    ],
)
def test_K05_dangerous_changes_are_refused_and_can_be_overridden(tmp_path: Path, flag: str, value: str | None) -> None:
    found = stored(tmp_path, tiny_config())
    words = [flag] if value is None else [flag, value]
    findings, _ = resume_findings(found, tiny_config(*words), 1)
    assert [f.severity for f in findings] == ["error"]
    name = flag.replace("--no-", "--")
    assert findings[0].where == name and "--override-resume-flags" in findings[0].fix
    findings, _ = resume_findings(found, tiny_config(*words, "--override-resume-flags"), 1)
    assert [f.severity for f in findings] == ["warning"]


def test_global_batch_is_compared_by_its_effective_size(tmp_path: Path) -> None:
    """Without --global-batch-size, another number of ranks changes the batch: the flags are equal, the run is not."""
    found = stored(tmp_path, tiny_config(), global_batch_size=4)
    config = tiny_config("--micro-batch-size", "4", "--global-batch-size", "4")
    assert resume_findings(found, config, 1)[0] == []
    found.state["global_batch_size"] = 8
    assert [f.where for f in resume_findings(found, config, 1)[0]] == ["--global-batch-size"]


def test_harmless_names_are_real_fields() -> None:
    families = [vars(model_family(name).config_type()) for name in MODEL_FAMILIES]
    config = {**tiny_config().to_dict(), "family": {field for family in families for field in family}}
    for name in HARMLESS_FIELDS:
        section, field = name.split(".")
        assert field in config[section], name
    assert set(SECTIONS) <= set(config)


def test_empty_folder_starts_afresh_with_a_line(tmp_path: Path) -> None:
    found, lines = find_resume(tiny_config("--load", str(tmp_path)).checkpoint)
    assert found is None and "starting afresh" in lines[0] and str(tmp_path) in lines[0]
    assert find_resume(tiny_config().checkpoint) == (None, [])


def test_folder_with_only_damaged_checkpoints_is_refused(tmp_path: Path) -> None:
    stored(tmp_path, tiny_config())
    (iteration_folder(tmp_path, 10) / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"no complete checkpoint.*state\.json is unreadable"):
        find_resume(tiny_config("--load", str(tmp_path)).checkpoint)


def test_K09_another_tokenizer_path_is_no_danger(tmp_path: Path) -> None:
    """The stored tokenizer is used whatever the flag says, so a moved file must not stop a resume."""
    found = stored(tmp_path, tiny_config("--tokenizer-model", "old/tokenizer.model"))
    findings, lines = resume_findings(found, tiny_config(), 1)
    assert not [f for f in findings if f.severity == "error"]
    assert any("--tokenizer-model: old/tokenizer.model -> not set" in line for line in lines)


def test_bad_load_is_one_finding_among_all(tmp_path: Path) -> None:
    config = tiny_config("--load", str(tmp_path), "--load-iteration", "15", "--lr", "nan")
    with pytest.raises(CheckError) as caught:
        prepare(config, model_family("pi05"), 1)
    assert {"--load", "--lr"} <= {f.where for f in caught.value.findings}


def test_load_iteration(tmp_path: Path) -> None:
    stored(tmp_path, tiny_config(), iteration=10)
    stored(tmp_path, tiny_config(), iteration=20)
    found, _ = find_resume(tiny_config("--load", str(tmp_path), "--load-iteration", "10").checkpoint)
    assert found is not None and found.iteration == 10
    with pytest.raises(ValueError, match="iter_0000015"):
        find_resume(tiny_config("--load", str(tmp_path), "--load-iteration", "15").checkpoint)


def test_changed_order_of_samples_is_refused(tmp_path: Path) -> None:
    found = stored(tmp_path, tiny_config())
    assert order_findings(found, "abc", tiny_config()) == []
    assert order_findings(found, "xyz", tiny_config())[0].severity == "error"
    assert order_findings(found, "xyz", tiny_config("--override-resume-flags"))[0].severity == "warning"


def test_statistics_of_a_resume_come_from_the_checkpoint(tmp_path: Path) -> None:
    found = stored(tmp_path, tiny_config())
    config = tiny_config("--statistics-path", "elsewhere.json")
    assert with_stored_preprocessing(config, None) is config
    assert with_stored_preprocessing(config, found) is config  # mock data stores none
    (found.path / "preprocessor").mkdir()
    data = with_stored_preprocessing(config, found).data
    assert data.statistics_path == str(found.path / "preprocessor" / "statistics.json")
    assert data.tokenizer_model == str(found.path / "preprocessor" / "tokenizer.model")
