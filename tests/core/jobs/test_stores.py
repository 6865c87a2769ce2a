"""Stores by URL: which are found, what is said where one is not, and what is never said."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from spanwire import plugins
from spanwire.errors import ConfigurationError, JobError
from spanwire.jobs.settings import JobSettings
from spanwire.jobs.sqlite import SQLiteStore
from spanwire.jobs.stores import file_of, open_store, redacted, without_secrets

SECRET = "hunter2"
URL = f"mine://me:{SECRET}@h/db?token={SECRET}&keep_s=5"


class Installed:
    """Distributions with entry points, on the disk, as pip leaves them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        monkeypatch.syspath_prepend(str(folder))
        self._module = ModuleType("mine_of_a_test")
        monkeypatch.setitem(sys.modules, "mine_of_a_test", self._module)

    def add(self, dist: str, scheme: str, factory: Callable[[str], Any] | None, value: str | None = None) -> None:
        if factory is not None:
            setattr(self._module, dist, factory)
        folder = self.folder / f"{dist}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1\n")
        (folder / "entry_points.txt").write_text(
            f"[spanwire.job_stores]\n{scheme} = {value or f'mine_of_a_test:{dist}'}\n"
        )
        plugins._entry_points.cache_clear()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installed]:
    yield Installed(tmp_path, monkeypatch)
    plugins._entry_points.cache_clear()


def test_a_store_of_somebody_else_is_opened(installed: Installed, tmp_path: Path) -> None:
    urls: list[str] = []

    def factory(url: str) -> SQLiteStore:
        urls.append(url)
        return SQLiteStore(tmp_path / "jobs.db")

    installed.add("a_store", "mine", factory)
    store = open_store(URL.replace("mine", "MINE"))
    assert isinstance(store, SQLiteStore)
    assert urls == [URL.replace("mine", "MINE")]
    store.close()


def test_a_scheme_that_two_bring_names_both(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    installed.add("one_store", "mine", lambda url: None)
    installed.add("two_store", "mine", lambda url: SQLiteStore())
    with pytest.raises(ConfigurationError, match="both one_store and two_store") as caught:
        open_store(URL)
    assert SECRET not in str(caught.value)
    monkeypatch.setenv("SPANWIRE_DISABLE_PLUGINS", "one_store")
    open_store(URL).close()


def raises(error: Exception) -> Callable[[str], Any]:
    def factory(url: str) -> Any:
        raise error

    return factory


@pytest.mark.parametrize(
    ("factory", "value", "match"),
    [
        (None, "no_such_module_of_ours:x", "broken_store .*No module named"),
        (None, "json:no_such_name", "broken_store .*no_such_name"),
        (
            lambda url: object(),
            None,
            r"broken_store .*no store of jobs: it has no add\(\), applied\(\), .*, verified\(\)$",
        ),
        (raises(ValueError(f"bad {URL}")), None, r"broken_store .*mine://me:\*\*\*@h/db\?token=\*\*\*&keep_s=\*\*\*"),
        (raises(OSError(f"password {SECRET!r}")), None, r"broken_store .*password '\*\*\*'"),
        (raises(ConfigurationError("its own words")), None, "its own words"),
    ],
)
def test_a_broken_one_says_whose_it_is(
    installed: Installed, factory: Callable[[str], Any] | None, value: str | None, match: str
) -> None:
    installed.add("broken_store", "mine", factory, value)
    with pytest.raises(ConfigurationError, match=match) as caught:
        open_store(URL)
    shown: BaseException | None = caught.value
    while shown is not None:  # a traceback shows them all
        assert SECRET not in str(shown)
        shown = shown.__cause__


def test_its_own_error_is_its_own(installed: Installed) -> None:
    installed.add("down_store", "mine", raises(JobError("down", retryable=True)))
    with pytest.raises(JobError, match="down"):
        open_store(URL)


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("postgresql://u:hunter2@h/d", r"pip install 'spanwire\[postgresql\]'"),
        ("postgres://u:hunter2@h/d", r"pip install 'spanwire\[postgresql\]'"),
        ("rediss://u:hunter2@h/0", r"pip install 'spanwire\[redis\]'"),
        ("other://u:hunter2@h/d", "sqlite:///jobs.db"),
    ],
)
def test_what_is_not_installed_names_what_to_install(url: str, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_entry_points", lambda group: ())
    with pytest.raises(ConfigurationError, match=match) as caught:
        open_store(url)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:p@h:5432/d?keep_s=5&sslpassword=x", "postgresql://u:***@h:5432/d?keep_s=***&sslpassword=***"),
        ("postgresql://u:p@ss:w/rd?@h/d", "postgresql://u:***@h/d"),
        ("postgresql://h/d", "postgresql://h/d"),
        ("postgresql://u@h/d", "postgresql://u@h/d"),
        ("redis://:p@h/0", "redis://:***@h/0"),
        ("postgresql:///d?password=p#q", "postgresql:///d?password=***"),
        ("sqlite:////srv/jobs.db", "sqlite:////srv/jobs.db"),
    ],
)
def test_what_is_shown_of_a_url(url: str, shown: str) -> None:
    assert redacted(url) == shown


def test_what_others_write_is_cleaned() -> None:
    url = "postgresql://u:p%40ss@h/d?sslpassword=other%20one"
    text = f'cannot use "{url}": password "p@ss", then p%40ss, then other one'
    assert without_secrets(text, url) == (
        'cannot use "postgresql://u:***@h/d?sslpassword=***": password "***", then ***, then ***'
    )


def test_a_password_that_was_taken_for_a_host_is_not_shown() -> None:
    """An @ in it that is not written %40: the driver looks for a host of that name."""
    url = "postgresql://u:p@hun@ter@h/db"
    for host in ("hun@ter@h", "ter@h"):
        assert without_secrets(f"failed to resolve host '{host}'", url) == "failed to resolve host '***@h'"


def test_settings_show_no_password() -> None:
    settings = JobSettings(
        store=URL, mode="poll", callback=lambda base, row, key: "", check_url=lambda url: url, public_url=None
    )
    assert SECRET not in repr(settings)
    assert SECRET not in repr(list(settings.__rich_repr__()))


def test_only_a_file_has_a_file() -> None:
    assert file_of("sqlite:///jobs.db") == Path("jobs.db")
    assert file_of("sqlite://") is None
    assert file_of("postgresql://u:[x@h/d") is None  # and no error of a URL's, which would show it
