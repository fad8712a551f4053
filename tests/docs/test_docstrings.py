"""Every public name says what it takes, gives and raises; the examples in docstrings do what they show."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import pytest

import mla
import mla.registry
import mla.testing

SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Example|Examples|Source):$", re.M)
ENTRY = re.compile(r"^    (?P<name>\*{0,2}\w+): ", re.M)
FIELD_COMMENT = re.compile(r"^    (?P<name>\w+): .*  #: \S", re.M)

NOT_FOR_CALLERS = {
    "Backend": "a protocol: its members are documented one by one",
    "BackendUnsupported": "raised by mla, not made by callers",
    "Mismatch": "raised by mla.testing, not made by callers",
    "Problem": "made by Problem.from_call, whose arguments are those of the call",
}
"""Classes whose constructor needs no Args, with the reason."""

LIKE_THE_CALL = {"explain", "warmup"}
"""Functions whose arguments are those of the call; they refer to it."""


def public() -> dict[str, Any]:
    names = {f"mla.{name}": getattr(mla, name) for name in mla.__all__}
    return names | {f"mla.testing.{name}": getattr(mla.testing, name) for name in mla.testing.__all__}


def described(name: str, value: Any) -> Any:
    """What carries the docstring of a public name."""
    return mla.registry.backends if name == "mla.backends" else value


FUNCTIONS = {
    name: described(name, value)
    for name, value in public().items()
    if inspect.isfunction(described(name, value))
}  # fmt: skip
CLASSES = {name: value for name, value in public().items() if inspect.isclass(value)}
METHODS = {
    f"{name}.{attribute}": member
    for name, value in CLASSES.items()
    for attribute, member in vars(value).items()
    if not attribute.startswith("_") and isinstance(member, types.FunctionType | classmethod | property)
}
CONSTANTS = {name for name in public() if name not in FUNCTIONS | CLASSES}


def sections(doc: str) -> dict[str, str]:
    """Section -> text; the text before the first one is under ""."""
    parts = SECTION.split(inspect.cleandoc(doc))
    return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


def entries(text: str) -> list[str]:
    return [match["name"].lstrip("*") for match in ENTRY.finditer(text)]


def plain(function: Any) -> Any:
    """The function itself, without classmethod, property and wrappers."""
    if isinstance(function, property):
        return function.fget
    return inspect.unwrap(getattr(function, "__func__", function))


def raised_by(function: Any) -> set[str]:
    """Names of the exceptions that the function's own body raises."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(plain(function))))
    raises = (node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None)
    return {exc.func.id for exc in raises if isinstance(exc, ast.Call) and isinstance(exc.func, ast.Name)}


def test_nothing_public_is_left_out() -> None:
    assert {"mla.testing.PROPERTIES", "mla.testing.SM_SCALE"} == CONSTANTS
    assert len(FUNCTIONS) + len(CLASSES) + len(CONSTANTS) == len(mla.__all__) + len(mla.testing.__all__)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_tells_its_arguments_result_and_errors(name: str) -> None:
    function = FUNCTIONS[name]
    parts = sections(function.__doc__)
    assert parts[""].strip()
    if function.__name__ in LIKE_THE_CALL:
        assert entries(parts["Args"]) == ["args", "kwargs"]
    else:
        assert entries(parts.get("Args", "")) == list(inspect.signature(function).parameters)
    nothing = inspect.signature(function).return_annotation in (None, "None", "Iterator[None]")
    assert ("Returns" in parts) != nothing
    assert raised_by(function) <= set(entries(parts.get("Raises", "")))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_says_what_it_is(name: str) -> None:
    function = METHODS[name]
    parts = sections(plain(function).__doc__ or "")
    assert parts[""].strip()
    parameters = [each for each in inspect.signature(plain(function)).parameters if each not in ("self", "cls")]
    assert entries(parts.get("Args", "")) in ([], parameters)
    assert raised_by(function) <= set(entries(parts.get("Raises", "")))


def field_names(value: type) -> list[str]:
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value) if not field.name.startswith("_")]
    return []


def attributes_told(value: type) -> list[str]:
    """Those under Attributes, or those with a `#:` comment beside the field."""
    parts = sections(value.__doc__ or "")
    if "Attributes" in parts:
        return entries(parts["Attributes"])
    return [match["name"] for match in FIELD_COMMENT.finditer(inspect.getsource(value))]


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_tells_its_attributes(name: str) -> None:
    value = CLASSES[name]
    assert sections(value.__doc__ or "")[""].strip()
    told = attributes_told(value)
    if dataclasses.is_dataclass(value):
        assert told == [each for each in field_names(value) if not hidden(value, each)]
    else:
        assert value.__name__ in NOT_FOR_CALLERS or value.__init__ is value.__mro__[1].__init__


def hidden(value: type, attribute: str) -> bool:
    """Fields that do not show in a repr are for the class itself, unless it says otherwise."""
    (field,) = (each for each in dataclasses.fields(value) if each.name == attribute)
    return not field.repr and attribute not in attributes_told(value)


def test_the_constants_are_explained_where_they_are_made() -> None:
    for name in CONSTANTS:
        constant = name.rpartition(".")[2]
        module = "mla.testing.properties" if constant == "PROPERTIES" else "mla.testing.case"
        lines = inspect.getsource(importlib.import_module(module))
        assert re.search(rf"^{constant}\b.* = .*  #: \S|^#: .*\n{constant}\b", lines, re.M), f"{name} has no #: comment"


def modules() -> Iterator[str]:
    """Modules of the public face whose docstrings may hold examples. Kernels and the command line have none."""
    yield "mla"
    for package in (mla, mla.testing):
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if not found.ispkg and found.name not in ("mla.__main__", "mla.testing.pytest_plugin"):
                yield found.name


def examples() -> dict[str, doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for name in modules() for test in finder.find(importlib.import_module(name)) if test.examples]
    return {test.name: test for test in found}


EXAMPLES = examples()


def test_the_calls_that_people_begin_with_have_examples() -> None:
    begun = {"explain", "warmup", "trtllm_batch_decode_with_kv_cache_mla", "merge_state", "append_tokens"}
    begun |= {"quantize_e4m3", "strict", "register_backend", "build", "judge_kernel"}
    assert begun <= {name.rpartition(".")[2] for name in EXAMPLES}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_in_docstrings_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mla.backends()
    monkeypatch.setattr(mla.registry, "_entries", dict(mla.registry._entries))  # what an example registers is forgotten
    told: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    result = runner.run(EXAMPLES[name], out=told.append)
    assert result.failed == 0, "".join(told)
