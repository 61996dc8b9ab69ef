"""Reads configuration files: their text as UTF-8, and no more values than a person writes."""

from pathlib import Path

import yaml

from ultrabench.errors import ConfigError

MOST_VALUES = 100_000
"""Largest number of values that a YAML file may stand for; a few aliases of aliases stand for billions."""


def read_text(path: Path) -> str:
    """The text of a configuration file.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return path.read_text()
    except UnicodeDecodeError as error:
        what = f"byte {error.start + 1} of it is not UTF-8"
        raise ConfigError(f"cannot read {path}: {what}; save the file as UTF-8 text") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def require_few_values(path: Path) -> None:
    """Raises ConfigError if the aliases of a YAML file stand for more than MOST_VALUES values."""
    numbers: dict[int, int] = {}

    def number(node: yaml.Node | None) -> int:
        """How many values a node stands for, each alias counted as what it repeats."""
        if not isinstance(node, yaml.CollectionNode):
            return 1
        if id(node) not in numbers:
            numbers[id(node)] = MOST_VALUES  # until it is known: a node may contain itself
            parts = [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
            numbers[id(node)] = 1 + sum(map(number, parts))
        return numbers[id(node)]

    try:
        values = number(yaml.compose(read_text(path), yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError):
        return  # whoever reads it says what is wrong
    if values > MOST_VALUES:
        rule = f"a file may have {MOST_VALUES:,} values"
        raise ConfigError(f"{path}: its aliases stand for {values:,} values; {rule}: write fewer aliases")
