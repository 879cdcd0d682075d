"""Run a ladder of named flag sets side by side, one process per rung, and write one JSON with every figure.

    python tools/benchmark.py --ladder benchmarks/ladders/pi05.json --output benchmarks/pi05_ladder.json

Reported per rung: median step time and samples/s, peak memory, model FLOP utilisation (`model.training_flops_per_sample`,
recomputation not counted, over the GPU's dense bf16 datasheet rate, of FP8 rungs too), kernels (and how many of them a graph
launched), host synchronisations and graph launches of one profiled steady step, the losses of the first ten steps on fixed
draws, their difference to the rung above, and samples/s over those of the rung above and of the first. A rung may set
"environment" (variables), and "num_processes": it then runs under torchrun, samples/s and memory are per GPU, and the share of
the communication time that other kernels hide is reported. With a graph runner, --warmup must cover its own warm-up steps and
the captures ("spoiled_steps" counts what did not fit). Steps, warm-up and git commit are recorded with every rung; --keep says
which rungs come from others. --profile FOLDER writes what the profiled step consists of (tools/step_profile.py), which
explains a figure without another run. On NVIDIA GPUs clock, power and what limits the clock are recorded with every rung
(tools/gpu_clock.py), and how busy the host was (tools/host_load.py): without a graph, steps wait for it.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_clock import ClockLog
from host_load import HostLoad
from step_profile import DeviceActivity, activities_of, device_events, write_profile

# Dense bf16 datasheet rates in FLOP/s, by a piece of the name that torch reports.
PEAK_BF16_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}
HOST_SYNC_CALLS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
PROFILED = ("kernels", "kernels_in_graphs", "copies", "host_syncs", "graph_launches")
NUM_COMPARED_LOSSES = 10
GRACE_SECONDS = 20.0
EXCEPTION_LINE = re.compile(r"^(\[\w+\]:\s*)?[\w.]*(Error|Exception)\b")


def parse() -> argparse.Namespace:
    """Command line of the ladder; `--worker` is the form in which this tool calls itself for one rung."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ladder", type=Path, help="JSON with name, common_flags and rungs [{name, flags}]")
    parser.add_argument("--rungs", nargs="*", help="only these rungs (default: all)")
    parser.add_argument("--output", type=Path, help="where to write the result JSON (a PNG goes beside it)")
    parser.add_argument("--steps", type=int, default=20, help="measured steps per rung")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the timing starts; their losses count")
    parser.add_argument("--rung-timeout", type=float, help="seconds after which a rung is ended and counts as failed")
    parser.add_argument("--keep", action="store_true", help="keep what --output holds of this card, measure the other rungs")
    parser.add_argument("--profile", type=Path, help="folder for two files per rung about the kernels of the profiled step")
    parser.add_argument("--extra-flags", nargs=argparse.REMAINDER, default=[], help="appended to every rung (last argument)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure_rung(rung: dict[str, Any], output: Path, steps: int, warmup: int, profile_folder: Path | None) -> None:
    """Train `warmup + steps` steps in this process and write the rung's figures to `output`.

    profile_folder: for files about the main rank's profiled step; None: none.
    """
    import torch
    import torch.distributed as dist

    from megatron_vla.config.run import parse_args
    from megatron_vla.models.registry import model_family
    from megatron_vla.training.session import training_session

    config = parse_args(rung["flags"])
    with training_session(config, model_family(config.model.model_name)) as run:
        groups = run.groups
        on_gpu = groups.device.type == "cuda"
        stepper = _Stepper(run, warmup + steps + 1)
        losses = [stepper.step(stepper.fetch()) for _ in range(warmup)]
        before_timing = run.runner.counters()
        uuid = str(torch.cuda.get_device_properties(groups.device).uuid) if on_gpu else None
        with ClockLog(uuid) as clock, HostLoad() as host:
            times_ms, timed_losses = stepper.timed(steps, on_gpu)
        losses += timed_losses
        peaks_gib: list[float] = [0.0] * groups.world_size
        dist.all_gather_object(peaks_gib, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0, group=groups.host_group)
        profiled: dict[str, Any] = dict.fromkeys(PROFILED)
        if on_gpu:
            profiled, activities = _profile_step(stepper)
            if profile_folder is not None and groups.is_main:
                write_profile(profile_folder, rung["name"], activities)
        samples = config.global_batch_size(groups.world_size) / groups.world_size
        shapes = {name: list(tensor.shape) for name, tensor in stepper.last_batch.tensors().items()}
        module: Any = run.state.module
        flops = module.training_flops_per_sample(shapes)
        step_ms = statistics.median(times_ms)
        name = torch.cuda.get_device_name() if on_gpu else ""
        result = {
            "name": rung["name"],
            "flags": rung["flags"],
            "precision": _precision(config),
            "steps": steps,
            "warmup": warmup,
            "gpu": name or "none (CPU)",
            "card": uuid and uuid[-8:],
            "num_gpus": groups.world_size,
            "samples_per_step": config.global_batch_size(groups.world_size),
            "samples_per_s": round(samples / step_ms * 1e3, 2),
            "step_ms": round(step_ms, 2),
            "step_ms_min_max": [round(min(times_ms), 2), round(max(times_ms), 2)],
            "peak_memory_gib": round(max(peaks_gib), 2) if on_gpu else None,
            "reserved_memory_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2) if on_gpu else None,
            **_utilisation(flops, samples / step_ms * 1e3, name),
            **clock.figures,
            **host.figures,
            **profiled,
            **_runner_figures(run.runner.counters(), before_timing),
            "losses": [float(loss) for loss in losses[:NUM_COMPARED_LOSSES]],
            "batch": shapes,
        }
        if groups.is_main:
            output.write_text(json.dumps(result))


def _utilisation(flops: float, samples_per_s: float, gpu: str) -> dict[str, Any]:
    """Model FLOPs of one sample, and the share of the GPU's peak that `samples_per_s` of them are (None: an unknown GPU)."""
    peak = next((rate for piece, rate in PEAK_BF16_FLOPS.items() if piece in gpu), None)
    return {
        "model_tflop_per_sample": round(flops / 1e12, 3),
        "model_flop_per_sample": flops,
        "mfu": round(flops * samples_per_s / peak, 4) if peak else None,
        "mfu_peak_tflop_per_s": peak / 1e12 if peak else None,
        "mfu_peak": "dense bf16, datasheet" if peak else None,
    }


def _precision(config: Any) -> str:
    """Arithmetic of a run in words."""
    if config.optimization.fp8:
        return "fp8"
    if config.model.bf16:
        return "bf16"
    return "fp32 + bf16 autocast" if vars(config.family).get("autocast_bf16") else "fp32"


def _runner_figures(counters: dict[str, float], before_timing: dict[str, float]) -> dict[str, Any]:
    """What a graph runner counted; captures and eager steps of other shapes inside the timing would spoil it."""
    if not counters:
        return {}
    spoiling = ("graph_captures", "graph_eager_steps")
    return {"runner": counters, "spoiled_steps": sum(counters[name] - before_timing[name] for name in spoiling)}


class _Stepper:
    """Steps of one run, each on micro-batches that are on the host before its clock starts."""

    def __init__(self, run: Any, num_iterations: int):
        groups = run.groups
        self.run = run
        self.iteration = 0
        # Every process asks for the same number of steps, the profiled one included.
        self.batches = run.supply.iterator(
            0, groups.data_parallel_rank, groups.data_parallel_size, num_iterations, groups.device.type == "cuda"
        )
        self.last_batch: Any = None

    def step(self, batches: list[Any]) -> Any:
        """One optimizer step; returns its loss, still on the device."""
        state = self.run.state
        samples = self.run.config.global_batch_size(self.run.groups.world_size)
        loss = self.run.runner.step(iter(batches), state.schedule.learning_rate(self.iteration * samples)).loss
        self.iteration += 1
        return loss

    def fetch(self) -> list[Any]:
        """The micro-batches of the next step."""
        batches = [next(self.batches) for _ in range(self.run.config.num_microbatches(self.run.groups.world_size))]
        self.last_batch = batches[-1]
        return batches

    def timed(self, steps: int, on_gpu: bool) -> tuple[list[float], list[Any]]:
        """(ms, loss) of every step. The host issues one after the other and waits for none, as in training; on a GPU a step
        lasts from the end of the one before to its own end there."""
        import torch

        batches = [self.fetch() for _ in range(steps)]
        losses: list[Any] = []
        if not on_gpu:
            marks = [time.perf_counter()]
            for micro_batches in batches:
                losses.append(self.step(micro_batches))
                marks.append(time.perf_counter())
            return [(end - start) * 1e3 for start, end in itertools.pairwise(marks)], losses
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        torch.cuda.synchronize()
        events[0].record()
        for micro_batches, event in zip(batches, events[1:], strict=True):
            losses.append(self.step(micro_batches))
            event.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in itertools.pairwise(events)], losses


