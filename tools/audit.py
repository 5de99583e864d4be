"""`make audit`: checks every version that requirements.lock pins against a database of advisories (OSV).

It runs pip-audit in a separate environment inside the project's, installed by hash from the lock file.
PIP_AUDIT_OSV_URL names another OSV database, for example a mirror.
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Final

from tools.pins import LOCK, Pin, canonical, parse, requirements, select

__all__ = ["Unreachable", "allowed", "client", "main", "query", "verdict"]

ALLOWED: Final = Path(__file__).with_name("allowed_advisories.toml")

AUDIT_WITHIN_S: Final = 600.0
"""Timeout of the whole audit: one query each for about 150 packages in turn, each of which may take 15 s."""

_NO_ANSWER: Final = re.compile(
    r"^requests\.exceptions\.\w+: (?:.*\(Caused by (?P<cause>.*)\)|(?P<plain>.*))$|(?P<said>Could not connect to .*)$",
    re.MULTILINE,
)
"""The errors with which pip-audit ends when its database cannot be reached or another server answers."""


class Unreachable(Exception):
    """The database of advisories did not answer; the text says why."""


def client(folder: Path, pins: Iterable[Pin]) -> list[str]:
    """Return the command of a pip-audit with exactly the locked versions. It is installed into `folder` when missing.

    Raises `CalledProcessError` when pip cannot install it or refuses a file.
    """
    wanted = requirements(select(pins, ["audit"]))
    python, marker = folder / "bin" / "python", folder / ".installed"
    digest = hashlib.sha256(wanted.encode()).hexdigest()
    if not marker.exists() or marker.read_text() != digest:
        venv.create(folder, clear=True, with_pip=True)
        (folder / "requirements.txt").write_text(wanted)
        command = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps", "--require-hashes"]
        subprocess.run([*command, "-r", folder / "requirements.txt"], check=True)
        marker.write_text(digest)
    return [str(python), "-m", "pip_audit"]


def query(command: Sequence[str], pins: Iterable[Pin]) -> list[dict[str, Any]]:
    """Run pip-audit as `command` and return its report of each pin: `name`, `version` and `vulns`, or a `skip_reason`.

    Raises `Unreachable`, and `RuntimeError` when pip-audit fails for another reason.
    """
    with tempfile.TemporaryDirectory() as folder:
        wanted, report = Path(folder, "requirements.txt"), Path(folder, "report.json")
        wanted.write_text("".join(f"{pin.name}=={pin.version}\n" for pin in pins))
        options = ["-s", "osv", "-r", str(wanted), "--no-deps", "--disable-pip", "--progress-spinner", "off"]
        try:
            done = subprocess.run(
                [*command, *options, "-f", "json", "-o", str(report)],
                capture_output=True,
                text=True,
                timeout=AUDIT_WITHIN_S,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            raise Unreachable(f"the answers took longer than {AUDIT_WITHIN_S:.0f} s") from late
        if report.exists():
            return json.loads(report.read_text())["dependencies"]
    if ends := list(_NO_ANSWER.finditer(done.stderr)):
        raise Unreachable(ends[-1][ends[-1].lastgroup or 0])
    raise RuntimeError(f"pip-audit failed (exit status {done.returncode}):\n{done.stderr}")


def allowed(text: str) -> dict[str, str]:
    """Return the advisories that do not fail the audit, with the reason of each.

    Raises `ValueError` for an entry without id, reason or date, and `tomllib.TOMLDecodeError` for invalid TOML.
    """
    found = {}
    for entry in tomllib.loads(text).get("allowed", []):
        name, reason, since = entry.get("id"), entry.get("reason"), entry.get("date")
        if not (name and reason and isinstance(since, date)):
            raise ValueError(
                f"{ALLOWED.name}: every entry needs an id, a reason and a date (YYYY-MM-DD); this has {entry}"
            )
        found[name] = f"{reason} ({since})"
    return found


def verdict(
    pins: Iterable[Pin], report: Iterable[Mapping[str, Any]], reasons: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return the failures and the notes of an audit, one line each.

    A pin that the report does not mention is a failure, because a missing answer must not pass as safe.
    """
    failures, notes = [], []
    unasked = {pin.name: f"{pin.name} {pin.version}: not audited" for pin in pins}
    used = set()
    for package in report:
        if "skip_reason" in package:
            continue
        unasked = {name: line for name, line in unasked.items() if canonical(name) != canonical(package["name"])}
        for advisory in package["vulns"]:
            names = [advisory["id"], *advisory["aliases"]]
            known = [name for name in names if name in reasons]
            used.update(known)
            summary = f"{package['name']} {package['version']}: {', '.join(names)}"
            if known:
                notes.append(f"{summary}: allowed: {reasons[known[0]]}")
            else:
                fixed = ", ".join(advisory["fix_versions"]) or "no release"
                failures.append(f"{summary}: {advisory['description']} (fixed in {fixed})")
    notes += [f"{name} in {ALLOWED.name} is about nothing that is pinned now" for name in sorted(set(reasons) - used)]
    return [*failures, *unasked.values()], notes


def main() -> int:
    """Return the exit status: 1 when an advisory applies, 0 when none does or the database cannot be reached."""
    pins = parse(LOCK.read_text())
    reasons = allowed(ALLOWED.read_text())
    try:
        report = query(client(Path(sys.prefix) / "audit", pins), pins)
    except Unreachable as why:
        print(f"The audit of the dependencies did not run, because no database of advisories could be reached: {why}.")
        return 0
    failures, notes = verdict(pins, report, reasons)
    for line in (*notes, *failures):
        print(line)
    if failures:
        print(
            f"The audit failed: run `make lock UPGRADE=...` with the packages above, or, where that does not help, add"
            f" the advisory to tools/{ALLOWED.name} with a reason and a date."
        )
        return 1
    print(f"The audit found no advisory that counts against the {len(pins)} pinned packages.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
