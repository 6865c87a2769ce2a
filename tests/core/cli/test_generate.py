import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import pytest

from spanwire.cli.generate import generate, project_of
from spanwire.errors import ConfigurationError
from tests.plugin_projects import foreign_imports, on_path

from .conftest import Plugin, Spanwire

Kind = Literal["transport", "dialect"]

both = pytest.mark.parametrize("kind", ["transport", "dialect"])


def made(spanwire: Spanwire, folder: Path, kind: str, name: str = "my-wire") -> Path:
    found = spanwire(f"new-{kind}", name, "--output", str(folder))
    assert (found.exit_code, found.stderr) == (0, "")
    return folder / "spanwire-my-wire"


@both
@pytest.mark.parametrize("name", ["my-wire", "my_wire", "My.Wire", "spanwire-my-wire"])
def test_a_name_in_all_its_places(spanwire: Spanwire, tmp_path: Path, kind: str, name: str) -> None:
    root = made(spanwire, tmp_path, kind, name)
    data = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    major, minor, *_ = version("spanwire").split(".")
    assert data["project"]["name"] == "spanwire-my-wire"
    assert data["project"]["dependencies"] == [f"spanwire>={major}.{minor},<{major}.{int(minor) + 1}"]
    group = "spanwire.transports" if kind == "transport" else "spanwire.plugins"
    assert data["project"]["entry-points"][group] == {"my-wire": "spanwire_my_wire"}
    for file in ("README.md", ".gitignore", ".github/workflows/test.yml", "src/spanwire_my_wire/py.typed"):
        assert (root / file).is_file(), file


@both
def test_nothing_of_the_templates_is_left(spanwire: Spanwire, tmp_path: Path, kind: str) -> None:
    root = made(spanwire, tmp_path, kind)
    for file in root.rglob("*"):
        assert "PACKAGE" not in file.name
        assert file.suffix != ".tmpl"
        text = file.read_text("utf-8") if file.is_file() else ""
        assert "$" not in text.replace("${{ matrix.", ""), file


@both
def test_the_folder_is_told_and_what_to_do_next(spanwire: Spanwire, tmp_path: Path, kind: str) -> None:
    found = spanwire(f"new-{kind}", "my-wire", "--output", str(tmp_path))
    root = tmp_path / "spanwire-my-wire"
    count = sum(file.is_file() for file in root.rglob("*"))
    assert found.stdout.splitlines()[0] == f"{root}: {count} files"
    assert found.stdout.splitlines()[-1] == f"Next: cd {root} && pip install -e '.[test]' && pytest"


@both
def test_a_folder_that_exists_is_left_alone(spanwire: Spanwire, tmp_path: Path, kind: str) -> None:
    mine = tmp_path / "spanwire-my-wire"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    found = spanwire(f"new-{kind}", "my-wire", "--output", str(tmp_path))
    assert found.exit_code == 2
    assert f"{mine} exists" in found.stderr
    assert [file.name for file in mine.iterdir()] == ["notes.txt"]


def test_a_place_that_cannot_be_written_is_told(spanwire: Spanwire, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = spanwire("new-transport", "my-wire", "--output", str(tmp_path / "file"))
    assert found.exit_code == 2
    assert "cannot be made" in found.stderr


def test_half_a_project_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def full(self: Path, *arguments: Any, **more: Any) -> int:
        if self.name == "pyproject.toml":
            raise OSError(28, "No space left on device")
        return write(self, *arguments, **more)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConfigurationError, match="No space left on device"):
        generate(project_of("transport", "my-wire"), tmp_path)
    assert list(tmp_path.iterdir()) == []


@both
@pytest.mark.parametrize("name", ["", "-", "1st", "my wire", "naïve", "a/b", "../x", "x" * 41, "spanwire-"])
def test_what_is_no_name_is_refused(kind: Kind, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"is no name for a {kind}"):
        project_of(kind, name, transport="sse")


@pytest.mark.parametrize(
    ("kind", "name", "whose"),
    [
        ("transport", "https", "spanwire's own"),
        ("transport", "grpcs", "spanwire's own"),
        ("transport", "SSE", "spanwire's own"),
        ("transport", "spanwire-websocket", "spanwire's own"),
        ("dialect", "sse", "spanwire's own"),
        ("dialect", "openai", "a dialect on sse"),
    ],
)
def test_a_name_that_is_taken_is_refused(kind: Kind, name: str, whose: str) -> None:
    with pytest.raises(ConfigurationError, match=whose):
        project_of(kind, name, transport="sse")


def test_a_name_that_another_plugin_has_is_refused(spanwire: Spanwire, plugin: Plugin, tmp_path: Path) -> None:
    plugin.entries("spanwire.transports", acme="acme")
    plugin.module(
        "acme",
        "import spanwire\nfrom spanwire.transport import TransportSpec\n\n"
        "@spanwire.hookimpl\ndef register_transports():\n    return [TransportSpec('acme', ('acme',), object)]\n",
    )
    code, _, err = spanwire.run("new-transport", "acme", "-o", str(tmp_path / "out"))
    assert code == 2
    assert "taken, by the transport of acme-plugin: choose another name" in err
    assert not (tmp_path / "out").exists()


def test_a_transport_without_a_template_for_dialects_is_told(spanwire: Spanwire, tmp_path: Path) -> None:
    found = spanwire("new-dialect", "my-wire", "--transport", "pigeon", "-o", str(tmp_path))
    assert found.exit_code == 2
    assert "no template for dialects on 'pigeon', only on sse" in found.stderr


@both
def test_it_uses_public_names_alone(spanwire: Spanwire, tmp_path: Path, kind: str) -> None:
    assert foreign_imports(made(spanwire, tmp_path, kind)) == []


@pytest.mark.parametrize("kind", ["transport", pytest.param("dialect", marks=pytest.mark.long)])
def test_it_is_formatted_and_typed(spanwire: Spanwire, tmp_path: Path, kind: str) -> None:
    root = made(spanwire, tmp_path, kind)
    ruff = [str(Path(sys.executable).parent / "ruff")]
    for command in (
        [*ruff, "format", "--isolated", "--line-length", "120", "--check", "."],
        [*ruff, "check", "--isolated", "--line-length", "120", "--select", "E,F,I,UP,B,RET,PIE", "."],
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "src", "tests"],
    ):
        done = subprocess.run(
            command,
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": "", "MYPYPATH": "src:tests"},
        )
        assert done.returncode == 0, done.stdout + done.stderr


@both
@pytest.mark.timeout(240)
def test_it_is_green_at_once(spanwire: Spanwire, tmp_path: Path, kind: str) -> None:
    """With its entry points, as if it were installed; tests/third_party has it from a wheel."""
    root = made(spanwire, tmp_path, kind)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env=on_path(root, tmp_path),
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert "warning" not in done.stdout


@pytest.mark.timeout(120)
def test_the_demo_runs_over_it(spanwire: Spanwire, tmp_path: Path) -> None:
    root = made(spanwire, tmp_path, "transport")
    done = subprocess.run(
        [sys.executable, "-c", "from spanwire.cli import main; main()", "demo"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=on_path(root, tmp_path),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Transport 'my-wire', to a scripted model at my-wire://127.0.0.1:" in done.stdout
