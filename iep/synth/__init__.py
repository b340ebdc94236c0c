"""A seed -> synthetic CLEVR: scenes, pictures and questions in the layout of CLEVR v1.0, from Python packages alone."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iep.synth.environment import sample

__all__ = ["sample"]


def __getattr__(name: str) -> Any:
    """Import `sample`, and what draws images with it, when it is first used."""
    if name == "sample":
        from iep.synth import environment

        return environment.sample
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
