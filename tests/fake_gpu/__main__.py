"""Run a module on a GPU that does not exist: `python tests/fake_gpu COUNTS.json iep.cli.train ... device=cuda`.

This file compiles the fake driver, `driver.c`, and `counting.py` runs the module on it and counts. FAKE_GPUS=2 makes
two. Needs gcc, nm and PyTorch for CUDA 13, whose own code runs, from dispatch to CUDA graphs and Triton's launcher.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

ACTIONS = {
    r"Launch(Cooperative)?Kernel(Ex|ExC)?$|[gG]emm|gemv|LtMatmul$|Memset": "kernels++;",
    r"Create(_v2|With\w+)?$|^cuModule(LoadData|GetFunction)$|^cuCtxGetCurrent$|Instantiate": "*to = calloc(1, 256);",
}
"""Patterns of the names of driver functions, and the C statement that each of these functions runs before it returns 0:
it counts a kernel, or writes a handle to its first argument."""


def build(folder: Path) -> Path:
    """Compile the driver into `folder`, with a function for every other symbol that PyTorch or Triton may use."""
    torch, triton = (Path(find_spec(name).origin).parent for name in ("torch", "triton"))
    headers = next(torch.parent.glob("nvidia/*/include/cuda.h")).parent
    libraries = [*torch.glob("lib/lib*_cuda*.so"), torch / "lib/libtorch_python.so"]
    symbols = subprocess.check_output(["nm", "-D", *libraries], text=True)
    names = {*re.findall(r" U ((?:__)?cuda\w+|cublas\w+)", symbols)}
    names |= {*re.findall(r"CUDAAPI (cu\w+)\(", (headers / "cuda.h").read_text())}
    lines = ["#include <stdlib.h>", "extern long kernels;"]
    for name in sorted(names):
        action = "".join(each for pattern, each in ACTIONS.items() if re.search(pattern, name))
        lines.append(f"__attribute__((weak)) long {name}(void **to) {{ {action} return 0; }}")  # unless in driver.c
    (folder / "others.c").write_text("\n".join(lines))
    options = ["-D_GNU_SOURCE", f"-I{headers}", f"-I{triton / 'backends/nvidia/include'}", "-w", "-shared", "-fPIC"]
    options += ["-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1"]
    subprocess.run(["gcc", *options, Path(__file__).with_name("driver.c"), folder / "others.c", "-ldl"], check=True)
    return folder / "libcuda.so.1"


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        driver = {"LD_PRELOAD": str(build(Path(name))), "TRITON_LIBCUDA_PATH": name, "TRITON_INTERPRET": "0"}
        command = [sys.executable, str(Path(__file__).with_name("counting.py")), *sys.argv[1:]]
        sys.exit(subprocess.run(command, env=os.environ | driver).returncode)
