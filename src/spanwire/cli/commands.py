"""Commands that plugins bring: entry points of ``spanwire.commands``, each a ``typer.Typer`` under the entry's name.

Its commands stand below that name: ``spanwire jobs show``. An application of a single command of that very name is the
command itself: ``spanwire doctor``. They are loaded when they are asked for or listed. A broken one is a warning on stderr and nothing else.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from ..errors import ConfigurationError, SpanwireError
from ..plugins import _disabled, _dist_name
from .output import complain

__all__ = ["SpanwireGroup"]

GROUP = "spanwire.commands"
#: Which extra brings a command of ours: for the message that it is not installed. A test holds it against the entry points.
_EXTRAS = {"doctor": "instrument", "jobs": "webhook", "receive": "webhook"}


class SpanwireGroup(TyperGroup):
    """Our commands and the plugins'. An error of ours is one line, in whatever command it happens.

    The exit code is 2 where what was typed, or is in the environment, has to change, and 1 where the thing itself failed.
    """

    _found: dict[str, Any] | None = None

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except SpanwireError as error:
            complain(error)
            # By its very type: a broken plugin, and files without calls, are no mistake of whoever typed the command.
            raise typer.Exit(2 if type(error) is ConfigurationError else 1) from error

    def list_commands(self, ctx: Any) -> list[str]:
        """Ours in their order, then the plugins'."""
        own = super().list_commands(ctx)
        return [*own, *sorted(name for name in self._plugins() if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Ours first: a plugin cannot replace it. None if there is none, or it is broken."""
        return super().get_command(ctx, cmd_name) or self._plugin(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that was typed; one that is not installed is named with its extra."""
        name = args[0] if args else ""
        extra = _EXTRAS.get(name)
        if extra is not None and name not in self._plugins():
            ctx.fail(f"'{name}' is not installed: pip install 'spanwire[{extra}]'")
        return super().resolve_command(ctx, args)

    def _plugins(self) -> dict[str, Any]:
        """Entry points, and commands once they are loaded; None for a broken one, which was complained about."""
        if self._found is None:
            disabled = _disabled()
            self._found = {
                entry.name: entry
                for entry in metadata.entry_points(group=GROUP)
                if not disabled & {entry.name, _dist_name(entry)}
            }
        return self._found

    def _plugin(self, name: str) -> Any:
        found = self._plugins().get(name)
        # By what it is not: the backport `importlib_metadata`, once imported, gives entry points of a class of its own.
        if found is not None and not isinstance(found, (TyperCommand, TyperGroup)):
            found = self._plugins()[name] = _load(found)
        return found


def _load(entry: metadata.EntryPoint) -> Any:
    try:
        app: typer.Typer = entry.load()
        group = get_group(app)  # checks the commands' signatures; fails on what is no Typer
        alone = list(group.commands) == [entry.name] and app.registered_callback is None
        command = get_command(app) if alone else group
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever somebody else's module raises
        complain(f"command {entry.name!r} of {_dist_name(entry)} is left out: {type(error).__name__}: {error}")
        return None
    command.name = entry.name
    return command
