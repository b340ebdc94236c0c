"""The allowed values of named settings. Importing this file does not load PyTorch, so that `--help` is fast.

A set of modules is a class like those of `modules.py` and `tbd.py`; `roles.py` describes the protocol. Those of this
package have names, and any other is named by its module and class, such as `mypackage.modules:Gated`.
"""

import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any

from iep.errors import InputError

if TYPE_CHECKING:
    from iep.execution_engine.roles import ModuleSet


class _Names(tuple):
    """The names of the package's sets of modules and `MODULE:CLASS`, which stands for those of other packages."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or is_outside(name)


def is_outside(name: object) -> bool:
    """Return whether a set of modules is a class of another package, such as `mypackage.modules:Gated`."""
    return ":" in str(name)


_PACKAGES_OWN = {
    "iep": "iep.execution_engine.modules:ResidualModules",
    "tbd": "iep.execution_engine.tbd:AttentionModules",
    "pooled": "iep.execution_engine.pooled:PooledModules",
    "vector": "iep.execution_engine.vector:VectorModules",
}
"""The class of each set of modules, imported when it is first needed."""
MODULES = _Names((*_PACKAGES_OWN, "MODULE:CLASS"))
DEFAULT_SCHEDULER = "lookahead"
EXECUTIONS = {
    "calls": "one module per call",
    "triton": "all functions of one architecture per call, by Triton kernels in bfloat16",
    "cuda_graph": "in training, the calls of triton for a whole minibatch as CUDA graphs",
}
"""The ways to run module calls, each with a description."""
DEFAULT_EXECUTION = "calls"
PLACEMENTS = ("none", "round-robin", "balanced")
SCENES = ("module", "stem")
NORMS = ("none", "example")
STEMS = ("conv", "none")
INITIALIZATIONS = ("kaiming", "torch")
POOLINGS = ("maxpool2", "none")
SALIENCY = {
    "norm": "each function's attention, or the one that it reads, from 0 to 1; if it has neither, the norm over the "
    "channels of its output, scaled from its minimum to its maximum; no colour where it is 0 or the same everywhere",
    "gradient": "the norm over the channels of the gradient of the answer's score by each function's output, scaled "
    "from its minimum to its maximum; no colour where it is 0 or the same everywhere",
}
"""The choices of `--saliency`, each with a description of the maps that it draws."""
DEFAULT_SALIENCY = "norm"


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raise a ValueError unless the value of a setting is one of its choices."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(choices)}")


def check_fixed(name: str, residual: bool, norm: str, scene: str) -> None:
    """Check that settings that only the modules `iep` use have their defaults.

    Raises:
        ValueError: a setting has another value than its default.
    """
    found = {"module_residual": (residual, True), "module_norm": (norm, "none"), "scene": (scene, "module")}
    for setting, (value, only) in found.items():
        if value != only:
            raise ValueError(f"{setting} is {value!r}, a setting of the modules iep; that of {name} is {only!r}")


def check_named(name: object, named: str | None, source: object) -> None:
    """Check that the set of modules of a file is one of this package, or else the one that the user has named.

    To import a class is to execute the code of its module, and a file may name any module that is installed.

    Args:
        name: the set that the file names.
        named: the set that the user has named, or None.
        source: the file, for messages.

    Raises:
        InputError: the user has not named the set, or has named another one.
    """
    if named is None and is_outside(name):
        raise InputError(
            f"{source}: its modules are {name!r}, code of another package, which is executed only if you name it; if "
            f"you trust it, give --modules {name!r}, or in Python modules={name!r}"
        )
    if named is not None and name != named:
        raise InputError(f"{source}: its modules are {name!r}, not {named!r}")


def make_module_set(name: str, **settings: Any) -> "ModuleSet":
    """Return the set of modules called `name`.

    Args:
        name: one of `MODULES`, or `MODULE:CLASS`, which is imported.
        settings: `dim`, `residual`, `norm` and `scene`, the engine's settings of its modules, and those of one set.

    Raises:
        ValueError: there is no such set, it cannot be imported, or it does not support the settings.
    """
    check_choice("modules", name, MODULES)
    file, _, class_name = _PACKAGES_OWN.get(name, name).partition(":")
    try:
        kind = getattr(import_module(file), class_name)
    except (Exception, SystemExit) as error:  # the code of the module can raise anything
        hint = "; is it installed, or on PYTHONPATH?" if isinstance(error, ImportError) else ""
        found = f"{type(error).__name__}: {error}".rstrip(": ")
        raise ValueError(f"modules is {name!r}, and importing it failed with {found}{hint}") from error
    if missing := [method for method in ("role", "make", "scene_values") if not callable(getattr(kind, method, None))]:
        raise ValueError(f"modules is {name!r}, which has no method {missing[0]!r} and is no set of modules")
    try:
        inspect.signature(kind).bind(**settings)
    except TypeError as error:
        raise ValueError(f"the settings of modules {name}: {error}") from None
    return kind(**settings)
