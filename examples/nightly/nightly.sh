#!/bin/bash
# One night: the small sweep, then the history of all nights. Exit code 1: a run has become slower for good.
#
#   ./nightly.sh                                                  CPU processes of this machine
#   ./nightly.sh launcher=slurm cluster=mine hardware=h100x8      jobs of a cluster; `ultrabench doctor --write` makes `mine`
#
# Each night is a sweep of its own in $NIGHTS, a folder that all nodes see (default: ~/nights).
set -u
cd "$(dirname "$0")" || exit 2   # the sweep file is in ./ultrabench/sweep/nightly.yaml
nights=${NIGHTS:-$HOME/nights}
ultrabench sweep launch --yes sweep=nightly name="nightly-$(date +%F-%H%M%S)" results_dir="$nights" "$@" ||
  echo "the sweep of this night ended with $?; its history follows" >&2
ultrabench history "$nights" -o "$nights/history.png" --fail-above 2
