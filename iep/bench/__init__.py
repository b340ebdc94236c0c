"""What `iep-bench` runs: the speed of the execution engine under every schedule, and schedules made visible."""
