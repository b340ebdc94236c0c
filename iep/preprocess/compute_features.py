"""The images of a split -> {split}_features.h5: decode, resize, run the backbone and write, batch by batch.

The memory needed does not depend on the number of images. `images.py` decodes, `backbones.py` computes, and
`write_features.py` writes.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from iep.backbone.network import FoundObjects, find_objects
from iep.data.question_file import split_files
from iep.errors import InputError
from iep.preprocess.backbones import Backbone, Scenes
from iep.preprocess.images import image_batches, read_image
from iep.preprocess.recipe import listing
from iep.preprocess.write_features import FeatureRows, FeaturesSpec, feature_rows, is_done
from iep.runtime.devices import enough_memory
from iep.runtime.distributed import attempt, by_main, is_main, main_first, rank, world_size


def preprocess_features(
    images: Mapping[str, Sequence[Path]],
    out: Path,
    backbone: Backbone,
    dtype: str = "float32",
    device: torch.device | str = "cpu",
    batch_size: int = 64,
    workers: int = 0,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
    verify: bool = False,
) -> None:
    """Write `{split}_features.h5` to `out` for the images of some splits, with row i made of image i.

    All existing files are checked before any is made, and finished ones are skipped. An interrupted run is resumed
    where it stopped. The finished file then has the same bytes as without interruption, provided that the batch size
    and the device are the same, on which a ResNet's last bits depend. The processes that torchrun starts share the
    batches, and write the same bytes as one process. Only one job at a time may write to `out`.

    Args:
        images: split -> N image files.
        out: directory of the files, each with a dataset `features` (N, C, H, W).
        backbone: the backbone that computes the features.
        dtype: the dtype of the stored features, `float32` or `float16`.
        device: the device on which the backbone runs.
        batch_size: number of images in a batch.
        workers: number of processes that decode images; with 0, this process decodes them.
        overwrite: replace files, finished or not, that were made differently.
        say: a function that is called with one line for each file.
        verify: read the files that are already done, and check that they are undamaged.

    Raises:
        InputError: an image cannot be read, a file was made differently or is damaged, the disk or the device is too
            small, the weights are those of another network, or features are not finite numbers in `dtype`.
        OSError: a file cannot be written (names it).
    """
    recipe = main_first(lambda: {**backbone.recipe(), "dtype": dtype})
    files = {split_files(out, split)[1]: paths for split, paths in images.items()}
    names = {path: listing(paths) for path, paths in files.items()}
    todo = by_main(lambda: [path for path in files if not is_done(path, names[path], recipe, overwrite, verify)])
    for path in files:
        if path not in todo:
            say(f"{path}: already done{', and undamaged' if verify else ''}")
    if not todo:
        return
    extract, size = main_first(lambda: _checked(backbone.extractor, torch.device(device))), backbone.input_size
    chw = main_first(lambda: extract(torch.zeros(1, 3, *size[::-1], dtype=torch.uint8)).shape[1:])
    for path in todo:
        spec = FeaturesSpec((len(files[path]), *chw), np.dtype(dtype), names[path], recipe)
        with feature_rows(path, spec, overwrite) as rows:
            _write_rows(rows, path.name, files[path], size, extract, getattr(torch, dtype), batch_size, workers)
        say(f"{path}: {spec.shape} {dtype}")


def image_features(
    image: Path | Image.Image, backbone: Backbone, dtype: str = "float32", device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, FoundObjects | None]:
    """Return the (1, C, H, W) float32 features of one image, rounded to `dtype` as stored features are, and the objects
    that the backbone finds in it; None unless it is a scene network.

    Args:
        image: a file, or an image of Pillow.

    Raises:
        InputError: the image cannot be read, the device is too small, the weights are those of another network, or
            features are not finite numbers in `dtype`.
    """
    pixels_1CHW = torch.from_numpy(read_image(image, backbone.input_size).copy()).unsqueeze(0)
    device, found = torch.device(device), None
    if isinstance(backbone, Scenes):
        features_1CHW, scores_1KHW = _checked(backbone.viewer, device)(pixels_1CHW)
        (found,) = find_objects(scores_1KHW)
    else:
        features_1CHW = _checked(backbone.extractor, device)(pixels_1CHW)
    name = "the image" if isinstance(image, Image.Image) else image
    return torch.from_numpy(_stored(features_1CHW, getattr(torch, dtype), name)).float(), found


def _checked(
    make: Callable[[torch.device], Callable[[torch.Tensor], Any]], device: torch.device
) -> Callable[[torch.Tensor], Any]:
    """Return the function of pixels that `make` returns, but it reports in one line that memory ran out."""
    extract = make(device)

    def run(pixels_BCHW: torch.Tensor) -> Any:
        with torch.inference_mode(), enough_memory(device, f"a batch of {len(pixels_BCHW)} images", "--batch-size"):
            return extract(pixels_BCHW)

    return run


def _write_rows(
    rows: FeatureRows,
    name: str,
    paths: Sequence[Path],
    size: tuple[int, int],
    extract: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
    batch_size: int,
    workers: int,
) -> None:
    """Write the batches with rows that are not done, in rounds in which every process makes one of them.

    Raises:
        InputError: in any process, an image cannot be read or its features cannot be stored. All batches before it are
            stored.
        OSError: rows cannot be written.
    """
    starts = [n for n in range(0, len(paths), batch_size) if not rows.done_N[n : n + batch_size].all()]
    mine = starts[rank() :: world_size()]
    pixels, firsts = image_batches(paths, size, batch_size, workers, mine), iter(mine)

    def write_next() -> None:
        first = next(firsts)
        rows.write(first, _stored(extract(next(pixels)), dtype, paths[first]))

    with tqdm(total=len(paths), desc=name, unit="image", disable=not is_main()) as bar:
        bar.update(max(0, len(paths) - len(starts) * batch_size))
        for number in range(0, len(starts), world_size()):
            attempt(write_next, number + rank() < len(starts))
            bar.update(min(batch_size * world_size(), len(paths) - bar.n))


def _stored(features_BCHW: torch.Tensor, dtype: torch.dtype, first: Path | str) -> np.ndarray:
    stored_BCHW = features_BCHW.to(dtype)
    lowest, highest = stored_BCHW.aminmax()  # unlike isfinite, this allocates no memory
    if not (lowest.isfinite() and highest.isfinite()):
        largest = features_BCHW.abs().max().item()
        raise InputError(f"{first}: the features of its batch are up to {largest:.4g}, not finite in {dtype}")
    return stored_BCHW.cpu().numpy()
