"""A seed -> synthetic CLEVR: scenes, pictures and questions in the layout of CLEVR v1.0, from Python packages alone."""

from iep.synth.environment import sample

__all__ = ["sample"]
