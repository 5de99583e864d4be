"""`make lock`: rewrites requirements.lock from pyproject.toml and the currently pinned versions.

pip resolves all extras and dependency groups together, and keeps the pinned versions except for the packages named in
`--upgrade`. The hashes come from the configured index, for every file of the pinned version that a supported platform
can install; no file is downloaded.
"""

import argparse
import functools
import json
import os
import re
import ssl
import subprocess
import sys
import tempfile
import tomllib
import urllib.parse
import urllib.request
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from packaging.markers import Marker, default_environment
from packaging.requirements import Requirement
from packaging.tags import Tag
from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

from tools.pins import CORE, LOCK, UNHASHED, Pin, canonical, parse, render

__all__ = ["environments", "hashes", "installable", "main", "needed", "roots"]

HEADER: Final = """\
# Every dependency of every extra, of the build and of the audit, at its tested version, with the sha256 of each file
# that pip may install for it (Linux and macOS, x86_64 and arm64). Written by `make lock`; do not edit the hashes.
# torch alone has none: each machine wants its own build of it, and with it come its own CUDA parts, which it pins.
"""

PYTHONS: Final = ("3.11", "3.12", "3.13")
PLATFORMS: Final = (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"), ("darwin", "x86_64"))

MARKERS: Final = (
    "sys_platform == 'linux'",
    "sys_platform == 'darwin'",
    *(f"python_version {sign} '{python}'" for python in PYTHONS[1:] for sign in ("<", ">=")),
)
"""The markers that a pin can have. A dependency with narrower limits is installed everywhere, which is harmless."""

PARTS_OF_TORCH: Final = ("nvidia-", "cuda-", "triton")
"""Packages that only a CUDA build of torch needs, at versions that it pins itself. Like torch they are not locked."""

ASK_WITHIN_S: Final = 60.0
"""Timeout for one page of the index; the largest, that of grpcio, has 2 MB."""

AT_ONCE: Final = 4
"""Pages requested at once: enough to fetch 140 in seconds, few enough for any index."""


_read: Final = functools.cache(Requirement)
"""Cached, because every environment parses the same few hundred texts."""


def roots(project: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the requirements of a parsed pyproject.toml by group: dependencies, extras and dependency groups."""
    asked = {CORE: project["project"]["dependencies"]}
    return asked | project["project"].get("optional-dependencies", {}) | project.get("dependency-groups", {})


def environments() -> Iterator[dict[str, str]]:
    """Yield the marker values of every supported Python and platform."""
    for python in PYTHONS:
        for platform, machine in PLATFORMS:
            yield {name: str(value) for name, value in default_environment().items()} | {
                "python_version": python,
                "python_full_version": f"{python}.0",
                "implementation_name": "cpython",
                "platform_python_implementation": "CPython",
                "os_name": "posix",
                "sys_platform": platform,
                "platform_system": platform.capitalize(),
                "platform_machine": machine,
            }


def needed(asked: Iterable[str], known: Mapping[str, list[str]], environment: dict[str, str]) -> set[str]:
    """Return the canonical names of all packages that these requirements need in one environment.

    `known`: the requirements of each package. Raises `KeyError` for a package that it lacks.
    """
    done: set[tuple[str, str]] = set()
    waiting = [(_read(text), "") for text in asked]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate(environment | {"extra": extra}):
            continue
        name = canonical(requirement.name)
        if name.startswith(PARTS_OF_TORCH):
            continue
        for theirs in ("", *requirement.extras):
            if (name, theirs) not in done:
                done.add((name, theirs))
                waiting += [(_read(text), theirs) for text in known[name]]
    return {name for name, _ in done}


def marker(where: Collection[int], everywhere: list[dict[str, str]]) -> str:
    """Return the marker of `MARKERS` that selects exactly these environments (indices); empty when there is none."""
    for text in MARKERS:
        if set(where) == {index for index, values in enumerate(everywhere) if Marker(text).evaluate(values)}:
            return text
    return ""


def installable(filename: str) -> bool:
    """Whether a supported platform can install this file: any sdist, or a wheel for the platform."""
    if not filename.endswith(".whl"):
        return filename.endswith((".tar.gz", ".zip"))
    try:
        tags = parse_wheel_filename(filename)[3]
    except InvalidWheelFilename:  # a name from before the rules, which pip refuses too
        return False
    return any(_fits(tag) for tag in tags)


def _fits(tag: Tag) -> bool:
    interpreter = re.fullmatch(r"(?:py|cp)3(\d*)", tag.interpreter)
    if interpreter is None or tag.abi.endswith("t"):  # the free-threaded builds of Python
        return False
    if tag.abi not in ("none", "abi3") and int(interpreter[1] or 0) < int(PYTHONS[0].partition(".")[2]):
        return False
    if tag.platform == "any":
        return True
    return tag.platform.startswith(("manylinux", "musllinux", "linux", "macosx")) and tag.platform.endswith(
        ("x86_64", "aarch64", "arm64", "universal2")
    )


def hashes(page: Mapping[str, Any], version: str) -> tuple[str, ...]:
    """Return the sha256 of each installable file of this version on an index's page (PEP 691), sorted.

    Raises `ValueError` when there is none.
    """
    found = set()
    for file in page["files"]:
        if _version(file["filename"]) == Version(version) and installable(file["filename"]):
            found.add(file["hashes"]["sha256"])
    if not found:
        raise ValueError(f"the index has no file of {page['name']} {version}, or gives no sha256 of it")
    return tuple(sorted(found))


def _version(filename: str) -> Version | None:
    try:
        return (parse_wheel_filename if filename.endswith(".whl") else parse_sdist_filename)(filename)[1]
    except (InvalidWheelFilename, InvalidSdistFilename):
        return None


def configured() -> tuple[str, ssl.SSLContext]:
    """Return the index that pip is configured to use, and a TLS context with its additional certificates.

    pip's environment has precedence over its files, and those over its default.
    """
    from pip._internal.models.index import PyPI  # pip's own default: no host is named here

    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = dict(line.split("=", 1) for line in listed.stdout.splitlines() if "=" in line)
    settings = {key: value.strip("'\"") for key, value in settings.items()}

    def setting(name: str) -> str | None:
        return next(
            (settings[key] for key in (f":env:.{name}", f"install.{name}", f"global.{name}") if key in settings), None
        )

    return setting("index-url") or PyPI.simple_url, ssl.create_default_context(cafile=setting("cert"))


def page(index: str, context: ssl.SSLContext, name: str) -> dict[str, Any]:
    """Return the index's page of a package (PEP 691).

    Raises `OSError` when the index cannot be reached, and `ValueError` when the answer is not JSON.
    """
    address = f"{index.rstrip('/')}/{urllib.parse.quote(canonical(name))}/"
    request = urllib.request.Request(address, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request, timeout=ASK_WITHIN_S, context=context) as answer:
        return json.load(answer)


def resolve(asked: Iterable[str], held: Iterable[Pin]) -> dict[str, dict[str, Any]]:
    """Let pip resolve these requirements; return the metadata of each package by its canonical name.

    The pins in `held` keep their versions. Raises `CalledProcessError` when the requirements conflict.
    """
    with tempfile.TemporaryDirectory() as folder:
        constraints, report = Path(folder, "constraints.txt"), Path(folder, "report.json")
        constraints.write_text("".join(f"{pin.requirement}\n" for pin in held))
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--dry-run"]
        command += ["--ignore-installed", "--report", str(report), "-c", str(constraints), *asked]
        subprocess.run(command, check=True)
        installs = json.loads(report.read_text())["install"]
    return {canonical(install["metadata"]["name"]): install["metadata"] for install in installs}


def relock(project: Mapping[str, Any], old: list[Pin], upgrade: Collection[str]) -> list[Pin]:
    """Return new pins for the requirements of a parsed pyproject.toml. `upgrade`: package names, or {"all"}."""
    groups = roots(project)
    held = [pin for pin in old if "all" not in upgrade and canonical(pin.name) not in upgrade]
    resolved = resolve([text for asked in groups.values() for text in asked], held)
    known = {name: metadata.get("requires_dist", []) for name, metadata in resolved.items()}
    everywhere = list(environments())
    used: dict[str, tuple[set[str], set[int]]] = {}
    for index, environment in enumerate(everywhere):
        for group, asked in groups.items():
            for name in needed(asked, known, environment):
                by, where = used.setdefault(name, (set(), set()))
                by.add(group)
                where.add(index)
    index, context = configured()

    def pin(name: str) -> Pin:
        by, where = used[name]
        metadata = resolved[name]
        version = metadata["version"].partition("+")[0] if name == UNHASHED else metadata["version"]
        found = () if name == UNHASHED else hashes(page(index, context, name), version)
        limited = "" if len(where) == len(everywhere) else marker(where, everywhere)
        return Pin(metadata["name"], version, tuple(sorted(by)), limited, found)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(pin, used))


def main() -> None:
    """Rewrites the lock file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--upgrade", nargs="*", default=[], help="packages that may change their version, or: all")
    options = parser.parse_args()
    project = tomllib.loads((LOCK.parent / "pyproject.toml").read_text())
    old = parse(LOCK.read_text())
    new = relock(project, old, {canonical(name) for name in options.upgrade})
    beside = LOCK.with_suffix(".new")
    beside.write_text(render(new, HEADER))
    os.replace(beside, LOCK)
    print(f"{len(new)} packages, {sum(len(pin.hashes) for pin in new)} files: {LOCK.name}")


if __name__ == "__main__":
    main()
