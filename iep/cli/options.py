"""What the options of several commands are made of, and those for where the engine's functions run."""

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from iep.cli.common import Command
from iep.errors import InputError

PICTURES = (".png", ".svg", ".pdf")


class PicturePath(click.Path):
    """A file that a picture is written to; its ending says which kind."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = super().convert(value, param, ctx)
        if path.suffix.lower() not in PICTURES:
            self.fail(f"{str(path)!r} does not end in one of {', '.join(PICTURES)}", param, ctx)
        return path


class CommaList(click.ParamType):
    """A comma list, each item converted by `item`; a tuple without repetitions."""

    name = "list"

    def __init__(self, item: click.ParamType):
        self.item = item

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple:
        if isinstance(value, tuple):
            return value
        return tuple(dict.fromkeys(self.item.convert(part.strip(), param, ctx) for part in value.split(",")))


class RecordedCommand(Command):
    """A command that knows the arguments it was given, for its report."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["command"] = shlex.join(["iep-bench", ctx.info_name, *args])
        return super().parse_args(ctx, args)


def parsed(option: str, parse: Callable[[], Any]) -> Any:
    """What `parse` returns; what it refuses is a wrong flag."""
    try:
        return parse()
    except InputError as error:
        raise click.BadParameter(str(error), param_hint=option) from None


class DeviceList(click.ParamType):
    """A comma list of devices; one may stand in it several times."""

    name = "devices"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        names = value if isinstance(value, tuple) else tuple(name.strip() for name in value.split(","))
        if not all(names):
            self.fail(f"{value!r} is not a comma list of devices, such as cuda:0,cuda:1", param, ctx)
        return names


def placement_options(command: Callable) -> Callable:
    """Add `--placement` and `--devices`, unset unless given, to a command."""
    command = click.option(
        "--devices",
        type=DeviceList(),
        metavar="DEVICE,DEVICE...",
        help="Devices of --placement, such as cuda:0,cuda:1; all that is not placed is on the first.",
    )(command)
    return click.option(
        "--placement",
        metavar="none|round-robin|balanced|FILE",
        help="Give each function of the engine a device of its own: dealt in turn, balanced by the programs' work, or "
        "as a YAML file says (count: cuda:1).  [default: none]",
    )(command)


def where(options: Mapping[str, Any]) -> dict[str, Any]:
    """What options say of devices, so that it replaces all that other settings, or a resumed run's, say of them.

    Raises:
        click.UsageError: `--device` together with `--devices` or a placement.
    """
    device, devices, placement = (options.get(key) for key in ("device", "devices", "placement"))
    if device is not None and (devices is not None or placement not in (None, "none")):
        other = "--devices" if devices is not None else "--placement"
        raise click.UsageError(f"--device is for one device; it cannot go together with {other}")
    if devices is not None:
        return {"device": "auto"}
    if device is not None or placement == "none":
        return {"placement": "none", "devices": ()}
    return {}
