"""What a process does with memory that it has freed."""

import os
import subprocess
import sys

import pytest

PAGE_FAULTS = """
import resource
from iep.runtime.memory import keep_freed_memory
if {keep}: keep_freed_memory()
import numpy as np
for _ in range(5): [np.ones(6_000_000) for _ in range(4)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10): [np.ones(6_000_000) for _ in range(4)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(keep, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PAGE_FAULTS.format(keep=keep)]
    done = subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_kept_for_the_next_allocation():
    assert page_faults(keep=True) < page_faults(keep=False) / 10


def test_settings_of_the_allocator_by_the_user_stay():
    assert page_faults(keep=True, MALLOC_ARENA_MAX="2") > 10 * page_faults(keep=True)
