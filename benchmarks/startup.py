"""Measures how long `ultrabench --help` takes, and the part of it that any such command line needs."""

from timing import medians, python, ultrabench

times_s = medians(
    {"python": python("pass"), "typer": python("import typer, rich"), "help": ultrabench("--help")}, 15
)
for name, seconds in times_s.items():
    print(f"{name:8} {seconds * 1000:7.1f} ms  {seconds / times_s['typer']:5.2f} x import typer, rich")
