"""The commands. Importing this package makes a command end with one line on Ctrl-C and SIGTERM from its start."""

import sys

from iep.runtime.signals import quit_on_signals

# While `python -m` looks for a module of this package, sys.argv[0] is "-m"; worker processes have their parent's.
if sys.argv[0] == "-m" or (sys.argv[0].rpartition("/")[2].startswith("iep-") and "multiprocessing" not in sys.modules):
    quit_on_signals()
