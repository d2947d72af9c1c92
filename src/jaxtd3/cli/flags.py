"""Command-line flags: one per config field, parsed by tyro, every mistake told in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from jaxtd3.config.sections import SECTIONS
from jaxtd3.errors import UserError, nearest

HIDDEN = {  # --env, --reward and --reward-first stand for them
    "env": ("name", "weights", "source_sha256"),
    "loop": ("curriculum_weights",),
}
TITLES = {"env": "environment", "agent": "learner"}  # of the groups in --help, where they differ

T = TypeVar("T")
TRUE, FALSE = ("True", "true", "on", "1"), ("False", "false", "off", "0")


def section_class(section: str, values: Mapping[str, Any]) -> type:
    """The section as a dataclass of flags: the same names, `values` shown, nothing validated."""
    import tyro

    members, kinds = [], get_type_hints(SECTIONS[section])
    for f in dataclasses.fields(SECTIONS[section]):
        if f.name in HIDDEN.get(section, ()):
            continue
        kind: Any = kinds[f.name]
        value = values.get(f.name, f.default)
        shown = {True: "on", False: "off"}[value] if kind is bool else value
        metavar = None
        if get_origin(kind) is Literal:
            kind, metavar = str, "{" + ",".join(get_args(kind)) + "}"
        elif f.default is None:
            metavar = get_args(kind)[0].__name__.upper()
        extra = tyro.conf.arg(
            help=f.metadata["help"],
            help_behavior_hint="" if value is None else f"({shown})",
            metavar=metavar,
        )
        members.append((f.name, Annotated[kind, extra], f.default))
    cls = dataclasses.make_dataclass(section.capitalize(), members, frozen=True)
    cls.__doc__ = SECTIONS[section].__doc__
    return cls


def with_sections(cls: type, values: Mapping[str, Any] | None = None) -> type:
    """`cls` with one more field per config section, so that every setting is a flag.

    `values`, by the fields' names, are shown by --help as what is chosen without the flags.
    """
    members = []
    for section in SECTIONS:
        made = section_class(section, values or {})
        title = TITLES.get(section, section)
        members.append((title, made, dataclasses.field(default_factory=made)))
    joined = dataclasses.make_dataclass(cls.__name__, members, bases=(cls,), frozen=True)
    joined.__doc__ = cls.__doc__
    return joined


def flag_kinds(cls: Any) -> dict[str, Any]:
    """Flag name (underscored) -> type, for `cls` and the sections in it."""
    kinds: dict[str, Any] = {}
    for name, kind in get_type_hints(cls).items():
        kinds |= flag_kinds(kind) if dataclasses.is_dataclass(kind) else {name: kind}
    return kinds


def parse(cls: type[T], argv: Sequence[str], prog: str) -> tuple[T, dict[str, Any]]:
    """The arguments, and of the flat flags those that were given, by field name."""
    import tyro

    kinds = flag_kinds(cls)
    booleans = {name for name, kind in kinds.items() if kind is bool}
    tokens, given = canonical(argv, set(kinds), booleans)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = tyro.cli(cls, args=tokens, prog=prog, config=(tyro.conf.OmitArgPrefixes,))
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(one_line(said.getvalue())) from None
    values = values_of(args)
    return args, {name: values[name] for name in given}


def canonical(
    argv: Sequence[str], known: set[str], booleans: set[str]
) -> tuple[list[str], list[str]]:
    """Tokens that tyro understands, and the names given.

    Unknown flags are refused; `--flag=True` (as `wandb agent` writes it) becomes `--flag`.
    """
    tokens: list[str] = []
    given: dict[str, None] = {}
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if not token.startswith("--") or token == "--help":
            tokens.append(token)
            continue
        flag, _, value = token.partition("=")
        name = flag[2:].replace("-", "_")
        off = name.removeprefix("no_") in booleans and name.startswith("no_")
        base = name.removeprefix("no_") if off else name
        if base not in known:
            near = nearest("flag", flag, ["--" + k.replace("_", "-") for k in sorted(known)])
            raise UserError(near)
        given[base] = None
        if base in booleans:
            if not value and rest and rest[0] in TRUE[:-1] + FALSE[:-1]:
                value = rest.pop(0)
            if value and value not in TRUE + FALSE:
                raise UserError(f"{flag}={value} is neither on nor off")
            on = (value not in FALSE) != off
            tokens.append(("--" if on else "--no-") + base.replace("_", "-"))
        else:
            tokens.append(token)
    return tokens, list(given)


def one_line(text: str) -> str:
    """The message in tyro's error box: what stands between its first two rules."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    blocks = re.split(r"[^\n]*(?:─{3}|-{5})[^\n]*", plain)  # without UTF-8 it draws with hyphens
    words = (blocks[1] if len(blocks) > 1 else plain).replace("│", " ").split()
    joined = " ".join(words).removeprefix("Error parsing ")
    of_union = re.match(r"(\S+: )no type matching.*- <class '\w+'>: (.+)$", joined)
    if of_union:
        joined = of_union[1] + of_union[2]
    return re.sub(r"^Missing from [^:]*:", "missing", joined) or "the arguments cannot be read"


def values_of(args: Any) -> dict[str, Any]:
    """Every flag's value by name, those of the sections among them."""
    values: dict[str, Any] = {}
    for f in dataclasses.fields(args):
        value = getattr(args, f.name)
        values |= values_of(value) if dataclasses.is_dataclass(value) else {f.name: value}
    return values
