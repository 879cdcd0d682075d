"""The quickstart, small: records, trains, is killed, resumes with the same losses, evaluates, reports, and reuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.quickstart import QuickstartConfig, Stages, read_losses, report, training_command

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--tasks", "reach", "button-press", "--episodes-per-task", "1", "--image-size", "56", "--train-iters", "60")
SMALL += ("--trials-per-task", "1")


def run_quickstart(output: Path, *flags: str) -> str:
    """Output of one run; fails with it."""
    command = [sys.executable, "tools/quickstart.py", "--output", str(output), *SMALL, *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


@pytest.mark.simulator
@pytest.mark.usefixtures("gl_backend")
def test_quickstart_from_nothing_and_again(tmp_path: Path) -> None:
    output = tmp_path / "quickstart"
    said = run_quickstart(output)
    # On a busy machine one more window may be through before the kill.
    killed = re.search(r"killed \(SIGKILL\) after iteration (40|50); checkpoint: iteration 30", said)
    assert killed
    assert "resumed at iteration 30" in said
    assert f"{int(killed[1]) - 30} iterations ran twice, largest loss difference 0.0e+00" in said
    losses = read_losses(output / "checkpoints")
    assert sorted(losses) == list(range(1, 61))
    assert losses[60] < 0.7 * losses[1]
    logs = output / "checkpoints/logs"
    for path in (
        logs / "first_batch.png",
        logs / "loss_curve.png",
        logs / "metrics.jsonl",
        output / "checkpoints/iter_0000060",
        output / "checkpoints/evaluation/iter_0000060/report.md",
        output / "checkpoints/evaluation/iter_0000060/montage.gif",
    ):
        assert path.exists() and str(path) in said
    assert "| **all** |" in said and "rollout videos" in said
    again = run_quickstart(output)
    assert again.count("reused") == 6 and "iteration      10/60" not in again
    assert [line for line in again.splitlines() if line.startswith("loss ")] == [
        line for line in said.splitlines() if line.startswith("loss ")
    ]


@pytest.mark.simulator
@pytest.mark.slow
@pytest.mark.usefixtures("gl_backend")
def test_quickstart_of_the_other_family_on_the_same_demonstrations(tmp_path: Path) -> None:
    output = tmp_path / "quickstart"
    said = run_quickstart(output, "--model-name", "groot_n1_7")
    assert re.search(r"killed \(SIGKILL\) after iteration (40|50); checkpoint: iteration 30", said)
    assert "largest loss difference 0.0e+00" in said
    losses = read_losses(output / "groot_n1_7/checkpoints")
    assert sorted(losses) == list(range(1, 61)) and losses[60] < 0.8 * losses[1]
    results = output / "groot_n1_7/checkpoints/evaluation/iter_0000060"
    assert "| **all** |" in said and f"success table       {results / 'report.md'}" in said
    assert (results / "montage.gif").is_file()
    preprocessor = output / "groot_n1_7/checkpoints/iter_0000060/preprocessor"
    assert json.loads((preprocessor / "preprocessing.json").read_text())["kind"] == "groot_n1_7"


def write_metrics(save: Path, losses: list[float], torn: str = "") -> None:
    """metrics.jsonl as the trainer writes it, two iterations a line, perhaps with a torn last line."""
    (save / "logs").mkdir(parents=True)
    numbers = list(enumerate(losses, 1))
    windows = [numbers[i : i + 2] for i in range(0, len(numbers), 2)]
    lines = [json.dumps({"iterations": [i for i, _ in w], "losses": [v for _, v in w]}) + "\n" for w in windows]
    (save / "logs/metrics.jsonl").write_text("".join(lines) + torn)


def test_half_written_metrics_are_read_up_to_the_tear(tmp_path: Path) -> None:
    write_metrics(tmp_path, [3.0, 2.0, 1.0], torn='{"iterations": [4], "los')
    assert read_losses(tmp_path) == {1: 3.0, 2: 2.0, 3: 1.0}
    assert read_losses(tmp_path / "nothing") == {}


def test_report_fails_when_the_loss_did_not_fall(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_metrics(tmp_path / "checkpoints", [1.0, 1.0, 1.5, 2.0])
    config = QuickstartConfig(output=str(tmp_path), train_iters=4)
    with pytest.raises(SystemExit, match="the loss did not fall"):
        report(config, tmp_path, Stages(total=1), {2: 1.0, 3: 1.25})
    # Only what was computed again after the checkpoint counts as replayed.
    assert "1 iterations ran twice, largest loss difference 2.5e-01" in capsys.readouterr().out


def test_first_and_resumed_run_are_one_command() -> None:
    command = training_command(QuickstartConfig(train_iters=10), Path("out"), 10)
    assert command[command.index("--save") + 1] == command[command.index("--load") + 1] == "out/checkpoints"
    assert command[command.index("--save-interval") + 1] == "5"
    other = training_command(QuickstartConfig(train_iters=10, model_name="groot_n1_7"), Path("out"), 10)
    # The recorded data is shared; everything that depends on the family lies in a folder of its own.
    assert other[other.index("--data-path") + 1] == command[command.index("--data-path") + 1] == "out/demonstrations"
    assert other[other.index("--save") + 1] == "out/groot_n1_7/checkpoints"
