"""The command line: ``spanwire demo | probe | transports``. Installed by ``pip install 'spanwire[cli]'``.

Only :func:`main` is here, and it imports the rest: without the extra there is still a command, which says what to
install. Plugins add commands by the entry-point group ``spanwire.commands`` (see :mod:`spanwire.cli.app`).
"""

from __future__ import annotations

import sys

__all__ = ["main"]

_INSTALL = "spanwire's command line needs typer and rich: pip install 'spanwire[cli]'"


def main() -> None:
    """Run the command line with ``sys.argv``; ends the process.

    Exit codes: 0; 1 for what failed; 2 for what the user has to change: usage, an address, a file, a missing extra;
    130 after Ctrl-C. A reader that went away (``| head``) is 1, without a word.
    """
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError:
        print(_INSTALL, file=sys.stderr)
        sys.exit(2)
    from .app import run

    run()
