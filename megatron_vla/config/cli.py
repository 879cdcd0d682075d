"""Dataclass sections <-> flat argparse flags.

A section is a frozen dataclass: the annotation makes the parser, the string under a field is its help, the class docstring
titles the group. Nothing else in this project declares a flag.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import itertools
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, NoReturn


def flag_name(field_name: str) -> str:
    """`fp8_min_dim` -> `--fp8-min-dim`: the only spelling a field has."""
    return "--" + field_name.replace("_", "-")


@cache
def field_help(section: type) -> dict[str, str]:
    """Help text of every field of `section`: the string literal that follows it in the source, its own or a parent's."""
    inherited = {
        k: v for parent in section.__bases__ if dataclasses.is_dataclass(parent) for k, v in field_help(parent).items()
    }
    return {**inherited, **_own_help(section)}


def _own_help(section: type) -> dict[str, str]:
    tree = ast.parse(inspect.getsource(section).lstrip())
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    texts: dict[str, str] = {}
    for node, following in itertools.pairwise(body):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            texts[node.target.id] = " ".join(str(following.value.value).split())
    return texts


def _argument_options(annotation: Any, where: str) -> dict[str, Any]:
    """argparse keywords for one annotation; raises TypeError at import for a type that no flag can express."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        if len(inner) == 1:
            return _argument_options(inner[0], where)
    if annotation is bool:
        return {"action": argparse.BooleanOptionalAction}
    if annotation in (int, float, str):
        return {"type": annotation}
    if origin is Literal:
        choices = typing.get_args(annotation)
        return {"type": type(choices[0]), "choices": choices}
    if origin is tuple:
        element, ellipsis = typing.get_args(annotation)
        if ellipsis is Ellipsis:
            return {**_argument_options(element, where), "nargs": "*"}
    raise TypeError(f"{where}: no flag can express the type {annotation!r}")


def section_title(section: type) -> str:
    """Title of a section's group of flags: its docstring."""
    return " ".join((section.__doc__ or section.__name__).split())


def add_section(parser: argparse.ArgumentParser, section: type) -> None:
    """Add one group of flags. Absent flags stay absent in the namespace, so that 'given by the user' is known."""
    group = parser.add_argument_group(section_title(section))
    annotations = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        options = _argument_options(annotations[field.name], f"{section.__name__}.{field.name}")
        text = field_help(section).get(field.name, "").replace("%", "%%")
        group.add_argument(
            flag_name(field.name),
            dest=field.name,
            default=argparse.SUPPRESS,
            help=f"{text} (default: {_default_text(field)})",
            **options,
        )


def _default_text(field: dataclasses.Field[Any]) -> str:
    if field.default is None:
        return "not set"
    if isinstance(field.default, tuple):
        return " ".join(map(str, field.default)) or "none"
    return str(field.default)


class StrictParser(argparse.ArgumentParser):
    """No abbreviations; an unknown flag is an error that names the nearest known ones."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.HelpFormatter, **options)

    def parse_flags(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Field name -> value of the flags that were given, or exit with status 2 naming the nearest for each unknown."""
        parsed, unknown = self.parse_known_args(arguments)
        if unknown:
            known = [o for a in self._actions for o in a.option_strings if o.startswith("--")]
            hints = []
            for word in unknown:
                near = difflib.get_close_matches(word.split("=")[0], known, n=3)
                hints.append(f"{word}" + (f" (did you mean {', '.join(near)}?)" if near else ""))
            self.error("unknown argument(s): " + "; ".join(hints))
        return vars(parsed)

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and the message alone: argparse would first print the usage of 150 flags."""
        self.exit(2, f"{self.prog}: error: {message}\n(all flags: {self.prog} --help)\n")


def build_section(section: type, given: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Any:
    """Section from the flags that were given, over `defaults` (a variant's), over the dataclass defaults."""
    names = {f.name for f in dataclasses.fields(section)}
    values = {k: v for k, v in (defaults or {}).items() if k in names}
    values.update({k: v for k, v in given.items() if k in names})
    return section(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def to_flags(section: Any) -> list[str]:
    """The command line that rebuilds `section` (every field that is not None)."""
    words: list[str] = []
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        name = flag_name(field.name)
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(name if value else name.replace("--", "--no-", 1))
        elif isinstance(value, tuple):
            words += [name, *map(str, value)]
        else:
            words += [name, str(value)]
    return words
