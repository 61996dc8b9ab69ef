"""`ultrabench configs` lists the names that overrides may use, and prints the file of a name."""

import sys
from typing import Any

import typer

from ultrabench.cli.options import Json
from ultrabench.errors import require_known

KNOBS_LEGEND = (
    "A sweep lists values: +sweep.flags.NAME=[A,B]. Values in brackets are the usual ones, * is any number or word. "
    "After a value: (fitted) or (prior), where the profile says what it changes. Predictions do not know what other "
    "values change, and have wider intervals with them."
)
"""What is said below the table of knobs."""
KNOBS_WIDTH = 120
"""Columns of the table of knobs when it is piped."""


def _knobs(name: str) -> list[dict[str, Any]]:
    """The knobs of a kernel: what each sets, and its values with what the usual profile knows of them.

    `known` is fitted or prior where the profile says which constants a value changes, usual where the constants of
    the profile are for it, and null where predictions do not know what it changes.
    """
    from ultrabench.kernel_config import ANY
    from ultrabench.sweep.config.knobs import with_texts
    from ultrabench.sweep.config.load import kernel_settings, load_profile

    settings = with_texts(kernel_settings(name))
    if not settings.get("knobs"):
        return []
    profile = load_profile(str(settings.get("profile") or "ultrabench"))
    flags, usual_values = settings.get("flags") or {}, settings.get("knob_values") or {}
    knobs = list[dict[str, Any]]()
    for knob, meaning in settings["knobs"].items():
        values = [str(value) for value in flags.get(knob) or {}]
        first_value = values[0] if values else ANY
        usual_value = str(usual_values.get(knob, first_value))
        known_by_value = {
            value: profile.knowledge(knob, value, first_value)
            for value in dict.fromkeys((usual_value, *values))
        }
        knobs.append({
            "name": knob, "meaning": meaning, "usual": usual_value, "profile": profile.name,
            "values": [{"value": value, "known": known} for value, known in known_by_value.items()],
        })  # fmt: skip
    return knobs


def _values_text(knob: dict[str, Any]) -> str:
    """The values of a knob, the usual one in brackets, each with what the profile knows of it."""
    texts = list[str]()
    for entry in knob["values"]:
        value_text = f"[{entry['value']}]" if entry["value"] == knob["usual"] else entry["value"]
        known_text = "" if entry["known"] in ("usual", None) else f" ({entry['known']})"
        texts.append(f"{value_text}{known_text}")
    return ", ".join(texts)


def configs(
    group: str | None = typer.Argument(None, help="A group, such as model."),
    name: str | None = typer.Argument(None, help="A name in this group; prints its file."),
    json_: Json = False,
) -> None:
    """List the configuration files for overrides, or print one."""
    from ultrabench.cli.tables import output_console, plain_text, print_json, say, show, table
    from ultrabench.sweep.config.files import FOLDER_BY_NAME, FOLDER_BY_OVERRIDE, describe, files, read_text

    if group is not None:
        require_known("config group", FOLDER_BY_NAME, group := group.removesuffix("s"))
    if group is not None and name is not None:
        path_by_name = files(FOLDER_BY_NAME[group])
        require_known(group, path_by_name, name)
        file_text = read_text(path_by_name[name])
        if json_:
            document: dict[str, Any] = {"path": str(path_by_name[name]), "text": file_text}
            print_json(document | ({"knobs": _knobs(name)} if group == "kernel" else {}))
            return
        say(str(path_by_name[name]))
        sys.stdout.write(plain_text(file_text))
        sys.stdout.flush()
        if group == "kernel" and (knobs := _knobs(name)):
            rows = [(knob["name"], knob["meaning"], _values_text(knob)) for knob in knobs]
            title = f"knobs (profile={knobs[0]['profile']})"
            console = output_console(stderr=True, pipe_width=KNOBS_WIDTH)
            console.print_line(table(title, "name", "what it sets", "values", rows=rows))
            console.print(KNOBS_LEGEND)
        return
    texts_by_group = {name: describe(FOLDER_BY_NAME[name]) for name in ([group] if group else FOLDER_BY_NAME)}
    if json_:
        print_json(texts_by_group)
        return
    for group_name, text_by_name in texts_by_group.items():
        title = f"{group_name}=" if group_name in FOLDER_BY_OVERRIDE else f"{group_name} (sweep show --as)"
        show(table(title, "name", "what it is", rows=text_by_name.items()), "")
