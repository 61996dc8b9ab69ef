"""Runs ultrabench with a wrong clock: python clock.py OFFSET_S WORDS...

The monotonic clock does not change, nor do the time stamps of files, which come from a file server.
"""

import sys
import time

OFFSET_S = float(sys.argv.pop(1))
true_time = time.time
time.time = lambda: true_time() + OFFSET_S
time.time_ns = lambda: int(time.time() * 1e9)
true_localtime, true_gmtime = time.localtime, time.gmtime
time.localtime = lambda seconds=None: true_localtime(time.time() if seconds is None else seconds)
time.gmtime = lambda seconds=None: true_gmtime(time.time() if seconds is None else seconds)


from ultrabench.cli.main import main  # noqa: E402 - the clock first

sys.exit(main())
