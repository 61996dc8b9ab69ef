"""`ultrabench configs` lists the names that overrides may use, and prints the file of a name."""

import sys

import typer

from ultrabench.cli.options import Json
from ultrabench.errors import require_known


def configs(
    group: str | None = typer.Argument(None, help="A group, such as model."),
    name: str | None = typer.Argument(None, help="A name in this group; prints its file."),
    json_: Json = False,
) -> None:
    """List the configuration files for overrides, or print one."""
    from ultrabench.cli.tables import plain, print_json, say, show, table
    from ultrabench.sweep.config.files import FOLDER_BY_NAME, FOLDER_BY_OVERRIDE, describe, files, read_text

    if group is not None:
        require_known("config group", FOLDER_BY_NAME, group := group.removesuffix("s"))
    if group is not None and name is not None:
        path_by_name = files(FOLDER_BY_NAME[group])
        require_known(group, path_by_name, name)
        text = read_text(path_by_name[name])
        if json_:
            print_json({"path": str(path_by_name[name]), "text": text})
        else:
            say(str(path_by_name[name]))
            sys.stdout.write(plain(text))
        return
    by_group = {
        group_name: describe(FOLDER_BY_NAME[group_name])
        for group_name in ([group] if group else FOLDER_BY_NAME)
    }
    if json_:
        print_json(by_group)
        return
    for group_name, options in by_group.items():
        title = f"{group_name}=" if group_name in FOLDER_BY_OVERRIDE else f"{group_name} (sweep show --as)"
        show(table(title, "name", "what it is", rows=options.items()), "")
