"""Train and run neural module networks on CLEVR, batched across examples."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iep import dynamic, reward
    from iep.asking.loading import Model, load

__all__ = ["Model", "dynamic", "load", "reward"]
__version__ = "0.1.0"


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    """Import a name of `__all__`, and PyTorch with it if necessary, when it is first used."""
    if name in ("dynamic", "reward"):
        return import_module(f"iep.{name}")
    if name in __all__:
        return getattr(import_module("iep.asking.loading"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
