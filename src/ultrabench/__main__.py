"""Makes `python -m ultrabench` the same as the command `ultrabench`."""

from ultrabench.cli.entry import main

if __name__ == "__main__":
    main()
