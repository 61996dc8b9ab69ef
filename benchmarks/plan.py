"""Measures how long the whole process `ultrabench sweep plan sweep=playbook --json` takes."""

from timing import medians, ultrabench

found = medians(
    {"help": ultrabench("--help"), "plan": ultrabench("sweep", "plan", "sweep=playbook", "--json")}, 7
)
print(f"plan {found['plan']:.2f} s for 12,000 candidates, {found['plan'] / found['help']:.1f} x --help")
