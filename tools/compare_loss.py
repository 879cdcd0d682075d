"""Compare the losses of two runs step by step: correlation, relative error, plot; the exit status says whether they agree.

    python tools/compare_loss.py --reference bf16/logs --candidate fp8/logs --min-correlation 0.9997 --max-mean-error 0.006

A run is a metrics.jsonl (or the folder with one), or a rung of a benchmark: FILE.json#RUNG. The written JSON says what both
runs were (command, GPU, versions: from run.json beside metrics.jsonl, or from the benchmark) and which flags they share.
Exit status: 0 all thresholds hold, 1 one does not, 2 the runs cannot be compared.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from megatron_vla.config.cli import StrictParser, add_section, build_section
from megatron_vla.training.logging import METRICS_FILE
from megatron_vla.training.run_record import read_starts


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Loss comparison"""

    reference: str | None = None
    """metrics.jsonl, its folder, or BENCHMARK.json#RUNG: the run to compare with."""

    candidate: str | None = None
    """The run to judge."""

    first_iteration: int = 1
    """Leave out earlier iterations."""

    last_iteration: int | None = None
    """Leave out later iterations."""

    min_correlation: float | None = None
    """Fail when the Pearson correlation of the losses is lower."""

    max_mean_error: float | None = None
    """Fail when the mean of |candidate - reference| / |reference| is higher (0.006 = 0.6 %)."""

    max_error: float | None = None
    """Fail when the largest such error is higher."""

    output: str | None = None
    """JSON file for the figures; a plot goes beside it (.png)."""


@dataclass(frozen=True)
class Comparison:
    """Figures over the common iterations; errors are relative to the reference's loss of the same iteration."""

    num_iterations: int
    first_iteration: int
    last_iteration: int
    correlation: float
    mean_error: float
    max_error: float
    max_error_iteration: int

    def violations(self, config: CompareConfig) -> list[str]:
        """One line per threshold that does not hold; NaN holds none."""
        lines = []
        if config.min_correlation is not None and not self.correlation >= config.min_correlation:
            lines.append(f"correlation {self.correlation:.6f} is below --min-correlation {config.min_correlation}")
        if config.max_mean_error is not None and not self.mean_error <= config.max_mean_error:
            lines.append(f"mean relative error {self.mean_error:.4%} is above --max-mean-error {config.max_mean_error:.4%}")
        if config.max_error is not None and not self.max_error <= config.max_error:
            lines.append(f"largest relative error {self.max_error:.4%} is above --max-error {config.max_error:.4%}")
        return lines


def read_losses(run: str) -> dict[int, float]:
    """Iteration -> loss. Raises ValueError naming the run when there are none."""
    name, _, rung = run.partition("#")
    path = Path(name) / METRICS_FILE if Path(name).is_dir() else Path(name)
    try:
        text = path.read_text()
    except OSError as problem:
        raise ValueError(
            f"{run}: cannot be read ({problem}); give a {METRICS_FILE}, its folder, or BENCHMARK.json#RUNG"
        ) from None
    if path.suffix == ".json":
        rungs = {entry["name"]: entry for entry in json.loads(text)["rungs"]}
        if rung not in rungs or "losses" not in rungs[rung]:
            raise ValueError(f"{run}: no rung {rung!r} with losses; there are: {', '.join(rungs)}")
        return dict(enumerate(rungs[rung]["losses"], 1))
    losses: dict[int, float] = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            record = json.loads(line)
            losses.update(zip(record["iterations"], record["losses"], strict=True))
        except (json.JSONDecodeError, KeyError) as problem:
            raise ValueError(
                f"{path} line {number}: not a metrics record ({problem!r}); was the run killed? Cut it off"
            ) from None
    if not losses:
        raise ValueError(f"{path}: no losses in it")
    return losses


def read_record(run: str) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """(what the run was: command, GPU, versions, ...; its flags), None each where that was not recorded.

    `run` has been read by `read_losses`. Of a run that was resumed, the last start, with the `earlier_starts`.
    """
    name, _, rung = run.partition("#")
    path = Path(name)
    if path.suffix == ".json":
        benchmark = json.loads(path.read_text())
        entry = next(entry for entry in benchmark["rungs"] if entry["name"] == rung)
        from_rung = {key: entry[key] for key in ("gpu", "card", "commit", "environment") if key in entry}
        known = {key: benchmark[key] for key in ("command", "gpu", "date", "versions") if key in benchmark} | from_rung
        return known or None, flags_of_words(entry["flags"]) if "flags" in entry else None
    starts = read_starts(path if path.is_dir() else path.parent)
    if not starts:
        return None, None
    *earlier, last = starts
    record = {key: value for key, value in last.items() if key != "flags"}
    return {**record, **({"earlier_starts": earlier} if earlier else {})}, last["flags"]


def flags_of_words(words: Sequence[str]) -> dict[str, Any]:
    """A command line as run.json has it: flag -> value. The last one of a repeated flag counts."""
    flags: dict[str, Any] = {}
    for flag, values in _grouped(words):
        if values:
            flags[flag] = values[0] if len(values) == 1 else values
        else:
            flags["--" + flag.removeprefix("--no-").removeprefix("--")] = not flag.startswith("--no-")
    return flags


