"""A table of all settings of `iep-train`: type, default, meaning, and the models that use them.

`docs/settings.md` is this table of all models: python -m iep.cli.settings > docs/settings.md
"""

import ast
import dataclasses
import inspect
import typing
from collections.abc import Iterator
from textwrap import indent, wrap
from typing import Any

import click

from iep import config
from iep.config import MODELS, SECTIONS, Config, to_dict

Setting = tuple[str, str, str, str, tuple[str, ...]]
"""The dotted name, the type, the default and the meaning of a setting, and the models that use it."""


def settings(model: str | None = None) -> Iterator[Setting]:
    """Yield the settings that a model uses, or those of all models, in the order of `Config` and of its sections."""
    meanings, defaults = _meanings(), to_dict(Config())
    for field in dataclasses.fields(Config):
        models = field.metadata.get("models", SECTIONS.get(field.name, MODELS))
        if model is not None and model not in models:
            continue
        parts = dataclasses.fields(field.default) if dataclasses.is_dataclass(field.default) else [None]
        for part in parts:
            own, name = (Config, field.name) if part is None else (type(field.default), f"{field.name}.{part.name}")
            which = part or field
            default = defaults[field.name]
            yield (
                name,
                _kind(typing.get_type_hints(own)[which.name], which.metadata.get("choices")),
                _shown(default if part is None else default[part.name]),
                next(
                    meanings[each.__name__, which.name]
                    for each in own.__mro__
                    if (each.__name__, which.name) in meanings
                ),
                models,
            )


def _meanings() -> dict[tuple[str, str], str]:
    """Return the docstrings of the settings, each of which follows its field in `config.py`."""
    found = {}
    for each in ast.parse(inspect.getsource(config)).body:
        if isinstance(each, ast.ClassDef):
            for field, text in zip(each.body, each.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    found[each.name, ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return found


def _kind(kind: Any, choices: tuple[str, ...] | None) -> str:
    if choices is not None:
        return "\\|".join(choices)
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        inner = {_kind(each, None) for each in arguments if each is not Ellipsis}
        return f"list of {'pairs' if typing.get_origin(arguments[0]) is tuple else inner.pop() + 's'}"
    names = {int: "integer", float: "number", bool: "true or false", str: "text", type(None): "none"}
    return names.get(arguments[0] if type(None) in arguments else kind, "mapping")


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value) or "none"


def as_text(model: str | None) -> str:
    """Return the table for a terminal: a line for each setting, and its meaning below."""
    lines = []
    for name, kind, default, meaning, models in settings(model):
        used = "" if model is not None or models == MODELS else f"  [{', '.join(models)}]"
        lines += [
            f"{name}  ({kind.replace(chr(92), '')}; default: {default}){used}",
            indent("\n".join(wrap(meaning, 110)), "    "),
        ]
    return "\n".join(lines)


def as_markdown() -> str:
    """Return the page `docs/settings.md`."""
    rows = [
        f"| `{name}` | {kind} | {default} | {meaning} | {'all' if models == MODELS else ', '.join(models)} |"
        for name, kind, default, meaning, models in settings()
    ]
    head = "# Settings\n\nThe settings of `iep-train`, as `iep-train --help-settings [MODEL]` prints them. "
    head += "[The guide](guide.md#settings) explains where\nthey are given.\n\n"
    return head + "\n".join(["| setting | type | default | meaning | models |", "|---|---|---|---|---|", *rows])


if __name__ == "__main__":
    click.echo(as_markdown())
