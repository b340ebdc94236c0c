"""The package as it is installed: source distribution, the wheel that is built from it, and editable install."""

import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
USE = """
import iep
from iep.config import read_config
assert read_config("mini/ee").model == "ee"
iep.load()
print(iep.__file__)
"""


def python(folder: Path, *arguments: object, **environment: object) -> str:
    """Return the last line that Python prints in a folder, without the environment's own settings."""
    command = [sys.executable, *map(str, arguments)]
    clean = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"} | {
        name: str(value) for name, value in environment.items()
    }
    ran = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an unpacked source distribution."""
    folder = tmp_path_factory.mktemp("source")
    tracked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    with tarfile.open(folder / "clone.tar", "w") as clone:
        for name in tracked.stdout.splitlines():
            if (ROOT / name).exists():
                clone.add(ROOT / name, name)
    with tarfile.open(folder / "clone.tar") as clone:
        clone.extractall(folder / "clone", filter="data")
    built = python(folder / "clone", "-c", BUILD, "build_sdist", folder)
    with tarfile.open(folder / built) as distribution:
        distribution.extractall(folder, filter="data")
    return folder / built.removesuffix(".tar.gz")


def test_a_wheel_of_the_source_distribution_has_configs_and_networks(source: Path, tmp_path: Path):
    wheel = python(source, "-c", BUILD, "build_wheel", tmp_path)
    with ZipFile(tmp_path / wheel) as file:
        file.extractall(tmp_path / "installed")
    assert python(tmp_path, "-c", USE, PYTHONPATH=tmp_path / "installed").startswith(str(tmp_path / "installed"))


def test_an_editable_install_is_imported_beside_a_directory_of_the_same_name(source: Path, tmp_path: Path):
    """A clone called iep is such a directory. The install must be a path, since a finder comes after the directory."""
    wheel = python(source, "-c", BUILD, "build_editable", tmp_path)
    with ZipFile(tmp_path / wheel) as file:
        (path,) = [name for name in file.namelist() if name.endswith(".pth")]
        installed = file.read(path).decode().strip()
    (tmp_path / "iep").mkdir()
    assert python(tmp_path, "-c", "import iep; print(iep.__version__)", PYTHONPATH=installed)
