"""The images of a split -> {split}_features.h5: decode, resize, run the backbone, write, batch by batch.

Memory holds a bounded number of batches, whatever the number of images. The parts are `images.py`, `backbones.py` and
`write_features.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from iep.errors import InputError
from iep.preprocess.backbones import Patches, ResNet
from iep.preprocess.images import image_batches, read_image
from iep.preprocess.recipe import Recipe, listing
from iep.preprocess.write_features import FeatureRows, FeaturesSpec, clear_up, feature_rows, is_done
from iep.runtime.distributed import by_main, is_main, main_first, rank, world_size


def preprocess_features(
    images: Mapping[str, Sequence[Path]],
    out: Path,
    backbone: Patches | ResNet,
    dtype: str = "float32",
    device: torch.device | str = "cpu",
    batch_size: int = 64,
    workers: int = 0,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
    flush_seconds: float = 5.0,
    verify: bool = False,
) -> None:
    """Write `{split}_features.h5` in `out` for the images of some splits, row i from image i.

    Every file that stands there is checked before any is made; what is done is skipped. An interrupted run is taken up
    where it stopped: the finished file is the same bytes as without interruption if the batch size and the device are
    the same too (a ResNet's last bits depend on them). The processes that torchrun starts share the batches, and write
    the same bytes as one.

    Args:
        images: split -> N image files.
        out: gets files with a data set `features` (N, C, H, W).
        backbone: what makes the features.
        dtype: `float32` or `float16`, of the stored features.
        device: where the backbone runs.
        batch_size: images run at once.
        workers: processes that decode images; 0 decodes in this one.
        overwrite: replace files, finished or not, that were made otherwise.
        say: gets one line for each file.
        flush_seconds: at most this much work, and a batch, is lost when the process is killed.
        verify: read what is done already, and see that it is undamaged.

    Raises:
        InputError: an image cannot be read, a file was made otherwise or is damaged, the disk or the device is too
            small, the weights do not fit, or features are not finite numbers in `dtype`.
        OSError: a file cannot be written (names it).
    """
    recipe = main_first(lambda: {**backbone.recipe(), "dtype": dtype})
    files = {out / f"{split}_features.h5": paths for split, paths in images.items()}
    todo = by_main(lambda: _undone(files, recipe, overwrite, verify))
    for path in files:
        if path not in todo:
            say(f"{path}: already done{', and undamaged' if verify else ''}")
    if not todo:
        return
    extract, size = main_first(lambda: backbone.extractor(torch.device(device))), backbone.image_size
    chw = main_first(lambda: _run(extract, torch.zeros(1, 3, size, size, dtype=torch.uint8)).shape[1:])
    for path, names in todo.items():
        spec = FeaturesSpec((len(names), *chw), np.dtype(dtype), names, recipe)
        with (
            feature_rows(path, spec, overwrite, flush_seconds) as rows,
            tqdm(total=len(names), initial=rows.count, desc=path.name, unit="image", disable=not is_main()) as bar,
        ):
            pixels = image_batches(files[path][rows.count :], size, batch_size, workers, rank(), world_size())
            for end in _write_rows(rows, files[path], pixels, batch_size, extract, getattr(torch, dtype)):
                bar.update(end - bar.n)
        say(f"{path}: {spec.shape} {dtype}")


def image_features(
    path: Path, backbone: Patches | ResNet, dtype: str = "float32", device: torch.device | str = "cpu"
) -> torch.Tensor:
    """(1, C, H, W) float32 features of one image, with the values that `preprocess_features` stores as `dtype`.

    Raises:
        InputError: the image cannot be read, the device is too small, the weights do not fit, or features are not
            finite numbers in `dtype`.
    """
    pixels_1CHW = torch.from_numpy(read_image(path, backbone.image_size).copy()).unsqueeze(0)
    features_1CHW = _run(backbone.extractor(torch.device(device)), pixels_1CHW)
    return torch.from_numpy(_stored(features_1CHW, getattr(torch, dtype), path)).float()


def _undone(
    files: Mapping[Path, Sequence[Path]], recipe: Recipe, overwrite: bool, verify: bool
) -> dict[Path, tuple[str, ...]]:
    """The features files that are to be made, with the listing of their images; what is done is cleared up after."""
    listings = {path: listing(images) for path, images in files.items()}
    todo = {path: names for path, names in listings.items() if not is_done(path, names, recipe, overwrite, verify)}
    for path in listings.keys() - todo.keys():
        clear_up(path)
    return todo


def _write_rows(
    rows: FeatureRows,
    paths: Sequence[Path],
    pixels: Iterator[torch.Tensor],
    batch_size: int,
    extract: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
) -> Iterator[int]:
    """Write what is left of the rows: in each round every process makes one batch of `pixels`, while there are any.

    Yields:
        How many rows are complete, after each round.

    Raises:
        InputError: in any process an image cannot be read or its features not be stored; all rows before it are.
        OSError: rows cannot be written.
    """
    for start in range(rows.count, len(paths), batch_size * world_size()):
        first, trouble = start + rank() * batch_size, None
        try:
            if first < len(paths):
                rows.write(first, _stored(_run(extract, next(pixels)), dtype, paths[first]))
        except (InputError, OSError) as error:
            trouble = (first, error)
        rows.end_round(min(start + batch_size * world_size(), len(paths)), trouble)
        yield rows.count


def _run(extract: Callable[[torch.Tensor], torch.Tensor], pixels_BCHW: torch.Tensor) -> torch.Tensor:
    try:
        with torch.inference_mode():
            return extract(pixels_BCHW)
    except torch.OutOfMemoryError:
        batch_size = len(pixels_BCHW)
        raise InputError(
            f"not enough memory on the device for {batch_size} images at once: lower --batch-size"
        ) from None


def _stored(features_BCHW: torch.Tensor, dtype: torch.dtype, first: Path) -> np.ndarray:
    stored_BCHW = features_BCHW.to(dtype)
    lowest, highest = stored_BCHW.aminmax()  # unlike isfinite, takes no memory of its own
    if not (lowest.isfinite() and highest.isfinite()):
        largest = features_BCHW.abs().max().item()
        raise InputError(f"{first}: this image or one after it has features up to {largest:.4g}, not finite in {dtype}")
    return stored_BCHW.cpu().numpy()
