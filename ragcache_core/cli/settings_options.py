"""Options generated from a settings class: names, types, defaults and help of its fields."""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click

from ragcache_core.sim.options import ROUTINGS, SIMULATED_POLICIES, SimulationOptions

_Command = TypeVar("_Command", bound=Callable[..., Any])


class Listed(click.ParamType[Any]):
    """Comma-separated values, each once if they are a set: of ``choices``, or numbers, which ``least`` bounds."""

    name = "list"

    def __init__(
        self,
        choices: Sequence[str] = (),
        number: type[int | float] = int,
        *,
        least: float | None = None,
        is_set: bool = True,
    ) -> None:
        self._choices = tuple(choices)
        self._number = number
        self._least = least
        self._is_set = is_set

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        """Return the values."""
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in value.split(",")]
        for word in words:
            if self._choices and word not in self._choices:
                self.fail(f"{word!r} is not one of {', '.join(self._choices)}.", param, ctx)
        try:
            values = words if self._choices else [self._number(word) for word in words]
        except ValueError:
            self.fail(f"{value!r} are no numbers with commas between them.", param, ctx)
        if self._least is not None and not all(self._least <= number < math.inf for number in values):
            self.fail(f"{value!r} are not all finite numbers of at least {self._least:g}.", param, ctx)
        return tuple(dict.fromkeys(values) if self._is_set else values)


def settings_options(
    settings: type,
    *names: str,
    keeps_unset: bool = False,
    **changes: Mapping[str, Any],
) -> Callable[[_Command], _Command]:
    """Return a decorator that adds an option for each field of a settings class.

    Args:
        settings: a dataclass or a pydantic model whose fields have docstrings. The help is a field's first sentence,
            and the one that begins with "By default".
        names: of the fields; all, if none are named.
        keeps_unset: whether an option that is not given is None, and the help alone has the default.
        changes: by the field's name, arguments for :func:`click.option` that its type does not tell; ``flag`` is the
            option's name where that is another than the field's.
    """
    hints, helps = get_type_hints(settings), field_helps(settings)

    def decorate(command: _Command) -> _Command:
        for name in reversed(names or tuple(helps)):
            own = dict(changes.get(name, {}))
            flag = own.pop("flag", "--" + name.replace("_", "-"))
            default, (kind, metavar) = _default(settings, name), _kind(hints[name])
            arguments: dict[str, Any] = {"type": kind, "metavar": metavar, "help": helps[name]}
            shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
            if not keeps_unset:
                arguments |= {"default": shown, "show_default": default is not None}
            elif shown not in (None, "") and "By default" not in helps[name]:
                arguments["help"] += f" [default: {shown:g}]" if isinstance(shown, float) else f" [default: {shown}]"
            command = click.option(flag, name, **{**arguments, **own})(command)
        return command

    return decorate


@cache
def field_helps(settings: type) -> Mapping[str, str]:
    """Return the help texts of a settings class's fields, from their docstrings."""
    (body,) = (node for node in ast.parse(dedent(inspect.getsource(settings))).body if isinstance(node, ast.ClassDef))
    helps = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if is_text and isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            helps[field.target.id] = _help(str(text.value.value))  # type: ignore[attr-defined]
    return helps


def _help(text: str) -> str:
    plain = re.sub(r":\w+:`~?([^`<]*?)(\s*<[^>]*>)?`", r"\1", " ".join(text.split()))
    sentences = re.split(r"(?<=\.) (?=[A-Z0-9])", plain.replace("``", "").replace("**", ""))
    return " ".join(sentence for i, sentence in enumerate(sentences) if not i or sentence.startswith("By default"))


def _default(settings: type, name: str) -> Any:
    if is_dataclass(settings):
        return settings.__dataclass_fields__[name].default
    return settings.model_fields[name].get_default()  # type: ignore[attr-defined]


def _kind(hint: Any) -> tuple[Any, str | None]:
    """Return the click type of an option, and its metavar."""
    if get_origin(hint) in (Union, UnionType):
        return _kind(next(each for each in get_args(hint) if each is not type(None)))
    if get_origin(hint) is Literal:
        return click.Choice(get_args(hint)), None
    if get_origin(hint) is tuple:
        return Listed(number=get_args(hint)[0], is_set=False), "X,X,..."
    if hint in (int, float, bool):
        return hint, {int: "N", float: "X"}.get(hint)
    if isinstance(hint, type) and issubclass(hint, int | Path):
        return str, "SIZE" if issubclass(hint, int) else "PATH"
    return str, "TEXT"


def simulation_options(*names: str) -> Callable[[_Command], _Command]:
    """Return a decorator that adds the options of SimulationOptions: all, or the named ones."""
    return settings_options(
        SimulationOptions,
        *names,
        policy={"type": click.Choice(SIMULATED_POLICIES), "metavar": None},
        cost_model={"metavar": "NAME|FILE"},
        search={"metavar": "FILE"},
        overlaps_transfers={"flag": "--overlap-transfers/--no-overlap-transfers"},
        routing={"type": click.Choice(ROUTINGS), "metavar": None},
    )
