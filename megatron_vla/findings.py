"""Findings: what a check has to say, collected so that one run reports everything that is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One thing that a check found.

    `where` names the flag, file, episode, frame, key or rank; `what` says what was found there; `fix` says what to do.
    """

    severity: Literal["error", "warning"]
    where: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.severity.upper()} {self.where}: {self.what} -> {self.fix}"


def error(where: str, what: str, fix: str) -> Finding:
    """A finding that stops the run."""
    return Finding("error", where, what, fix)


def warning(where: str, what: str, fix: str) -> Finding:
    """A finding that is printed and does not stop the run."""
    return Finding("warning", where, what, fix)


def too_small(bounds: Iterable[tuple[str, float | None, float]]) -> Iterator[Finding]:
    """Errors of flags below their least value: (flag, value or None where it is not set, least)."""
    for flag, value, least in bounds:
        if value is not None and value < least:
            yield error(flag, f"{value:g} is too small", f"use {flag} {least:g} or more")


class CheckError(ValueError):
    """Raised with every error found, after all checks ran (never one at a time)."""

    def __init__(self, findings: Iterable[Finding]):
        self.findings = tuple(f for f in findings if f.severity == "error")
        lines = "\n".join(f"  {number}. {finding}" for number, finding in enumerate(self.findings, 1))
        super().__init__(f"{len(self.findings)} problem(s) found before start:\n{lines}")


def raise_errors(findings: Iterable[Finding]) -> None:
    """Raise `CheckError` if any finding is an error."""
    errors = [f for f in findings if f.severity == "error"]
    if errors:
        raise CheckError(errors)
