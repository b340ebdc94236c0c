"""The choices of settings of networks that are names. Importing this file loads neither PyTorch nor any module.

A set of modules is a class like those of `modules.py` and `tbd.py`; `roles.py` describes the protocol. Those of this
package have names, and any other is named by its module and class, such as `mypackage.modules:Gated`.
"""

import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iep.execution_engine.roles import ModuleSet


class _Names(tuple):
    """The names of the package's sets of modules and `MODULE:CLASS`, which stands for those of other packages."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or ":" in str(name)


_PACKAGES_OWN = {
    "iep": "iep.execution_engine.modules:ResidualModules",
    "tbd": "iep.execution_engine.tbd:AttentionModules",
    "vector": "iep.execution_engine.vector:VectorModules",
}
"""The class of each set of modules, imported when it is first needed."""
MODULES = _Names((*_PACKAGES_OWN, "MODULE:CLASS"))
DEFAULT_SCHEDULER = "lookahead"
EXECUTIONS = {
    "calls": "one module per call",
    "grouped": "all functions of one architecture per call, by PyTorch's grouped matrix products",
    "triton": "all functions of one architecture per call, by Triton kernels",
    "cuda_graph": "in training, the calls of triton for a whole minibatch as one CUDA graph",
}
"""The ways to run module calls, each with a description."""
DEFAULT_EXECUTION = "calls"
SCENES = ("module", "stem")
NORMS = ("none", "batch", "example")
STEMS = ("conv", "pixels", "none")
INITIALIZATIONS = ("kaiming", "torch")
POOLINGS = ("maxpool2", "none")


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raise a ValueError unless the value of a setting is one of its choices."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(choices)}")


def make_module_set(name: str, **settings: Any) -> "ModuleSet":
    """Return the set of modules called `name`.

    Args:
        name: one of `MODULES`, or `MODULE:CLASS`, which is imported.
        settings: `dim`, `residual`, `norm` and `scene`, the engine's settings of its modules, and those of one set.

    Raises:
        ValueError: there is no such set, or the set does not support the settings.
    """
    check_choice("modules", name, MODULES)
    file, _, class_name = _PACKAGES_OWN.get(name, name).partition(":")
    try:
        kind = getattr(import_module(file), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"modules is {name!r}, and {error}; is it installed, or on PYTHONPATH?") from None
    if missing := [method for method in ("role", "make", "scene_values") if not callable(getattr(kind, method, None))]:
        raise ValueError(f"modules is {name!r}, which has no method {missing[0]!r} and is no set of modules")
    try:
        inspect.signature(kind).bind(**settings)
    except TypeError as error:
        raise ValueError(f"the settings of modules {name}: {error}") from None
    return kind(**settings)
