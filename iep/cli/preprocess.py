"""`iep-preprocess`: convert a CLEVR directory to vocab.json and the HDF5 files that training reads."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from iep.cli.command import Command
from iep.cli.options import PATH, DirectoryPath, NamedPath, backbone_options, chosen_backbone
from iep.preprocess.backbone_choices import RESNET


@click.command(cls=Command)
@click.argument("clevr_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", type=DirectoryPath(), required=True, help="Output directory.")
@click.option("--split", "splits", multiple=True, help="Preprocess this split; can be repeated.  [default: all splits]")
@click.option("--only", type=click.Choice(["features", "questions"]), help="Preprocess only this part.")
@click.option("--overwrite", is_flag=True, help="Replace files that were made with other options or are damaged.")
@click.option(
    "--verify", is_flag=True, help="Read files that are already done, and check that their content is undamaged."
)
@backbone_options
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16"]),
    default="float32",
    show_default=True,
    help="Type of the stored features.",
)
@click.option("--device", default="auto", show_default=True, help="Device: auto, cpu, cuda, cuda:1, ...")
@click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True, help="Images per batch.")
@click.option(
    "--workers",
    type=click.IntRange(min=0),
    help="Processes that decode images.  [default: one per core, at most 8]",
)
@click.option(
    "--questions",
    "question_file",
    type=NamedPath(dir_okay=False),
    help="Read the questions of the one --split from this file instead of CLEVR_DIR. Implies --only questions.",
)
@click.option(
    "--vocab",
    metavar="FILE|CHECKPOINT|default|clevr",
    type=PATH,  # `clevr` may also be a directory here
    help="Use this .json file, or the vocabulary of this checkpoint or run, of the networks that come with iep, or of "
    "CLEVR v1.0, instead of building one from the train split.",
)
@click.option("--expand-vocab", is_flag=True, help="Add new question tokens to --vocab, after its own tokens.")
@click.option(
    "--unk-threshold",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Build the vocabulary only from question tokens that occur at least this often.",
)
@click.option(
    "--encode-unk",
    is_flag=True,
    help="Encode question tokens that are not in the vocabulary as <UNK>; otherwise they are an error.",
)
def main(
    clevr_dir: Path,
    out: Path,
    splits: tuple[str, ...],
    only: str | None,
    overwrite: bool,
    verify: bool,
    dtype: str,
    device: str,
    batch_size: int,
    workers: int | None,
    question_file: Path | None,
    vocab: Path | None,
    expand_vocab: bool,
    unk_threshold: int,
    encode_unk: bool,
    **of_backbone: Any,
) -> None:
    """Preprocess CLEVR_DIR, a directory of CLEVR v1.0 or CLEVR-Humans, for training.

    Writes OUT/vocab.json and, for every split, OUT/SPLIT_questions.h5 and OUT/SPLIT_features.h5. Files that are already
    done are skipped, and an interrupted run is resumed. Under torchrun, several processes share the images.
    """
    if question_file and (len(splits) != 1 or only == "features"):
        raise click.UsageError("--questions goes with exactly one --split and not with --only features")
    if expand_vocab and not vocab:
        raise click.UsageError("--expand-vocab goes with --vocab")
    # Imported late, so that `--help` does not wait for torch.
    from iep.preprocess.compute_features import preprocess_features
    from iep.preprocess.encode_questions import QuestionOptions, preprocess_questions
    from iep.runtime.devices import resolve_device
    from iep.runtime.distributed import by_main, is_main, joined, main_first
    from iep.runtime.locks import alone_in
    from iep.synth.synthesize import RECORD, possible_tokens

    model = chosen_backbone(of_backbone, default="synth" if (clevr_dir / RECORD).exists() else RESNET)
    parts = {only} if only else {"questions"} if question_file else {"questions", "features"}
    with joined(), ExitStack() as stack:
        say = click.echo if is_main() else lambda line: None
        given = {splits[0]: question_file} if question_file else None
        files, images = by_main(lambda: _inputs(clevr_dir, splits, parts, given))
        by_main(lambda: stack.enter_context(alone_in(out)))
        if "features" in parts:  # a missing device or wrong weights are an error before the questions are encoded
            torch_device = main_first(lambda: resolve_device(device))
            main_first(lambda: model.input_size)
        if "questions" in parts:

            def encode() -> None:
                options = QuestionOptions(vocab, expand_vocab, unk_threshold, encode_unk, possible_tokens(clevr_dir))
                preprocess_questions(files, out, options, overwrite, say, verify)

            by_main(encode)
        if "features" in parts:
            if workers is None:  # one per core, divided among the processes that torchrun started on this machine
                processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
                workers = max(1, min(len(os.sched_getaffinity(0)), 8) // processes)
            preprocess_features(
                images,
                out,
                model,
                dtype=dtype,
                device=torch_device,
                batch_size=batch_size,
                workers=workers,
                overwrite=overwrite,
                say=say,
                verify=verify,
            )


def _inputs(
    clevr_dir: Path, splits: tuple[str, ...], parts: set[str], given: dict[str, Path] | None
) -> tuple[dict[str, Path], dict[str, list[Path]]]:
    """Return, by split, the question files to encode (`given` or those of the directory) and the images.

    Raises:
        InputError: a split is missing, or image indices have gaps.
    """
    from iep.preprocess.clevr_files import image_directories, image_paths, question_files, select_splits

    directories = image_directories(clevr_dir)
    files = question_files(clevr_dir) if given is None else given
    if len(parts) == 2 and not splits:
        for split in sorted(set(directories) ^ set(files)):
            click.echo(f"{clevr_dir}: no {'images' if split in files else 'questions'} of split {split!r}")
    images, hint = {}, "; --only does one part alone"
    if "features" in parts:
        chosen = select_splits(directories, splits, clevr_dir, "images", hint)
        images = {split: image_paths(directory) for split, directory in chosen.items()}
    if "questions" in parts:
        files = select_splits(files, splits, clevr_dir, "questions", hint)
    return files, images


if __name__ == "__main__":
    main()