def _profile_step(stepper: _Stepper) -> tuple[dict[str, Any], list[DeviceActivity]]:
    """Kernels, copies, host synchronisations and graph launches of one steady step, counted; and the device's work."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    batches = stepper.fetch()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        stepper.step(batches)
        # Read by name, so that the profiler's own synchronisation at its end is told apart from the step's.
        with torch.profiler.record_function("end of step"):
            torch.cuda.synchronize()
    events = profiler.events()
    end = next(e.time_range.start for e in events if e.name == "end of step")
    on_device = device_events(events)
    copies = ("Memcpy", "Memset")
    kernels = [e for e in on_device if not e.name.startswith(copies)]
    # What a graph launches carries the number of that launch.
    launches = {e.id for e in events if e.name == "cudaGraphLaunch"}
    counts = {
        "kernels": len(kernels),
        "kernels_in_graphs": sum(e.id in launches for e in kernels),
        "copies": len(on_device) - len(kernels),
        "host_syncs": sum(e.name in HOST_SYNC_CALLS and e.time_range.start < end for e in events),
        "graph_launches": len(launches),
        **_communication(on_device),
    }
    return counts, activities_of(events)


def _communication(on_device: list[Any]) -> dict[str, float]:
    """Time in NCCL kernels, and the share of it during which no other kernel ran on this GPU."""

    def spans(of_nccl: bool) -> list[tuple[float, float]]:
        chosen = [e.time_range for e in on_device if e.name.startswith("nccl") == of_nccl]
        return sorted((r.start, r.end) for r in chosen)

    busy: list[list[float]] = []
    for start, end in spans(of_nccl=False):
        if busy and start <= busy[-1][1]:
            busy[-1][1] = max(busy[-1][1], end)
        else:
            busy.append([start, end])
    communication = spans(of_nccl=True)
    total = sum(end - start for start, end in communication)
    if total == 0:
        return {}
    hidden = sum(max(0.0, min(end, b) - max(start, a)) for start, end in communication for a, b in busy)
    return {"communication_ms": round(total / 1e3, 2), "exposed_communication_ms": round((total - hidden) / 1e3, 2)}


def run_ladder(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every rung in its own process, in order; a rung that fails is recorded with its message and the ladder goes on.

    The result is written after each rung, so that an interrupted ladder keeps what it has measured; --keep goes on with it.
    """
    ladder = json.loads(arguments.ladder.read_text())
    kept = _kept(arguments.output) if arguments.keep else {}
    results: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    for rung in ladder["rungs"]:
        if arguments.rungs and rung["name"] not in {*arguments.rungs, *kept}:
            continue
        flags = [*ladder["common_flags"], *rung["flags"], *arguments.extra_flags]
        # Present in a result only where the rung sets variables.
        variables = {"environment": rung["environment"]} if "environment" in rung else {}
        known = kept.get(rung["name"], {})
        if _is_result_of(known, rung, flags):
            results.append(known)
            for line in _kept_otherwise(known, arguments):
                print(line, flush=True)
        else:
            assignments = [f"{name}={value}" for name, value in rung.get("environment", {}).items()]
            print(f"-- {rung['name']}:", *assignments, "pretrain_vla.py", *flags, flush=True)
            results.append({**_run_rung(rung, flags, arguments), **variables, "commit": _commit()})
            cards = {r["card"] for r in results if "card" in r}
            if len(cards) > 1:
                raise SystemExit(
                    f"{arguments.output}: its rungs are of another card; ratios count on one -> run without --keep"
                )
        if "error" not in results[-1]:
            _compare(results)
            print(_line(results[-1]), flush=True)
        result = {**_environment(results), "workload": _workload(ladder, results), "rungs": results}
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _kept(output: Path) -> dict[str, dict[str, Any]]:
    """Rungs that were measured before, by name."""
    if not output.is_file():
        return {}
    return {r["name"]: r for r in json.loads(output.read_text())["rungs"] if "error" not in r}


