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
    from ultrabench.cli.tables import plain_text, print_json, say, show, table
    from ultrabench.sweep.config.files import FOLDER_BY_NAME, FOLDER_BY_OVERRIDE, describe, files, read_text

    if group is not None:
        require_known("config group", FOLDER_BY_NAME, group := group.removesuffix("s"))
    if group is not None and name is not None:
        path_by_name = files(FOLDER_BY_NAME[group])
        require_known(group, path_by_name, name)
        file_text = read_text(path_by_name[name])
        if json_:
            print_json({"path": str(path_by_name[name]), "text": file_text})
        else:
            say(str(path_by_name[name]))
            sys.stdout.write(plain_text(file_text))
        return
    texts_by_group = {name: describe(FOLDER_BY_NAME[name]) for name in ([group] if group else FOLDER_BY_NAME)}
    if json_:
        print_json(texts_by_group)
        return
    for group_name, text_by_name in texts_by_group.items():
        title = f"{group_name}=" if group_name in FOLDER_BY_OVERRIDE else f"{group_name} (sweep show --as)"
        show(table(title, "name", "what it is", rows=text_by_name.items()), "")
