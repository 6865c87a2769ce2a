"""``spanwire new-transport`` and ``spanwire new-dialect``: a complete little project from templates; no network.

The templates are the files below ``templates/``, each with ``.tmpl`` at its end, filled in by :class:`string.Template`.
``PACKAGE`` in a path is the package's name, and ``dot-`` at the start of a name a dot, which build tools would leave out.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template
from typing import Literal, NamedTuple

from ..errors import ConfigurationError
from ..plugins import Registry

__all__ = ["Kind", "Project", "generate", "project_of"]

Kind = Literal["transport", "dialect"]

#: PEP 503 (project names, normalized), cut down to what is also a scheme (RFC 3986 section 3.1: a letter first).
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_RUNS = re.compile(r"[-_.]+")
_PREFIX = "spanwire-"
_LONGEST = 40
#: Distributions of ours are called ``spanwire-`` and one of these.
_OURS = frozenset({"core", "grpc", "instrument", "sse", "webhook", "websocket"})
#: Schemes of ours, whether what serves them is installed or not.
_SCHEMES = frozenset({"grpc", "grpcs", "http", "https", "ws", "wss"})
#: Transports for whose dialects there is a template: what a dialect has to be, its transport says.
_WITH_DIALECTS = ("sse",)


class Project(NamedTuple):
    """What a name is called in each of its places."""

    kind: Kind
    name: str
    distribution: str
    package: str
    class_name: str
    transport: str = ""

    def fields(self) -> dict[str, str]:
        """The templates' placeholders."""
        major, minor = version("spanwire").split(".")[:2]
        return {
            "name": self.name,
            "scheme": self.name,
            "distribution": self.distribution,
            "package": self.package,
            "Class": self.class_name,
            "transport": self.transport,
            "lower": f"{major}.{minor}",
            "upper": f"{major}.{int(minor) + 1}",
        }


def project_of(kind: Kind, name: str, *, transport: str = "") -> Project:
    """The project of a name: ``my_wire`` gives the distribution ``spanwire-my-wire`` and the package ``spanwire_my_wire``.

    Raises:
        ConfigurationError: the name is none, or somebody has it; a transport without a template for dialects.
    """
    plain = _RUNS.sub("-", name.strip().lower()).removeprefix(_PREFIX)
    if not _NAME.fullmatch(plain) or len(plain) > _LONGEST:
        raise ConfigurationError(
            f"{name!r:.60} is no name for a {kind}: take letters (of ASCII), digits and hyphens, a letter first, at most "
            f"{_LONGEST}, such as my-wire"
        )
    if kind == "dialect" and transport not in _WITH_DIALECTS:
        raise ConfigurationError(
            f"there is no template for dialects on {transport!r:.60}, only on {', '.join(_WITH_DIALECTS)}"
        )
    taken = _taken(kind, plain, transport)
    if taken is not None:
        raise ConfigurationError(f"{plain!r} is taken, by {taken}: choose another name")
    words = plain.split("-")
    return Project(
        kind=kind,
        name=plain,
        distribution=f"{_PREFIX}{plain}",
        package=f"spanwire_{'_'.join(words)}",
        class_name="".join(word.capitalize() for word in words),
        transport=transport,
    )


def _taken(kind: Kind, name: str, transport: str) -> str | None:
    if name in _OURS:
        return f"spanwire's own distribution {_PREFIX}{name}"
    if kind == "transport" and name in _SCHEMES:
        return "a scheme of spanwire's own"
    for plugin in Registry().describe():
        for spec in plugin["transports"]:
            if kind == "transport" and name in (spec["name"], *spec["schemes"]):
                return f"the transport of {plugin['distribution']}"
            if kind == "dialect" and spec["name"] == transport and name in spec["dialects"]:
                return f"a dialect on {transport} that is installed"
    return None


def generate(project: Project, folder: Path) -> list[Path]:
    """Write the project into a new folder below ``folder``. Returns its files, relative to it.

    Raises:
        ConfigurationError: the folder of the project exists, or cannot be written.
    """
    root = folder / project.distribution
    fields = project.fields()
    written: list[Path] = []
    try:
        root.mkdir(parents=True)
    except FileExistsError as error:
        raise ConfigurationError(f"{root} exists: remove it, or choose another name or --output") from error
    except OSError as error:
        raise ConfigurationError(f"{root} cannot be made: {error.strerror or error}") from error
    try:
        for path, text in _templates(project):
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(Template(text).substitute(fields), encoding="utf-8", newline="\n")
            written.append(path)
    except OSError as error:
        shutil.rmtree(root, ignore_errors=True)  # half a project would be in the way of the next try
        raise ConfigurationError(f"{root} cannot be written: {error.strerror or error}") from error
    return sorted(written)


def _templates(project: Project) -> Iterator[tuple[Path, str]]:
    """Path and text of each file."""
    for parts, file in _walk(files("spanwire.cli") / "templates" / project.kind):
        names = [f".{part[4:]}" if part.startswith("dot-") else part for part in parts]
        yield Path(*(project.package if part == "PACKAGE" else part for part in names)), file.read_text("utf-8")


def _walk(folder: Traversable, parts: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _walk(entry, (*parts, entry.name))
        elif entry.name.endswith(".tmpl"):
            yield (*parts, entry.name.removesuffix(".tmpl")), entry
