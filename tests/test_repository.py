"""What has to hold for every distribution in the workspace, also for the ones that are added later."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from spanwire.cli.commands import _EXTRAS as _COMMANDS
from spanwire.plugins import _EXTRAS

ROOT = Path(__file__).parent.parent
MEMBERS = sorted(
    path.parent for pattern in ("plugins", "integrations") for path in ROOT.glob(f"{pattern}/*/pyproject.toml")
)
DISTRIBUTIONS = [ROOT, *MEMBERS]

each_distribution = pytest.mark.parametrize("folder", DISTRIBUTIONS, ids=lambda folder: folder.name)
each_member = pytest.mark.parametrize("folder", MEMBERS, ids=lambda folder: folder.name)


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


VERSION: str = project(ROOT)["project"]["version"]


@each_distribution
def test_wheel_is_typed_and_licensed(folder: Path) -> None:
    data = project(folder)
    packages = data["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert packages
    assert all((folder / package / "py.typed").is_file() for package in packages)
    assert data["project"]["license"] == "Apache-2.0"
    assert data["project"]["license-files"] == ["LICENSE"]
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@each_distribution
def test_one_version_and_one_python_floor_for_all(folder: Path) -> None:
    data = project(folder)["project"]
    assert data["version"] == VERSION
    assert data["requires-python"] == project(ROOT)["project"]["requires-python"]


@each_member
def test_member_requires_the_core_of_its_own_minor_version(folder: Path) -> None:
    major, minor, *_ = VERSION.split(".")
    assert f"spanwire>={major}.{minor},<{major}.{int(minor) + 1}" in project(folder)["project"]["dependencies"]


@each_member
def test_member_can_be_reached_by_the_name_spanwire(folder: Path) -> None:
    """As a dependency or through an extra: users never type the name of a member."""
    data = project(ROOT)["project"]
    wanted = [*data["dependencies"], *(line for extra in data["optional-dependencies"].values() for line in extra)]
    name = project(folder)["project"]["name"]
    major, minor, *_ = VERSION.split(".")
    wanted = [re.sub(r"\[.*\]", "", line) for line in wanted]  # with extras of its own, or none
    assert f"{name}>={major}.{minor},<{major}.{int(minor) + 1}" in wanted


def _brought_by(member: str, extras: dict[str, list[str]]) -> list[str]:
    """The extras that bring a member; of several, such as one for each kind of store, the one of its own name."""
    found = [name for name, lines in extras.items() if re.match(rf"{member}\b", lines[0])]
    return [name for name in found if member == f"spanwire-{name}"] if len(found) > 1 else found


def test_a_transport_that_is_not_installed_is_named_by_its_extra() -> None:
    """Core's table of hints is what the plugins' own entry points and the extras come to."""
    extras = dict(project(ROOT)["project"]["optional-dependencies"])
    found = {}
    for folder in MEMBERS:
        data = project(folder)["project"]
        brought = _brought_by(data["name"], extras)
        for entry in data.get("entry-points", {}).get("spanwire.transports", {}):
            if brought:  # the built-in one comes with core
                (found[entry],) = brought
    assert found == _EXTRAS


def test_a_command_that_is_not_installed_is_named_by_its_extra() -> None:
    extras = dict(project(ROOT)["project"]["optional-dependencies"])
    found = {}
    for folder in MEMBERS:
        data = project(folder)["project"]
        for entry in data.get("entry-points", {}).get("spanwire.commands", {}):
            (found[entry],) = _brought_by(data["name"], extras)
    assert found == _COMMANDS


def test_extra_all_is_all() -> None:
    extras = dict(project(ROOT)["project"]["optional-dependencies"])
    assert extras.pop("all") == [f"spanwire[{','.join(extras)}]"]


@each_member
def test_member_has_its_folder_of_tests(folder: Path) -> None:
    """plugins/spanwire-sse is tested in tests/plugins/sse or tests/plugins/test_sse*.py; integrations/langchain-spanwire
    in tests/integrations/langchain."""
    (package,) = (folder / "src").iterdir()
    name = package.name.removeprefix("spanwire_").removesuffix("_spanwire")
    tests = ROOT / "tests" / folder.parent.name
    assert [*tests.glob(f"{name}/test_*.py"), *tests.glob(f"test_{name}*.py")]


def test_folders_of_core_tests_mirror_the_sources() -> None:
    tested = {path.parent.relative_to(ROOT / "tests" / "core") for path in ROOT.glob("tests/core/**/test_*.py")}
    assert tested
    assert [path for path in tested if not (ROOT / "src" / "spanwire" / path).is_dir()] == []


def test_changelog_knows_this_version() -> None:
    headings = [
        line for line in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines() if line.startswith("## ")
    ]
    assert headings
    assert headings[0] == "## [Unreleased]" or headings[0].startswith(f"## [{VERSION}]")


def test_the_workflow_runs_on_each_system_and_python() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert "os: [ubuntu-latest, macos-latest, windows-latest]" in text
    floor = int(project(ROOT)["project"]["requires-python"].removeprefix(">=3."))
    (versions,) = re.findall(r"^ +python: \[(.*)\]$", text, re.MULTILINE)
    assert versions == ", ".join(f'"3.{minor}"' for minor in range(floor, 15))
