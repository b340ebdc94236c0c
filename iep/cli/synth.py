"""`iep-synth`: generate a data set in the layout of CLEVR v1.0."""

from pathlib import Path

import click
from tqdm import tqdm

from iep.cli.command import Command
from iep.cli.options import DirectoryPath
from iep.runtime.locks import alone_in
from iep.synth.presets import PRESETS, SPLITS, resolve
from iep.synth.synthesize import synthesize
from iep.synth.templates import FAMILIES_OF

COUNT = click.IntRange(min=0)


@click.command(cls=Command)
@click.argument("out", type=DirectoryPath())
@click.option(
    "--preset",
    type=click.Choice(sorted(PRESETS)),
    default="clevr",
    show_default=True,
    help="Set of defaults for the options below.",
)
@click.option("--train", type=COUNT, help="Number of images of the train split; 0 omits a split.")
@click.option("--val", type=COUNT, help="Number of images of the val split.")
@click.option("--test", type=COUNT, help="Number of images of the test split, without answers, programs and scenes.")
@click.option("--questions-per-image", type=click.IntRange(1, 300), help="Number of questions for each image.")
@click.option(
    "--families",
    type=click.Choice(sorted(FAMILIES_OF)),
    help="Families of questions: the 90 of CLEVR, or the seven groups of CLOSURE, each in a file of its own.  "
    "[default: clevr]",
)
@click.option("--width", type=click.IntRange(48, 4096), help="Width of an image in pixels.")
@click.option("--height", type=click.IntRange(32, 4096), help="Height of an image in pixels.")
@click.option("--min-objects", type=click.IntRange(1, 10), help="Smallest number of objects in a scene.")
@click.option("--max-objects", type=click.IntRange(1, 10), help="Largest number of objects in a scene.")
@click.option("--cogent", type=click.Choice(["A", "B"]), help="Colours by shape as in this condition of CLEVR-CoGenT.")
@click.option("--annotations", is_flag=True, help="Add boxes, masks and maps of depths of train and val.")
@click.option("--seed", type=COUNT, default=0, show_default=True, help="The same seed and options give the same bytes.")
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Number of worker processes.")
def main(
    out: Path,
    preset: str,
    min_objects: int | None,
    max_objects: int | None,
    cogent: str | None,
    workers: int,
    **given: int | bool | str | None,
) -> None:
    """Write images, questions and scenes in CLEVR's layout into the directory OUT.

    Run the same command again to resume an interrupted run, or with larger numbers of images to extend a data set.
    """
    scene = {"min_objects": min_objects, "max_objects": max_objects, "cogent": cogent}
    options = resolve(preset, scene, **given)
    if options.rules.min_objects > options.rules.max_objects:
        raise click.UsageError(
            f"--min-objects {options.rules.min_objects} is more than --max-objects {options.rules.max_objects}"
        )
    total = sum(getattr(options, split) for split in SPLITS)
    if total == 0:
        raise click.UsageError("nothing to make: --train, --val and --test are all 0")
    with alone_in(out), tqdm(total=total, unit=" images", smoothing=0.05, delay=0.5) as bar:

        def progress(split: str, images: int) -> None:
            bar.set_description(split, refresh=False)
            bar.update(images)

        finished = synthesize(out, options, workers, progress)
    click.echo(f"{out}: {total:,} images with {total * options.questions_per_image:,} questions")
    for split in SPLITS:
        if count := getattr(options, split):
            click.echo(f"{split}: {count} images in {out}{' (already done)' if split in finished else ''}")


if __name__ == "__main__":
    main()
