"""Measures how long whole processes of `ultrabench sweep plan --json` take,
of the playbook's grid and of a large one.
"""

from timing import costs, medians, ultrabench

LARGE = (
    "sweep.models=[llama3-8b,llama3-70b,llama3-405b]", "hardware=h100x8", "sweep.nodes=[1,2,4,8,16,32,64]",
    "sweep.cp=[1,2,4,8]", "sweep.recompute=[none,selective,full]", "sweep.pp_schedule=[1f1b,interleaved]",
    "sweep.virtual_stages=[2,4]", "sweep.tp=[1,2,4,8]", "sweep.pp=[1,2,4,8,16]",
)  # fmt: skip
"""A grid of 101,520 candidates, many of them with several stages on a rank."""

times_s = medians(
    {"help": ultrabench("--help"), "plan": ultrabench("sweep", "plan", "sweep=playbook", "--json")}, 7
)
print(f"plan {times_s['plan']:.2f} s for 12,000 candidates, {times_s['plan'] / times_s['help']:.1f} x --help")
cpu_s, wall_s = costs(ultrabench("sweep", "plan", *LARGE, "--json"))
print(
    f"plan {wall_s:.1f} s for 101,520 candidates, {wall_s / times_s['help']:.0f} x --help; {cpu_s:.1f} s of CPU time"
)
