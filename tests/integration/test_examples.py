"""Every launcher runs: tiny model, mock data, three iterations, two CPU processes where it starts several."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PI05, GROOT = ROOT / "examples/pi05", ROOT / "examples/groot_n1_7"
SMALL_FLAGS = ("--train-iters", "3", "--lr-warmup-iters", "0", "--global-batch-size", "4", "--micro-batch-size", "1")
LOG_FLAGS = ("--log-interval", "1", "--no-tensorboard")


def stub(folder: Path, name: str, text: str) -> None:
    """An executable shell script called `name`."""
    path = folder / name
    path.write_text("#!/usr/bin/env bash\n" + text)
    path.chmod(0o755)


def launch(script: Path, tmp_path: Path, environment: dict[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a launcher with this Python's torchrun first on PATH."""
    commands = tmp_path / "bin"
    commands.mkdir()
    stub(commands, "torchrun", f'exec "{sys.executable}" -m torch.distributed.run "$@"\n')
    # What Slurm would do on one node: srun starts its command, scontrol names the nodes.
    stub(commands, "srun", 'while [[ "$1" == --* ]]; do shift; done\necho "started by srun"\nexec "$@"\n')
    # As many as fill a pipe: a reader that takes only the first name would end the job with SIGPIPE.
    stub(commands, "scontrol", "echo localhost\nseq -f other-node-%g 20000\n")
    variables = {
        **{k: v for k, v in os.environ.items() if not k.startswith("SLURM_")},
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    command = ["bash", str(script), *flags]
    return subprocess.run(command, env=variables, capture_output=True, text=True, cwd=tmp_path, timeout=900, check=False)


def logged_losses(save: Path) -> list[float]:
    """Loss of every logged iteration."""
    lines = [json.loads(line) for line in (save / "logs/metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


SLURM = {
    "NPROC_PER_NODE": "2",
    "SLURM_SUBMIT_DIR": str(ROOT),
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_JOB_ID": "7",
}


@pytest.mark.parametrize(
    ("script", "environment", "marker"),
    [
        (PI05 / "finetune_1gpu.sh", {}, ""),
        (PI05 / "finetune_8gpu.sh", {"NPROC_PER_NODE": "2"}, ""),
        (PI05 / "pretrain_multinode.sbatch", SLURM, "started by srun"),
        (GROOT / "finetune_1gpu.sh", {}, ""),
        # The same arrays behind another start, which the files above cover.
        pytest.param(GROOT / "finetune_8gpu.sh", {"NPROC_PER_NODE": "2"}, "", marks=pytest.mark.slow),
        pytest.param(GROOT / "finetune_multinode.sbatch", SLURM, "started by srun", marks=pytest.mark.slow),
    ],
    ids=lambda value: "/".join(value.parts[-2:]) if isinstance(value, Path) else "",
)
def test_launcher_trains_three_iterations(script: Path, environment: dict[str, str], marker: str, tmp_path: Path) -> None:
    save = tmp_path / "save"
    with socket.create_server(("localhost", 0)) as server:
        environment = {**environment, "MASTER_PORT": str(server.getsockname()[1])}
    result = launch(script, tmp_path, {"MOCK_DATA": "1", "SAVE": str(save), **environment}, *SMALL_FLAGS, *LOG_FLAGS)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert marker in result.stdout
    losses = logged_losses(save)
    assert len(losses) == 3 and all(0 < loss < 10 for loss in losses)
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == "3"


@pytest.mark.parametrize("folder", [PI05, GROOT], ids=lambda folder: folder.name)
@pytest.mark.parametrize("script", ["finetune_1gpu.sh", "finetune_8gpu.sh"])
def test_launcher_names_the_missing_path(folder: Path, script: str, tmp_path: Path) -> None:
    result = launch(folder / script, tmp_path, {"SAVE": str(tmp_path / "save")})
    assert result.returncode != 0
    wanted = "file or folder with Pi0.5 weights" if folder == PI05 else "folder with released GR00T N1.7 weights"
    assert f"PRETRAINED_CHECKPOINT: {wanted}" in result.stderr


@pytest.mark.parametrize("folder", [PI05, GROOT], ids=lambda folder: folder.name)
def test_launchers_differ_only_where_they_say(folder: Path) -> None:
    """Same arrays in all three; the batch file differs in how ranks start, in sizes and in the first weights."""
    texts = {path.name: path.read_text() for path in folder.iterdir() if path.suffix in (".sh", ".sbatch")}
    assert len(texts) == 3
    for name, text in texts.items():
        arrays = re.findall(r"^\s*([A-Z]+_ARGS)=\(", text, flags=re.M)
        assert set(arrays) == {"DISTRIBUTED_ARGS", "MODEL_ARGS", "DATA_ARGS", "TRAINING_ARGS", "LOGGING_ARGS"}, name
        assert text.rstrip().endswith('"$@"') and "set -euo pipefail" in text, name
    logging = {text[text.index("LOGGING_ARGS=(") : text.index("exec ")] for text in texts.values()}
    assert len(logging) == 1
