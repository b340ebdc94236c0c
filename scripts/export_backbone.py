"""Write the weights of a trained backbone as a safetensors file, with the constructor arguments in its metadata.

python scripts/export_backbone.py RUN FILE.safetensors
"""

import argparse
import json
import sys
from pathlib import Path

from safetensors.torch import save_file

from iep.errors import InputError
from iep.preprocess.backbones import Scenes
from iep.runtime.files import atomic_path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="run directory or checkpoint of iep-train --model backbone")
    parser.add_argument("out", type=Path, help="the safetensors file to write")
    args = parser.parse_args()
    try:
        network = Scenes(args.run).network
    except InputError as error:
        sys.exit(f"Error: {error}")
    weights = {name: tensor.contiguous() for name, tensor in network.state_dict().items()}
    with atomic_path(args.out) as temporary:
        save_file(weights, temporary, {"kwargs": json.dumps(network.kwargs)})
    print(f"wrote {args.out}: {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
