"""The benchmarks of `iep-bench`, and the display of schedules."""
