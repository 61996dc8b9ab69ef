#!/bin/sh
# The shortest program that is a run for ultrabench: 2 warm-up and 6 measured steps, and done.
step='{"event": "step", "seconds": 0.001, "loss": 1.0}\n'
printf "$step$step$step$step$step$step$step$step"'{"event": "done"}\n' >> "$ULTRABENCH_REPORT"
