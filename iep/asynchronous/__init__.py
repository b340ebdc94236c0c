"""Asynchronous training: the calls of several instances' plans as tasks of workers, each op with its own updates."""
