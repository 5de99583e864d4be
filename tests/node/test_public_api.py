"""The public API is typed, and its `help()` is complete."""

import dataclasses
import inspect
import os
import pickle
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import node

PACKAGES = Path(__file__).parents[2]
PUBLIC = [getattr(node, name) for name in node.__all__]
CLASSES = [value for value in PUBLIC if inspect.isclass(value)]
ERRORS = [cls for cls in CLASSES if issubclass(cls, Exception)]
OWN = [cls for cls in CLASSES if cls.__module__.startswith("node.trainers.")]


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class of this project defines or inherits."""
    for owner in cls.__mro__:
        if owner.__module__.partition(".")[0] in ("node", "codec"):
            yield from ((name, value) for name, value in vars(owner).items() if not name.startswith("_"))


def functions(cls: Any) -> list[Any]:
    """The functions behind the public methods and properties of a class; of a function, itself."""
    if not inspect.isclass(cls):
        return [cls]
    found = []
    for _, value in members(cls):
        value = getattr(value, "__func__", value)
        value = value.fget if isinstance(value, property) else value
        found += [value] if inspect.isfunction(value) else []
    return found


def test_names_are_listed_before_they_are_loaded() -> None:
    code = "import node, sys; print(set(node.__all__) <= set(dir(node)), 'node.trainers.api' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


@pytest.mark.parametrize("cls", PUBLIC, ids=lambda value: value.__name__)
def test_every_public_member_has_a_docstring(cls: Any) -> None:
    assert cls.__doc__
    for function in functions(cls):
        assert function.__doc__, function.__qualname__


@pytest.mark.parametrize("cls", PUBLIC, ids=lambda value: value.__name__)
def test_every_public_member_is_annotated(cls: Any) -> None:
    for function in functions(cls):
        hints = typing.get_type_hints(function)
        parameters = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
        missing = {*parameters, "return"} - hints.keys()
        assert not missing, (function.__qualname__, missing)


@pytest.mark.parametrize("cls", list(filter(dataclasses.is_dataclass, OWN)), ids=lambda cls: cls.__name__)
def test_every_public_field_is_in_the_docstring(cls: Any) -> None:
    fields = [field.name for field in dataclasses.fields(cls) if not field.name.startswith("_")]
    missing = [name for name in fields if not re.search(rf"`{name}[`(]", cls.__doc__ or "")]
    assert not missing


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_every_error_is_the_same_in_another_process_of_a_trainer(cls: type[Exception]) -> None:
    error = node.PromptRefused(3, "It is too long.") if cls is node.PromptRefused else cls("It did not happen.")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (cls, str(error), vars(error))


@pytest.mark.parametrize("name", ["attach", "publish", "resume", "rollouts", "close"])
def test_every_parameter_of_the_main_calls_is_documented(name: str) -> None:
    function = getattr(node.Swarm, name)
    text = inspect.getdoc(function) or ""
    for parameter in inspect.signature(function).parameters:
        assert parameter == "self" or f"`{parameter}`" in text, parameter
    assert "Raises" in text


@pytest.mark.parametrize("package", ["codec", "swarm", "node"])
def test_the_package_says_that_it_is_typed(package: str) -> None:
    assert (PACKAGES / package / "py.typed").exists()


@pytest.mark.parametrize("name", ["swarm.py", "codec.py", "swarm/__init__.py", "swarm/mine.txt"])
def test_a_file_of_the_user_that_hides_a_package_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    (tmp_path / "train.py").write_text("from node import Swarm\nprint(Swarm.__name__)\n")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, tmp_path / "train.py"], env=environment, capture_output=True, text=True, check=False
    )
    if name.endswith(".txt"):  # a folder without code does not come before an installed package
        assert done.stdout.strip() == "Swarm", done.stderr
        return
    assert "is hidden by" in done.stderr
    assert str(tmp_path) in done.stderr
    assert "rename that file or folder" in done.stderr
