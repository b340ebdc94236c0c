"""The images of a split -> {split}_features.h5: decode, resize, run the backbone, write, batch by batch.

Memory holds a few batches, whatever the number of images. The parts are `images.py`, `backbones.py` and
`features_file.py`.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from iep.errors import InputError
from iep.preprocess.backbones import Patches, ResNet
from iep.preprocess.features_file import FeaturesSpec, feature_rows, is_done
from iep.preprocess.images import image_batches

DTYPES = {"float32": torch.float32, "float16": torch.float16}


def extract_features(
    images: Sequence[Path],
    path: Path,
    backbone: Patches | ResNet,
    dtype: str = "float32",
    device: torch.device | str = "cpu",
    batch_size: int = 64,
    workers: int = 0,
    overwrite: bool = False,
    flush_seconds: float = 5.0,
) -> bool:
    """Write the features file `path` of `images`, row i from image i. Returns False when it was there already.

    An interrupted run is taken up where it stopped. The finished file is the same bytes as without interruption if the
    batch size and the device are the same too (a ResNet's last bits depend on them).

    Args:
        images: N image files.
        path: gets the data set `features` (N, C, H, W).
        backbone: what makes the features.
        dtype: `float32` or `float16`, of the stored features.
        device: where the backbone runs.
        batch_size: images run at once.
        workers: processes that decode images; 0 decodes in this one.
        overwrite: replace a file, finished or not, that was made otherwise.
        flush_seconds: at most this much work, and a batch, is lost when the process is killed.

    Raises:
        InputError: an image cannot be read, the file was made otherwise, the disk or the device is too small, the
            weights do not fit, or features are not finite numbers in `dtype`.
        OSError: the file cannot be written.
    """
    recipe = {**backbone.recipe(), "dtype": dtype}
    if is_done(path, images, recipe, overwrite):
        return False
    with torch.inference_mode():
        extract = backbone.extractor(torch.device(device))
        size = backbone.image_size
        _, channels, height, width = extract(torch.zeros(1, 3, size, size, dtype=torch.uint8)).shape
        numpy_dtype = torch.zeros(0, dtype=DTYPES[dtype]).numpy().dtype
        spec = FeaturesSpec((len(images), channels, height, width), numpy_dtype, images, recipe)
        with (
            feature_rows(path, spec, overwrite, flush_seconds) as rows,
            tqdm(total=len(images), initial=rows.count, desc=path.name, unit="image") as bar,
        ):
            for pixels_BCHW in image_batches(images[rows.count :], size, batch_size, workers):
                features_BCHW = _run(extract, pixels_BCHW, batch_size).to(DTYPES[dtype])
                if not features_BCHW.isfinite().all():
                    raise InputError(f"{path}: the features of images from {rows.count} on are not finite in {dtype}")
                rows.append(features_BCHW.cpu().numpy())
                bar.update(len(pixels_BCHW))
    return True


def _run(extract, pixels_BCHW: torch.Tensor, batch_size: int) -> torch.Tensor:
    try:
        return extract(pixels_BCHW)
    except torch.OutOfMemoryError:
        raise InputError(
            f"not enough memory on the device for a batch of {batch_size} images: lower --batch-size"
        ) from None
