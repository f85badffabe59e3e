"""What a person runs: one training loop, the comparison, and the plots.

Imports point downward only: this package imports `loco`, never the other way.
"""

import os
import signal
import sys

if sys.argv[:1] == ["-m"]:
    # `python -m experiments.…` is still importing: Ctrl-C ends it without a traceback of the imports.
    # `launch.main` takes over when they are done.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# Must be set before torch loads its thread pool. Idle threads that spin fight with whatever else runs:
# on two busy cores the warm start took 130 s instead of 17.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
