"""The bars of this repository, measured: linter, formatter, types, lengths, annotations, fresh documents, forbidden things."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.benchmark_table import insert, table

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 120
MIN_ANNOTATED_SHARE = 0.95
MAX_FILE_BYTES = 500_000
FORBIDDEN_FILE_NAMES = re.compile(r"^(utils?|misc|helpers?|common|base_.*|global_vars)\.py$")
# Whole-program state that Megatron's users know and that this project does without, and silent fallbacks.
FORBIDDEN_CODE = re.compile(
    r"\bget_args\(\)|^\s*global \w|^\s*except:|strict=False\)|getattr\((config|self\.config|args), ", re.M
)
# Loading is always strict; zip(strict=False) is another matter.
ALLOWED_CODE = re.compile(r"zip\([^)]*strict=False\)")
PRODUCT = ("megatron_vla", "tools", "kernels", "pretrain_vla.py", "setup.py")


def tracked_files() -> list[Path]:
    """What is in git, or about to be; all files outside hidden folders where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        found = (p for p in ROOT.rglob("*") if p.is_file())
        return [p for p in found if not any(part.startswith(".") for part in p.relative_to(ROOT).parts)]
    return [ROOT / line for line in result.stdout.splitlines() if (ROOT / line).is_file()]


def python_files(*folders: str) -> list[Path]:
    """Tracked Python files below `folders` (all, if none is named)."""
    files = [p for p in tracked_files() if p.suffix == ".py"]
    return [p for p in files if not folders or p.relative_to(ROOT).parts[0] in folders]


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def run_tool(*words: str) -> None:
    """Fail with the tool's output when it is not content."""
    result = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


@pytest.mark.parametrize("words", [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)], ids=" ".join)
def test_tool_is_content(words: tuple[str, ...]) -> None:
    run_tool(*words)


def test_files_are_short() -> None:
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in python_files()}
    assert not {name: n for name, n in lengths.items() if n > MAX_FILE_LINES}
    product = sorted(len(p.read_text().splitlines()) for p in python_files(*PRODUCT) if p.name != "__init__.py")
    assert product[len(product) // 2] <= 220, "the median file is longer than 220 lines"


def test_functions_are_short() -> None:
    lengths = {
        f"{path.relative_to(ROOT)}:{f.lineno} {f.name}": (f.end_lineno or f.lineno) - f.lineno + 1
        for path in python_files(*PRODUCT)
        for f in functions(path)
    }
    assert not {name: n for name, n in lengths.items() if n > MAX_FUNCTION_LINES}
    ordered = sorted(lengths.values())
    assert ordered[int(0.95 * len(ordered))] <= 60, "more than 5 % of the functions are longer than 60 lines"


def test_functions_are_annotated() -> None:
    bare, total = [], 0
    for path in python_files(*PRODUCT):
        for function in functions(path):
            names = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            parameters = [a for a in names if a.arg not in ("self", "cls")]
            complete = all(a.annotation for a in parameters) and (function.returns or function.name == "__init__")
            total += 1
            if not complete:
                bare.append(f"{path.relative_to(ROOT)}:{function.lineno} {function.name}")
    assert total and 1 - len(bare) / total >= MIN_ANNOTATED_SHARE, bare


def test_nothing_forbidden_in_the_code() -> None:
    found = []
    for path in python_files("megatron_vla", "tools", "pretrain_vla.py"):
        text = ALLOWED_CODE.sub("", path.read_text())
        for match in FORBIDDEN_CODE.finditer(text):
            found.append(f"{path.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1} {match.group().strip()}")
    assert not found


def test_no_leftovers_in_any_text() -> None:
    """No path of one person's machine, no note to self."""
    leftovers = re.compile(r"(?<![\w.:/-])/(?:home|root|work|Users)/[\w.]+|\bFIXME\b")
    found = []
    for path in tracked_files():
        if path.suffix in (".py", ".md", ".sh", ".sbatch", ".toml", ".json", ".yml", ".cu", "") and path != Path(__file__):
            for match in leftovers.finditer(path.read_text(errors="replace")):
                found.append(f"{path.relative_to(ROOT)}: {match.group()}")
    assert not found


def test_no_drawer_for_everything() -> None:
    names = [str(p.relative_to(ROOT)) for p in python_files() if FORBIDDEN_FILE_NAMES.match(p.name)]
    assert not names


def test_only_the_core_touches_megatron_core() -> None:
    """Calls to megatron-core live in parallel/ and the optimizer; megatron.training is never imported."""
    found = []
    for path in python_files("megatron_vla", "tools", "pretrain_vla.py"):
        for line in re.findall(r"^\s*(?:from|import) (megatron\.\S+)", path.read_text(), flags=re.M):
            place = str(path.relative_to(ROOT))
            if not place.startswith("megatron_vla/parallel/") and place != "megatron_vla/training/optimizer.py":
                found.append(f"{place}: {line}")
            assert not line.startswith("megatron.training"), place
    assert not found


def test_no_large_file() -> None:
    sizes = {str(p.relative_to(ROOT)): p.stat().st_size for p in tracked_files()}
    assert not {name: size for name, size in sizes.items() if size > MAX_FILE_BYTES}


def test_entry_point_is_short() -> None:
    assert len((ROOT / "pretrain_vla.py").read_text().splitlines()) < 80


def test_the_table_of_the_readme_is_fresh() -> None:
    readme = (ROOT / "README.md").read_text()
    assert insert(readme, table(ROOT / "benchmarks")) == readme, "run: make docs"


def test_links_of_documents_lead_somewhere() -> None:
    broken = []
    for path in (p for p in tracked_files() if p.suffix == ".md"):
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", path.read_text()):
            if not (path.parent / target).exists():
                broken.append(f"{path.relative_to(ROOT)}: {target}")
    assert not broken


def test_documents_name_existing_commands() -> None:
    """`make X` and `tools/X.py` in the documents exist."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    wrong = []
    for path in (p for p in tracked_files() if p.suffix == ".md" and p.name != "flags.md"):
        text = path.read_text()
        wrong += [f"{path.name}: make {t}" for t in re.findall(r"`make ([a-z-]+)", text) if t not in targets]
        wrong += [f"{path.name}: {t}" for t in re.findall(r"\b(tools/\w+\.py)", text) if not (ROOT / t).exists()]
    assert not wrong


def test_changelog_says_whether_numerics_changed() -> None:
    entries = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)[1:]
    assert entries
    assert all(re.search(r"numerics changed: (yes|no)", entry, flags=re.I) for entry in entries)
