"""Options that several commands have: where the engine's functions run."""

from collections.abc import Callable, Mapping
from typing import Any

import click


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
