"""The public names: few, sorted, there, and documented."""

from __future__ import annotations

import inspect

import spanwire
from spanwire import errors


def test_all_is_complete_sorted_and_small() -> None:
    names = spanwire.__all__
    assert names == sorted(names, key=lambda name: (not name.isupper(), name.islower(), name))
    assert len(names) <= 25
    public = {
        name for name in vars(spanwire) if not name.startswith("_") and not inspect.ismodule(getattr(spanwire, name))
    }
    assert public - {"annotations"} == set(names)


def test_every_public_name_and_method_has_a_docstring() -> None:
    missing = []
    for name in spanwire.__all__:
        thing = getattr(spanwire, name)
        if not inspect.getdoc(thing):
            missing.append(name)
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                documented = isinstance(value, property) or inspect.isfunction(value)
                if documented and not member.startswith("_") and not inspect.getdoc(getattr(thing, member)):
                    missing.append(f"{name}.{member}")
    assert missing == []


def test_the_error_tree_is_drawn_as_it_is() -> None:
    assert errors.__doc__ is not None
    for name in errors.__all__:
        thing = getattr(errors, name)
        if inspect.isclass(thing):
            assert issubclass(thing, errors.SpanwireError)
            assert name in errors.__doc__
            assert inspect.getdoc(thing)
