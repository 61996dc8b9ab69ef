"""ultrabench on a host whose clock is wrong: python clock.py OFFSET_S WORDS...

The clock that never jumps stays as it is, and so do time stamps of files, which a file server gives.
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