def _is_result_of(known: dict[str, Any], rung: dict[str, Any], flags: list[str]) -> bool:
    """Whether a result is what this rung would measure."""
    asked = (flags, rung.get("environment"), rung.get("num_processes", 1))
    return (known.get("flags"), known.get("environment"), known.get("num_gpus")) == asked


def _commit() -> str | None:
    from megatron_vla.version import git_commit

    return git_commit(Path(__file__).resolve().parents[1])


def _kept_otherwise(rung: dict[str, Any], arguments: argparse.Namespace) -> list[str]:
    """A line about a kept rung that was measured otherwise than the next ones will be; none where it was not."""
    now = {"commit": _commit(), "steps": arguments.steps, "warmup": arguments.warmup}
    unknown = "not recorded"
    others = [
        f"{name} {rung.get(name, unknown)} (now {value})" for name, value in now.items() if rung.get(name, unknown) != value
    ]
    return [f"NOTE {rung['name']} is kept from another run: {', '.join(others)}"] if others else []


def _run_rung(rung: dict[str, Any], flags: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of one rung, or its error, from a process (or several) of its own."""
    with tempfile.TemporaryDirectory() as folder:
        task, output = Path(folder) / "rung.json", Path(folder) / "result.json"
        task.write_text(json.dumps({"name": rung["name"], "flags": flags, "output": str(output)}))
        processes = rung.get("num_processes", 1)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [sys.executable, *(launcher if processes > 1 else []), __file__, "--worker", str(task)]
        command += ["--steps", str(arguments.steps), "--warmup", str(arguments.warmup)]
        command += [] if arguments.profile is None else ["--profile", str(arguments.profile)]
        began = time.monotonic()
        code, stdout, stderr = _run(command, rung.get("environment", {}), arguments.rung_timeout)
        if code:
            lines = (stderr or stdout).strip().splitlines() or ["killed"]
            print("\n".join(lines[-60:]), flush=True)
            # Warnings of libraries may follow the exception; a wrong flag is told without one, in the last lines.
            last = max((n for n, line in enumerate(lines) if EXCEPTION_LINE.search(line)), default=max(0, len(lines) - 3))
            error = " ".join(lines[last:])[:500]
            return {"name": rung["name"], "flags": flags, "error": error}
        return {**json.loads(output.read_text()), "process_seconds": round(time.monotonic() - began, 1)}


def _run(command: list[str], variables: dict[str, str], timeout: float | None) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of a process; after `timeout` seconds it ends with all that it has started."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **variables}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            # torchrun ends its workers, which have sessions of their own, when it is asked to.
            os.killpg(process.pid, signal.SIGTERM)
            try:
                stdout, stderr = process.communicate(timeout=GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                stdout, stderr = process.communicate()
            return 1, stdout, f"{stderr}\nTimeoutError: not finished after {timeout:g} s (--rung-timeout)"
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            raise
    return process.returncode, stdout, stderr


def _compare(results: list[dict[str, Any]]) -> None:
    """The last rung beside earlier ones: samples/s over those of the measured rung above and of the first one, and the loss
    difference, over common steps, to the nearest one above that trained on the same samples."""
    *before, rung = results
    for name in ("loss_vs_previous", "speedup"):
        rung.pop(name, None)
    before = [r for r in before if "error" not in r]
    if before:
        above, first = before[-1], before[0]
        rung["speedup"] = {
            "previous": above["name"],
            "over_previous": round(rung["samples_per_s"] / above["samples_per_s"], 3),
            "first": first["name"],
            "over_first": round(rung["samples_per_s"] / first["samples_per_s"], 3),
        }
    alike = [r for r in before if r.get("samples_per_step") == rung.get("samples_per_step")]
    if alike:
        # A kept rung may have fewer of them.
        steps = min(len(rung["losses"]), len(alike[-1]["losses"]))
        differences = [abs(a - b) for a, b in zip(rung["losses"][:steps], alike[-1]["losses"][:steps], strict=True)]
        rung["loss_vs_previous"] = {
            "mae": sum(differences) / len(differences),
            "max": max(differences),
            "previous": alike[-1]["name"],
            "steps": steps,
        }


def _environment(results: list[dict[str, Any]]) -> dict[str, Any]:
    """What was measured on and with. The GPU is named by the rungs: asking here would put a context on it."""
    import platform
    from importlib.metadata import version

    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    versions["megatron-core"] = version("megatron-core")
    command = "python " + " ".join(sys.argv)
    return {
        "gpu": next((r["gpu"] for r in results if "gpu" in r), "unknown"),
        "num_gpus": max(r.get("num_gpus", 1) for r in results),
        "date": datetime.date.today().isoformat(),
        "versions": versions,
        "command": command,
    }


def _workload(ladder: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    from megatron_vla.config.run import parse_args

    config = parse_args(ladder["common_flags"])
    batch: dict[str, Any] = next((r["batch"] for r in results if "batch" in r), {})
    return {
        "model": f"{config.model.model_name} {config.model.model_variant}",
        "micro_batch_size": config.training.micro_batch_size,
        "cameras": config.data.mock_num_cameras,
        "prompt_tokens": config.data.mock_prompt_length,
        "first_rung_batch": batch,
    }


def _line(rung: dict[str, Any]) -> str:
    def show(value: Any, unit: str) -> str:
        return f"{value if value is not None else '-'} {unit}"

    figures = [
        show(rung["samples_per_s"], "samples/s"),
        show(rung["step_ms"], "ms"),
        show(rung["peak_memory_gib"], "GiB"),
        show(rung["mfu"], "MFU"),
        show(rung["kernels"], "kernels"),
        show(rung["host_syncs"], "host syncs"),
        show(rung["graph_launches"], "graph launches"),
    ]
    if "sm_clock_mhz" in rung:
        figures += [show(rung["sm_clock_mhz"], "MHz"), show(rung["power_w"], "W")]
    if "host_busy_cores" in rung:
        figures.append(f"{rung['host_busy_cores']} of {rung['host_cores']} cores busy")
    if "speedup" in rung:
        figures.append("x {over_previous} of {previous}, x {over_first} of {first}".format(**rung["speedup"]))
    if "loss_vs_previous" in rung:
        figures.append("mean |loss difference| {mae:.2e} to {previous} ({steps} steps)".format(**rung["loss_vs_previous"]))
    return f"   {rung['name']}: " + ", ".join(figures)


def draw(result: dict[str, Any], path: Path) -> None:
    """Bar chart of samples/s per rung."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rungs = [r for r in result["rungs"] if "samples_per_s" in r]
    figure, axes = pyplot.subplots(figsize=(9, 0.6 + 0.45 * len(rungs)))
    bars = axes.barh([r["name"] for r in rungs], [r["samples_per_s"] for r in rungs], color="#3b7dd8")
    axes.bar_label(bars, padding=3)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set_xlabel(f"samples/s on {result['gpu']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Ladder, or one rung when called with --worker."""
    arguments = parse()
    if arguments.worker:
        rung = json.loads(arguments.worker.read_text())
        measure_rung(rung, Path(rung["output"]), arguments.steps, arguments.warmup, arguments.profile)
        return
    if arguments.ladder is None or arguments.output is None:
        raise SystemExit("--ladder and --output are required")
    names = [rung["name"] for rung in json.loads(arguments.ladder.read_text())["rungs"]]
    unknown = sorted(set(arguments.rungs or ()) - set(names))
    if unknown:
        raise SystemExit(f"--rungs {' '.join(unknown)}: not in {arguments.ladder}, which has {', '.join(names)}")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    result = run_ladder(arguments)
    draw(result, arguments.output.with_suffix(".png"))
    print(f"wrote {arguments.output} and {arguments.output.with_suffix('.png')}")
    if any("error" in rung for rung in result["rungs"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
