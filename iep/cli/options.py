"""The options that several commands share: types of values, questions, decoding, placement and the image backbone."""

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from iep.cli.command import Command
from iep.config import PATCH_SIZE, RESNET, RESNET_IMAGE_SIZE, RESNET_STAGE, RESNETS, Evaluation
from iep.errors import InputError

if TYPE_CHECKING:
    from iep.preprocess.backbones import Patches, ResNet

PICTURES = (".png", ".svg", ".pdf")


class PicturePath(click.Path):
    """The name of a picture to write; its ending determines the format."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = super().convert(value, param, ctx)
        if path.suffix.lower() not in PICTURES:
            self.fail(f"{str(path)!r} does not end in one of {', '.join(PICTURES)}", param, ctx)
        return path


class DirectoryPath(click.Path):
    """A directory to write files to; an empty name, perhaps from a shell variable that is not set, is an error."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if value == "":
            self.fail("the name is empty, expected a directory", param, ctx)
        return super().convert(value, param, ctx)


class CommaList(click.ParamType):
    """A comma-separated list whose items `item` converts, as a tuple; without duplicates unless `repeated` is set."""

    def __init__(self, item: click.ParamType, name: str = "list", repeated: bool = False):
        self.item, self.name, self.repeated = item, name, repeated

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",")]
        if isinstance(self.item, click.IntRange) and not all(re.fullmatch("-?[0-9]+", part) for part in parts):
            self.fail(f"{value!r}, expected integers separated by commas, such as 1,16,64", param, ctx)
        if not all(parts):
            self.fail(f"{value!r} is not a comma-separated {self.name}", param, ctx)
        items = [self.item.convert(part, param, ctx) for part in parts]
        return tuple(items if self.repeated else dict.fromkeys(items))


class RecordedCommand(Command):
    """A command that records its arguments for its report."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["command"] = shlex.join(["iep-bench", ctx.info_name, *args])
        return super().parse_args(ctx, args)


def parsed(option: str, parse: Callable[[], Any]) -> Any:
    """Return what `parse` returns; its `InputError` becomes a usage error of `option`."""
    try:
        return parse()
    except InputError as error:
        raise click.BadParameter(str(error), param_hint=option) from None


BACKBONE_OPTIONS: dict[str, tuple[Any, object, str]] = {
    "backbone": (
        click.Choice((*RESNETS, "patches")),
        None,
        "How features are computed from pixels: by a ResNet, or as patches, which need no weights.",
    ),
    "stage": (click.IntRange(1, 4), RESNET_STAGE, "ResNet: stage whose output is the features."),
    "weights": (click.STRING, "default", "ResNet: default (ImageNet, downloaded), random, or a .pth file."),
    "seed": (click.IntRange(0, 2**32 - 1), 0, "ResNet: seed of the random weights."),
    "image_size": (click.IntRange(32, 4096), RESNET_IMAGE_SIZE, "ResNet: side length in pixels after resizing."),
    "patch_size": (click.IntRange(1, 256), PATCH_SIZE, "patches: side length in pixels of each of the 14x14 patches."),
}
"""The type, default and help of each option of `backbone_options`, by the name under which a command gets it."""


def backbone_options(default: str | None) -> Callable[[Callable], Callable]:
    """Add the options that determine how features are computed, unset unless given, to a command.

    Args:
        default: the backbone if none is given; None leaves it unset too, for a command that looks in a checkpoint
            first.
    """
    when = "default" if default else "default if the checkpoint does not record it"

    def add(command: Callable) -> Callable:
        for name, (kind, value, text) in reversed(BACKBONE_OPTIONS.items()):
            of_backbone = {"default": default, "show_default": bool(default)} if name == "backbone" else {}
            if value is not None:
                text += f"  [{when}: {value}]"
            elif default is None:
                text += " This option and those below, except --weights, are for checkpoints that do not record it."
            command = click.option(f"--{name.replace('_', '-')}", type=kind, help=text, **of_backbone)(command)
        return command

    return add


def chosen_backbone(options: Mapping[str, Any]) -> "Patches | ResNet":
    """Return the backbone that the options of `backbone_options` determine; None stands for an option that is unset.

    Raises:
        click.UsageError: an option of patches was given for a ResNet, or vice versa.
    """
    from iep.preprocess.backbones import Patches, ResNet

    given = {name: value for name, value in options.items() if value is not None}
    name, patch_size = given.pop("backbone", RESNET), given.pop("patch_size", None)
    if name == "patches":
        if given:
            raise click.UsageError(f"--{next(iter(given)).replace('_', '-')} does not go with --backbone patches")
        return Patches() if patch_size is None else Patches(patch_size)
    if patch_size is not None:
        raise click.UsageError("--patch-size goes with --backbone patches")
    return ResNet(name, **given)


def decoding_options(command: Callable) -> Callable:
    """Add `--beam-size` and `--max-program-length`, unset unless given, to a command."""
    command = click.option(
        "--max-program-length",
        type=click.IntRange(2, 1000),
        help=f"Number of tokens after which decoding stops.  [default: {Evaluation.max_program_length}]",
    )(command)
    return click.option(
        "--beam-size",
        type=click.IntRange(min=1),
        help=f"Beam size for decoding programs; 1 decodes greedily.  [default: {Evaluation.beam_size}]",
    )(command)


def placement_options(command: Callable) -> Callable:
    """Add `--placement` and `--devices`, unset unless given, to a command."""
    command = click.option(
        "--devices",
        type=CommaList(click.STRING, "list of devices", repeated=True),
        metavar="DEVICE,DEVICE...",
        help="Devices for --placement, such as cuda:0,cuda:1; the first also runs everything that is not placed.",
    )(command)
    return click.option(
        "--placement",
        metavar="none|round-robin|balanced|FILE",
        help="Place each function of the engine on one of several devices: in turn, balanced by the programs' work, or "
        "as given in a YAML file (count: cuda:1).  [default: none]",
    )(command)


def families_option(command: Callable) -> Callable:
    """Add `--families`, unset unless given, to a command."""
    return click.option(
        "--families",
        metavar="short|long|FILE",
        help="Use only questions of these families: those with short programs (below 16 functions on average in "
        "training), those with long ones, or the numbers (question_family_index) that a JSON or YAML file lists.",
    )(command)


def where(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of devices that the options imply; they replace those of a file or of a resumed run.

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
