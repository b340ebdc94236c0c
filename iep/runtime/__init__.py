"""The machine under a job -> files written whole, locks, answered signals, devices, processes that act as one."""
