"""Adds the commands of studies to the command line; a study is imported when its command runs or shows its --help."""

from typing import Any

import typer
import typer.core
import typer.main

from ultrabench.analysis.study import Command, Study, names_in_order, studies


def add_study_commands(app: typer.Typer, group: str = "") -> None:
    """Adds the commands of a group, such as `sweep`, each behind the command that its study.py names."""
    core_names = command_names(app)
    pairs = [(study, command) for study in studies() for command in study.commands if command.group == group]
    for study, command in pairs:
        app.command(command.name, cls=_command_class(study, command), help=command.help)(_no_arguments)
    info_by_name = {_name_of(info): info for info in app.registered_commands}
    app.registered_commands = [
        info_by_name[name] for name in names_in_order(core_names, [command for _, command in pairs])
    ]


def command_names(app: typer.Typer) -> list[str]:
    """The names of the commands of a group."""
    return [_name_of(info) for info in app.registered_commands]


def _name_of(info: Any) -> str:
    """The name of a registered command."""
    return str(info.name or typer.main.get_command_name(info.callback.__name__))


def _no_arguments() -> None:
    """The function of a command before its study is imported."""


def _command_class(study: Study, command: Command) -> type[typer.core.TyperCommand]:
    """The class of a command that becomes the command of the study when its arguments are read."""

    class StudyCommand(typer.core.TyperCommand):
        """A command of which the name and the help are known, but not yet its arguments."""

        def make_context(
            self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
        ) -> Any:
            """The context of the study's command, which reads the arguments."""
            return _imported(study, command).make_context(info_name, args, parent, **extra)

    return StudyCommand


def _imported(study: Study, command: Command) -> Any:
    """The command with the arguments of its function, for which the study is imported."""
    module = study.module("command")
    assert module is not None, f"the study {study.name} has no command.py"
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(command.name, help=command.help)(getattr(module, command.function or command.name))
    return typer.main.get_command(app)
