"""The options that several commands share, and the types of their values."""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from iep.config import BATCHING, PRECISIONS, Config
from iep.evaluation.settings import NetworkSettings
from iep.execution_engine.choices import EXECUTIONS, PLACEMENTS
from iep.preprocess.backbone_choices import RESNET, RESNET_IMAGE_SIZE, RESNET_STAGE, RESNETS

if TYPE_CHECKING:
    from iep.preprocess.backbones import Backbone

PICTURES = (".png", ".svg", ".pdf")


class NamedPath(click.Path):
    """A path that is not empty; an empty one, usually from a shell variable that is not set, would be the current
    directory."""

    def __init__(self, **options: Any) -> None:
        super().__init__(path_type=Path, **options)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if value == "":
            self.fail(f"the name is empty, expected a {self.name}", param, ctx)
        found: Any = super().convert(value, param, ctx)  # a `Path`, as `path_type` says
        return found


class DirectoryPath(NamedPath):
    """A directory to write files to."""

    def __init__(self) -> None:
        super().__init__(file_okay=False)


class PicturePath(NamedPath):
    """The name of a picture to write; its ending determines the format."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = super().convert(value, param, ctx)
        if path.suffix.lower() not in PICTURES:
            self.fail(f"{str(path)!r} does not end in one of {', '.join(PICTURES)}", param, ctx)
        return path


PATH = NamedPath()


class UpdateFrequency(click.ParamType):
    """The number of calls after which asynchronous training updates an op; `auto` becomes 0."""

    name = "auto|N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if not re.fullmatch("auto|0*[1-9][0-9]{0,8}", str(value)):
            self.fail(f"{value!r}, expected auto or an integer of 1 or greater", param, ctx)
        return 0 if value == "auto" else int(value)


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


def all_of(*options: Callable) -> Callable:
    """Return a decorator that adds options to a command, in the order given."""

    def add(command: Callable) -> Callable:
        for option in reversed(options):
            command = option(command)
        return command

    return add


network_options = all_of(
    click.option("--pg", type=PATH, help="Checkpoint or run of a program generator; `default` is iep's own."),
    click.option("--ee", type=PATH, help="Checkpoint or run of an execution engine; `default` is iep's own."),
    click.option("--baseline", type=PATH, help="Checkpoint or run directory of a baseline, a model without programs."),
)
modules_option = click.option(
    "--modules",
    metavar="PACKAGE.MODULE:CLASS",
    help="Class of another package that the engine's modules are of. The checkpoint names it too, but its code is "
    "executed only if this option is given. Modules that iep has need no option.",
)
decoding_options = all_of(
    click.option(
        "--beam-size",
        type=click.IntRange(min=1),
        help=f"Beam size for decoding programs; 1 decodes greedily.  [default: {NetworkSettings.beam_size}]",
    ),
    click.option(
        "--max-program-length",
        type=click.IntRange(2, 1000),
        help="Number of tokens after which decoding stops.  [default: the generator's, which its checkpoint stores]",
    ),
)
placement_options = all_of(
    click.option(
        "--placement",
        type=click.Choice(PLACEMENTS),
        help="Place each function of the engine on one of several devices, in turn or balanced by their work.  "
        f"[default: {Config.placement}]",
    ),
    click.option(
        "--devices",
        type=CommaList(click.STRING, "list of devices", repeated=True),
        metavar="DEVICE,DEVICE...",
        help="Devices for --placement, such as cuda:0,cuda:1; the first also runs everything that is not placed.",
    ),
)
device_options = all_of(
    click.option("--device", help=f"Device: auto, cpu, cuda, cuda:1, ...  [default: {Config.device}]"),
    placement_options,
)
execution_options = all_of(
    click.option(
        "--batching", type=click.Choice(BATCHING), help=f"Scheduler of the module calls.  [default: {Config.batching}]"
    ),
    click.option(
        "--sharing/--no-sharing",
        default=None,
        help="Run each image's stem, and equal subtrees over one image, once per batch.  [default: sharing; in "
        "training only where it is exact]",
    ),
    click.option(
        "--execution",
        type=click.Choice(tuple(EXECUTIONS)),
        help="How module calls run. calls: one function in each call, or all of one arity if they share their weights "
        "(--modules vector). triton: all functions of one architecture that are ready in one call, by Triton kernels, "
        "on a GPU in bfloat16. cuda_graph: like triton, as CUDA graphs, for training.  "
        f"[default: {Config.execution}]",
    ),
    click.option(
        "--precision",
        type=click.Choice(PRECISIONS),
        help="Precision of the computation; weights and the program generator stay in float32. auto: bfloat16 on "
        "devices with instructions for it.  "
        f"[default: {Config.precision}]",
    ),
    click.option(
        "--families",
        metavar="short|long|FILE",
        help="Use only questions of these families: those with short programs (below 16 functions on average in "
        "training), those with long ones, or the numbers (question_family_index) that a JSON or YAML file lists.",
    ),
    click.option(
        "--features-in-memory/--no-features-in-memory",
        default=None,
        help="Read all features into the system's file cache at the start, once for all processes of a machine.",
    ),
    device_options,
)
"""The options of training and evaluation; each is None unless it is given."""


backbone_options = all_of(
    click.option(
        "--backbone",
        type=click.Choice((*RESNETS, "synth")),
        help="How features are computed: by a ResNet, or by the network that comes with this package and has learnt "
        "from images of iep-synth.  "
        f"[default: synth for data of iep-synth, {RESNET} for others]",
    ),
    click.option(
        "--stage",
        type=click.IntRange(1, 4),
        help=f"ResNet: stage whose output is the features.  [default: {RESNET_STAGE}]",
    ),
    click.option(
        "--weights",
        help="ResNet: default (ImageNet, downloaded), random, or a .pth file. synth: default, a .safetensors file, or "
        "a checkpoint or run directory of iep-train --model backbone.",
    ),
    click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="ResNet: seed of random weights.  [default: 0]"),
    click.option(
        "--image-size",
        type=click.IntRange(32, 4096),
        help=f"ResNet: side length in pixels after resizing.  [default: {RESNET_IMAGE_SIZE}]",
    ),
)
"""The options that determine how features are computed; each is None unless it is given."""


def chosen_backbone(options: Mapping[str, Any], default: str = RESNET) -> "Backbone":
    """Return the backbone that the options of `backbone_options` determine; None stands for an option that is unset.

    Raises:
        click.UsageError: an option that the backbone does not have was given.
    """
    from iep.preprocess.backbones import ResNet, Scenes

    given = {name: value for name, value in options.items() if value is not None}
    name = given.pop("backbone", default)
    kind = Scenes if name == "synth" else ResNet
    for option in given:
        if option not in {field.name for field in fields(kind)}:
            raise click.UsageError(f"--{option.replace('_', '-')} does not go with --backbone {name}")
    return kind(name, **given) if kind is ResNet else kind(**given)


def device_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the options of devices imply; they replace those of a file or of a resumed run.

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
