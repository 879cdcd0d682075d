"""Markdown table of benchmarks/*.json, and with --write the same between the markers in README.md.

python tools/benchmark_table.py --write
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- benchmarks: begin (make docs) -->", "<!-- benchmarks: end -->"


def table(folder: Path) -> str:
    """One row per rung of every ladder in `folder`; figures are copied, never computed here."""
    lines = [
        "| run | GPU | precision | samples/s | step ms | peak GiB | MFU | kernels / step | log |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for path in sorted(folder.glob("*_ladder.json")):
        result = json.loads(path.read_text())
        lines += [_row(rung, result, path.name) for rung in result["rungs"] if "samples_per_s" in rung]
    return "\n".join(lines)


def _row(rung: dict[str, Any], result: dict[str, Any], log: str) -> str:
    mfu = f"{100 * rung['mfu']:.1f} %" if rung["mfu"] else "-"
    cells = [
        rung["name"].replace("_", " "),
        result["gpu"],
        rung["precision"],
        rung["samples_per_s"],
        rung["step_ms"],
        rung["peak_memory_gib"],
        mfu,
        rung["kernels"],
        f"[{log}](benchmarks/{log})",
    ]
    return "| " + " | ".join("-" if cell is None else str(cell) for cell in cells) + " |"


def insert(readme: str, content: str) -> str:
    """`readme` with everything between the markers replaced; raises ValueError when the markers are missing."""
    if BEGIN not in readme or END not in readme:
        raise ValueError(f"README.md: the markers {BEGIN} and {END} are missing; put them where the table belongs")
    head, rest = readme.split(BEGIN, 1)
    return f"{head}{BEGIN}\n{content}\n{END}{rest.split(END, 1)[1]}"


def main() -> None:
    """Print the table, or write it into README.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the table in README.md")
    content = table(ROOT / "benchmarks")
    if parser.parse_args().write:
        readme = ROOT / "README.md"
        readme.write_text(insert(readme.read_text(), content))
    else:
        print(content)


if __name__ == "__main__":
    main()
