"""Compiled code: `iep.batching.native`."""

import sys

from iep.batching import native

sys.modules[__name__] = native
