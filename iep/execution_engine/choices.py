"""The choices of settings of networks that are names. Importing this file loads neither PyTorch nor any module.

To add a set of modules, write a class like those of `modules.py` and `tbd.py` (`roles.py` describes the protocol), and
add it to `MODULES`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iep.execution_engine.roles import ModuleSet

MODULES = {
    "iep": "iep.execution_engine.modules:ResidualModules",
    "tbd": "iep.execution_engine.tbd:AttentionModules",
    "vector": "iep.execution_engine.vector:VectorModules",
}
"""The class of each set of modules, imported when it is first needed."""
DEFAULT_SCHEDULER = "lookahead"
EXECUTIONS = {
    "calls": "one module per call",
    "grouped": "all functions of one architecture per call, by PyTorch's grouped matrix products",
    "triton": "all functions of one architecture per call, by Triton kernels",
}
"""What a call runs, and how."""
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
        settings: `dim`, `residual`, `norm` and `scene`, the engine's settings of its modules.

    Raises:
        ValueError: there is no such set, or the set does not support the settings.
    """
    check_choice("modules", name, MODULES)
    file, class_name = MODULES[name].split(":")
    return getattr(import_module(file), class_name)(**settings)
