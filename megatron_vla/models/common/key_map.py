"""A declarative language for parameter names: released layouts <-> this project's names.

A family declares renames, ties, ignored names and accepted spellings as data; both directions of a conversion come from the
same declaration. In a pattern '*' stands for one dotted segment and is carried over in order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class Rename:
    """Tensors under module `theirs` are called `ours` here; `permute` turns their axes into ours (JAX kernels).

    part: (number, count) when ours is one of `count` equal blocks of rows of theirs (fused projections). Such renames come in
    full sets, one for each part.
    """

    theirs: str
    ours: str
    permute: tuple[int, ...] | None = None
    part: tuple[int, int] | None = None

    def our_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape here of a tensor of `shape` there."""
        if self.permute is not None and len(shape) == len(self.permute):
            shape = tuple(shape[axis] for axis in self.permute)
        return shape if self.part is None else (shape[0] // self.part[1], *shape[1:])

    def to_ours(self, tensor: Tensor) -> Tensor:
        """Their layout of axes -> ours."""
        if self.part is not None:
            number, count = self.part
            # Own memory: files refuse tensors that share theirs.
            return tensor.chunk(count)[number].clone()
        return tensor if self.permute is None else tensor.permute(self.permute).contiguous()

    def to_theirs(self, tensor: Tensor) -> Tensor:
        """Our layout of axes -> theirs (of a part: its own rows, unchanged)."""
        if self.permute is None:
            return tensor
        inverse = [self.permute.index(axis) for axis in range(len(self.permute))]
        return tensor.permute(inverse).contiguous()


@dataclass(frozen=True)
class Tie:
    """Several released names of one tensor. A file holds one or more; `names[0]` is the one that the model reads.

    When a file holds differing copies, the first wins and the other is kept as an extra, with a printed line.
    """

    names: tuple[str, ...]


@dataclass(frozen=True)
class Ignored:
    """Released tensors that the model does not have; kept as extras so that converting back loses nothing."""

    pattern: str
    reason: str


@dataclass(frozen=True)
class Foreign:
    """Names that mark a checkpoint of another model: the regular expression `found`, and what to tell the user."""

    found: str
    problem: str


@dataclass(frozen=True)
class Spelling:
    """An older or newer spelling of names: the regular expression `found` is replaced by `canonical` before anything else."""

    found: str
    canonical: str


@dataclass(frozen=True)
class Located:
    """Where one released tensor belongs: the rule that matched and the name here."""

    ours: str
    rename: Rename


@dataclass(frozen=True, kw_only=True)
class KeyMap:
    """The declaration of one released layout's names (without an outer prefix such as LeRobot's `model.`)."""

    renames: tuple[Rename, ...]
    ties: tuple[Tie, ...] = ()
    ignored: tuple[Ignored, ...] = ()
    spellings: tuple[Spelling, ...] = ()
    foreign: tuple[Foreign, ...] = ()

    def foreign_because(self, names: Iterable[str]) -> str | None:
        """What is known about a checkpoint with these names that is not of this family; None: nothing."""
        return next((rule.problem for name in names for rule in self.foreign if re.search(rule.found, name)), None)

    def canonical(self, name: str) -> str:
        """`name` in the layout's own current spelling."""
        for spelling in self.spellings:
            name = re.sub(spelling.found, spelling.canonical, name)
        return name

    def ignored_because(self, name: str) -> str | None:
        """Why the model does not have the canonical released `name`, or None when it should."""
        for rule in self.ignored:
            if _compiled(rule.pattern, capture=False).fullmatch(name):
                return rule.reason
        return None

    def to_ours(self, name: str) -> Located | None:
        """Where the canonical released `name` belongs, or None when no rule knows it."""
        return next(iter(self.all_ours(name)), None)

    def all_ours(self, name: str) -> list[Located]:
        """Everything that the canonical released `name` holds: the parts of a fused tensor, else at most one."""
        found: list[Located] = []
        for rename, theirs, _ in self._rules:
            match = theirs.fullmatch(name)
            if match:
                found.append(Located(_filled(rename.ours, match), rename))
                if rename.part is None:
                    break
        return found

    def to_theirs(self, name: str) -> Located | None:
        """The released name of our `name` (in `Located.ours`), or None when no rule knows it."""
        for rename, _, ours in self._rules:
            match = ours.fullmatch(name)
            if match:
                return Located(_filled(rename.theirs, match), rename)
        return None

    def tie_of(self, name: str) -> Tie | None:
        """The tie that the canonical released `name` is part of."""
        return next((tie for tie in self.ties if name in tie.names), None)

    @cached_property
    def _rules(self) -> Sequence[tuple[Rename, re.Pattern[str], re.Pattern[str]]]:
        return [(r, _compiled(r.theirs, capture=True), _compiled(r.ours, capture=True)) for r in self.renames]


def _compiled(pattern: str, *, capture: bool) -> re.Pattern[str]:
    """Pattern -> regular expression for a module and everything below it."""
    segment = r"([^.]+)" if capture else r"[^.]+"
    body = r"\.".join(segment if s == "*" else re.escape(s) for s in pattern.split("."))
    return re.compile(body + r"((?:\..+)?)")


def _filled(pattern: str, match: re.Match[str]) -> str:
    """`pattern` with its stars filled by the match's segments, and the rest of the name appended."""
    *segments, rest = match.groups()
    remaining = iter(segments)
    return ".".join(next(remaining) if s == "*" else s for s in pattern.split(".")) + rest