def _grouped(words: Sequence[str]) -> list[tuple[str, list[Any]]]:
    groups: list[tuple[str, list[Any]]] = []
    for word in words:
        if word.startswith("--"):
            groups.append((word, []))
        elif groups:
            groups[-1][1].append(_value(word))
    return groups


def _value(word: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def compare_flags(reference: Mapping[str, Any], candidate: Mapping[str, Any]) -> dict[str, Any]:
    """{"common": flag -> value, "different": flag -> {"reference": value, "candidate": value}}; None: not given."""
    names = sorted(reference.keys() | candidate.keys())
    pairs = {name: (reference.get(name), candidate.get(name)) for name in names}
    return {
        "common": {name: ours for name, (ours, theirs) in pairs.items() if ours == theirs},
        "different": {
            name: {"reference": ours, "candidate": theirs} for name, (ours, theirs) in pairs.items() if ours != theirs
        },
    }


def common_iterations(reference: Mapping[int, float], candidate: Mapping[int, float]) -> list[int]:
    """What both runs have, ascending."""
    return sorted(reference.keys() & candidate.keys())


def compare(reference: Mapping[int, float], candidate: Mapping[int, float]) -> Comparison:
    """Figures over the iterations that both runs have. Raises ValueError for fewer than two or for a reference loss of zero."""
    common = common_iterations(reference, candidate)
    if len(common) < 2:
        raise ValueError(f"the runs have {len(common)} iterations in common (of {len(reference)} and {len(candidate)})")
    expected, found = (np.array([losses[i] for i in common], dtype=np.float64) for losses in (reference, candidate))
    if np.any(expected == 0):
        raise ValueError(f"the reference's loss at iteration {common[int(np.argmin(np.abs(expected)))]} is zero")
    errors = np.abs(found - expected) / np.abs(expected)
    worst = int(np.argmax(np.where(np.isnan(errors), math.inf, errors)))
    spread = float(np.std(expected) * np.std(found))
    covariance = float(np.mean((expected - expected.mean()) * (found - found.mean())))
    return Comparison(
        num_iterations=len(common),
        first_iteration=common[0],
        last_iteration=common[-1],
        correlation=covariance / spread if spread else math.nan,
        mean_error=float(np.mean(errors)),
        max_error=float(errors[worst]),
        max_error_iteration=common[worst],
    )


def draw(path: Path, reference: Mapping[int, float], candidate: Mapping[int, float], names: tuple[str, str]) -> None:
    """Both curves above, their relative difference below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    common = common_iterations(reference, candidate)
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(9, 6), sharex=True, height_ratios=(2, 1))
    for losses, name, style in ((reference, names[0], "-"), (candidate, names[1], "--")):
        upper.plot(common, [losses[i] for i in common], style, label=name, linewidth=1)
    upper.set_ylabel("loss")
    upper.legend()
    lower.plot(common, [100 * (candidate[i] - reference[i]) / reference[i] for i in common], linewidth=0.8)
    lower.axhline(0, color="grey", linewidth=0.5)
    lower.set_ylabel("difference in %")
    lower.set_xlabel("iteration")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: Sequence[str]) -> int:
    """Print the figures, write them, judge them."""
    parser = StrictParser(description=(__doc__ or "").split("\n")[0])
    add_section(parser, CompareConfig)
    config: CompareConfig = build_section(CompareConfig, parser.parse_flags(arguments))
    if config.reference is None or config.candidate is None:
        parser.error("--reference and --candidate are needed")
    last = config.last_iteration if config.last_iteration is not None else math.inf
    try:
        reference, candidate = (
            {i: loss for i, loss in read_losses(run).items() if config.first_iteration <= i <= last}
            for run in (config.reference, config.candidate)
        )
        figures = compare(reference, candidate)
        records = [read_record(run) for run in (config.reference, config.candidate)]
    except ValueError as problem:
        print(f"cannot compare: {problem}", file=sys.stderr)
        return 2
    violations = figures.violations(config)
    print(
        f"{figures.num_iterations} iterations ({figures.first_iteration} to {figures.last_iteration}): "
        f"Pearson {figures.correlation:.6f}, mean relative error {figures.mean_error:.4%}, "
        f"largest {figures.max_error:.4%} at iteration {figures.max_error_iteration}"
    )
    for line in violations:
        print(f"FAILED: {line}")
    if config.output is not None:
        path = Path(config.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {**asdict(figures), "reference": config.reference, "candidate": config.candidate, "failed": violations}
        content["runs"] = {"reference": records[0][0], "candidate": records[1][0]}
        flags = [given for _, given in records if given is not None]
        content["flags"] = compare_flags(*flags) if len(flags) == 2 else None
        common = common_iterations(reference, candidate)
        losses = {name: [run[i] for i in common] for name, run in (("reference", reference), ("candidate", candidate))}
        content["losses"] = {"iteration": common, **losses}
        path.write_text(json.dumps(content, indent=1) + "\n")
        draw(path.with_suffix(".png"), reference, candidate, (config.reference, config.candidate))
        print(f"wrote {path} and {path.with_suffix('.png')}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
