"""Settings of the unit tests, made before any of them imports torch or numpy."""

import os

# Idle threads wait by spinning, which costs more than they save with the small tensors of tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")
