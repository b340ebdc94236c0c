"""Train and run neural module networks on CLEVR, batched across examples."""

__version__ = "0.1.0"
