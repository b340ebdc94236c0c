"""Train and run neural module networks on CLEVR, batched across examples."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iep.asking.loading import load

__all__ = ["load"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `load`, and PyTorch with it, when it is first used."""
    if name == "load":
        from iep.asking.loading import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
