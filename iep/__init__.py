"""Train and run neural module networks on CLEVR, batched across examples."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iep.asking.loading import Model, load

__all__ = ["Model", "load"]
__version__ = "0.1.0"


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    """Import `Model` or `load`, and PyTorch with it, when it is first used."""
    if name in __all__:
        from iep.asking import loading

        return getattr(loading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
