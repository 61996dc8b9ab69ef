"""What a sweep varies beside layouts: the options of a run whose values are in its `variant`.

A variant is a mapping from the name of an option to its value:

compile, attention    options of the kernel
env.NAME              an environment variable of the program; None means that it is unset
flags.NAME            the name of a group of arguments that is added to the command
words.NAME            a word of the user, which the command uses in braces
container, python     where the program runs
option.NAME           a column of an imported table in which rows of one layout differ

It holds only options for which the sweep lists several values, so that runs of other sweeps have an empty one.
"""

import hashlib
from collections.abc import Mapping, Sequence

Value = str | int | float | bool | None
"""The value of an option; None for an environment variable that is unset."""
Variant = Mapping[str, Value]
KERNEL_OPTIONS = ("compile", "attention")
"""Options of the kernel that a variant may hold; run_id has them in the kernel."""
JOB_OPTIONS = ("container", "python")
"""Options that all runs of an allocation share, since its agents run in the container or by the interpreter."""
ENV, FLAGS, WORDS = "env", "flags", "words"
"""The groups of options whose names a user chooses; the name of such an option is GROUP.NAME."""
OPTION = "option"
"""The group of options that imported tables have; no sweep lists them."""
Runtime = tuple[Value, ...]
"""The container and the interpreter of an allocation, its values of JOB_OPTIONS; None for an option of which the sweep
lists one value at most."""
CELL_OPTIONS = ("seq_len", "gbs", "precision")
"""Options that change what is computed, so that runs with other values are in other cells."""


UNSET = "unset"
"""The text of an option that is not set."""


def options_in_group(variant: Variant, group: str) -> dict[str, Value]:
    """NAME -> value of the options GROUP.NAME of a variant."""
    return {name.partition(".")[2]: value for name, value in variant.items() if name.startswith(f"{group}.")}


CONTAINER_WORD = "{container}"
"""What launcher.python and launcher.srun have in place of the container of an allocation."""


def fill_in_container(variant: Variant, command_words: Sequence[str]) -> tuple[str, ...]:
    """The words of a command, in which CONTAINER_WORD is replaced by the container of a variant."""
    container = variant.get("container")
    new_word = CONTAINER_WORD if container is None else str(container)
    return tuple(word.replace(CONTAINER_WORD, new_word) for word in command_words)


def job_options(variant: Variant) -> dict[str, Value]:
    """The options of a variant that all runs of an allocation share."""
    return {name: variant[name] for name in JOB_OPTIONS if name in variant}


def runtime_of(variant: Variant) -> Runtime:
    """The container and the interpreter of the allocations that run this variant."""
    return tuple(variant.get(name) for name in JOB_OPTIONS)


def runtime_text(runtime: Runtime) -> str:
    """A runtime as messages name it, such as `container=a.sif, python=/opt/b/bin/python`."""
    return ", ".join(
        f"{name}={value_text(v)}" for name, v in zip(JOB_OPTIONS, runtime, strict=True) if v is not None
    )


def variables_of(variant: Variant) -> dict[str, str | None]:
    """Name -> value of the environment variables of a variant; None for one that is unset."""
    return {k: None if v is None else str(v) for k, v in options_in_group(variant, ENV).items()}


def identity(variant: Variant) -> dict[str, Value]:
    """The options that run_id hashes: not those of the kernel, which it has anyway, and no unset variables."""
    return {k: v for k, v in sorted(variant.items()) if k not in KERNEL_OPTIONS and v is not None}


def program_options(variant: Variant) -> tuple[tuple[str, Value], ...]:
    """The options that change which program runs; its losses may differ from those of another one."""
    program_groups = (*JOB_OPTIONS, ENV, FLAGS, WORDS)
    return tuple((k, v) for k, v in identity(variant).items() if k.partition(".")[0] in program_groups)


def option_texts(variant: Variant) -> list[str]:
    """The short texts of a variant, such as `NCCL_ALGO=Ring`."""
    return [f"{one_line(k.partition('.')[2] or k)}={value_text(v)}" for k, v in sorted(variant.items())]


MAX_LABEL_LENGTH = 40
"""Largest number of characters of a value in labels."""


def value_text(value: Value) -> str:
    """The value of an option as short texts show it: on one line, and cut if it is long.

    Two values never have the same text only because both are cut: a cut one ends with a digest of the whole value.
    """
    if value is None:
        return UNSET
    return (str(value).lower() if isinstance(value, bool) else one_line(str(value))) or "''"


def one_line(text: str) -> str:
    """A text of the user as a label: line breaks and control characters as escapes, cut to MAX_LABEL_LENGTH."""
    label = text if text.isprintable() else "".join(map(_printable, text))
    if len(label) <= MAX_LABEL_LENGTH:
        return label
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:6]
    return f"{label[: MAX_LABEL_LENGTH - 10]}...#{digest}"


def _printable(character: str) -> str:
    """The character, or its escape such as `\\n` if it is not printable."""
    return character if character.isprintable() else character.encode("unicode_escape").decode()
