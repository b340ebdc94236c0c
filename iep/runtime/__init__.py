"""Files, locks, signals, devices and distributed processes. Nothing here depends on CLEVR."""
