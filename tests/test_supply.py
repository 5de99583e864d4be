"""The lock file, the hashes that pip checks, install.sh, and the audit of dependencies."""

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools import audit, lock
from tools.pins import CORE, LOCK, UNHASHED, Pin, canonical, parse, render, requirements, select

HOUSE = Path(__file__).parents[1]
PROJECT = tomllib.loads((HOUSE / "pyproject.toml").read_text())
PINS = parse(LOCK.read_text())
BY_NAME = {canonical(pin.name): pin for pin in PINS}


# The lock file


def test_every_pin_but_torch_has_hashes() -> None:
    assert [pin.name for pin in PINS if not pin.hashes] == [UNHASHED]
    assert len(BY_NAME) == len(PINS) > 100


def test_what_the_lock_file_says_is_read_back() -> None:
    assert render(parse(LOCK.read_text()), lock.HEADER) == LOCK.read_text()
    with pytest.raises(ValueError, match="line 1 of the lock file is not understood: numpy>=2"):
        parse("numpy>=2")


@pytest.mark.parametrize("group", lock.roots(PROJECT))
def test_the_lock_file_holds_what_pyproject_asks_for(group: str) -> None:
    chosen = {canonical(pin.name): pin for pin in select(PINS, {CORE, group})}
    for text in lock.roots(PROJECT)[group]:
        asked = Requirement(text)
        assert chosen[canonical(asked.name)].version in asked.specifier


def test_the_lock_file_holds_what_each_package_asks_for() -> None:
    """Only for packages installed here: without an entry in the lock file, an installation elsewhere would fail."""
    known = {
        canonical(found.metadata["Name"]): list(found.requires or []) for found in importlib.metadata.distributions()
    }
    for group in (CORE, "torch", "test"):
        held = {canonical(pin.name) for pin in select(PINS, {CORE, group})}
        for environment in lock.environments():
            assert lock.needed(lock.roots(PROJECT)[group], known, environment) <= held
    assert {canonical(pin.name) for pin in select(PINS, {"audit"})} >= {"pip-audit", "packaging", "requests", "rich"}


def test_only_groups_that_exist_are_selected() -> None:
    assert {"torch", "accelerate"}.isdisjoint(pin.name for pin in select(PINS, [CORE]))
    with pytest.raises(ValueError, match="EXTRAS cannot be gatway: choose from audit, build, fuzz, gateway"):
        select(PINS, [CORE, "gatway"])


@pytest.mark.parametrize(
    ("filename", "expected"),
    [
        ("h11-0.16.0.tar.gz", True),
        ("h11-0.16.0-py3-none-any.whl", True),
        ("numpy-2.4.6-cp312-cp312-manylinux_2_27_aarch64.manylinux_2_28_aarch64.whl", True),
        ("blake3-1.0.11-cp38-abi3-manylinux_2_17_x86_64.whl", True),
        ("numpy-2.4.6-cp314-cp314-macosx_14_0_arm64.whl", True),
        ("numpy-2.4.6-cp310-cp310-manylinux_2_28_x86_64.whl", False),
        ("numpy-2.4.6-cp313-cp313t-manylinux_2_28_x86_64.whl", False),
        ("numpy-2.4.6-cp312-cp312-win_amd64.whl", False),
        ("numpy-2.4.6-pp311-pypy311_pp73-manylinux_2_28_x86_64.whl", False),
        ("six-1.9.0.win32.exe", False),
    ],
)
def test_only_files_for_supported_machines_are_locked(filename: str, expected: bool) -> None:
    assert lock.installable(filename) is expected


def test_a_dependency_of_one_platform_is_limited_to_it() -> None:
    everywhere = list(lock.environments())
    known = {
        "a": ["b ; sys_platform == 'linux'", "c[x]"],
        "b": [],
        "c": ["d ; extra == 'x'", "e ; extra == 'y'"],
        "d": [],
    }
    where = {index for index, values in enumerate(everywhere) if "b" in lock.needed(["a"], known, values)}
    assert lock.marker(where, everywhere) == "sys_platform == 'linux'"
    assert lock.needed(["a"], known, everywhere[0]) == {"a", "b", "c", "d"}


class Loopback(BaseHTTPRequestHandler):
    """Answers each request with the status and JSON of the server's `answer(path, body)`."""

    def respond(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        status, answer = self.server.answer(self.path, json.loads(body) if body else None)  # type: ignore[attr-defined]
        payload = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    do_GET = do_POST = respond

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def loopback(answer) -> Iterator[str]:
    """The address of an HTTP server that answers with what `answer(path, body)` gives."""
    server = HTTPServer(("127.0.0.1", 0), Loopback)
    server.answer = answer  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_hashes_come_from_the_index_that_pip_is_told_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"h11-0.16.0.tar.gz": "aa", "h11-0.16.0-py3-none-any.whl": "bb", "h11-0.15.0.tar.gz": "cc"}
    listed = [{"filename": name, "hashes": {"sha256": digest * 32}} for name, digest in files.items()]
    asked = []

    def answer(path: str, body: object) -> tuple[int, object]:
        asked.append(path)
        return 200, {"name": "h11", "files": listed}

    with loopback(answer) as address:
        monkeypatch.setenv("PIP_INDEX_URL", f"{address}/simple")
        index, context = lock.configured()
        page = lock.page(index, context, "H11")
    assert asked == ["/simple/h11/"]
    assert lock.hashes(page, "0.16.0") == ("aa" * 32, "bb" * 32)
    with pytest.raises(ValueError, match=r"the index has no file of h11 0\.17\.0"):
        lock.hashes(page, "0.17.0")


# pip and the lock file


def pip_install(folder: Path, pin: Pin) -> subprocess.CompletedProcess[str]:
    (folder / "requirements.txt").write_text(requirements([pin]))
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps", "--no-index"]
    command += ["--require-hashes", "--find-links", str(folder), "--target", str(folder / "into"), "-r"]
    return subprocess.run(
        [*command, str(folder / "requirements.txt")], capture_output=True, text=True, timeout=60, check=False
    )


def test_pip_refuses_a_file_whose_hash_is_not_in_the_lock_file(tmp_path: Path) -> None:
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", "")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    corrupted = digest[:-1] + ("0" if digest[-1] != "0" else "1")

    refused = pip_install(tmp_path, Pin("tiny", "1.0", (CORE,), hashes=(corrupted, "0" * 64)))
    assert refused.returncode != 0
    assert "DO NOT MATCH THE HASHES" in refused.stderr
    assert not (tmp_path / "into" / "tiny.py").exists()
    taken = pip_install(tmp_path, Pin("tiny", "1.0", (CORE,), hashes=(corrupted, digest)))
    assert taken.returncode == 0, taken.stderr
    assert (tmp_path / "into" / "tiny.py").exists()


# install.sh

STUB = """#!/bin/sh
case "$*" in
    "-m pip"*) echo "$*" >> "{log}"; case "$*" in *"{folder}/fails"*) exit 1 ;; esac; test ! -e "{folder}/fail" ;;
    *) exec "{python}" "$@" ;;
esac
"""


class Installer:
    """A copy of install.sh and its inputs, in an environment whose pip only logs its arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "pip.log"
        (folder / "tools").mkdir()
        for name in ("install.sh", "tools/pins.py", "requirements.lock", "pyproject.toml"):
            shutil.copy(HOUSE / name, folder / name)
        python = folder / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(STUB.format(log=self.log, folder=folder, python=sys.executable))
        python.chmod(0o755)

    def attempt(self, **asked: str) -> subprocess.CompletedProcess[str]:
        self.log.write_text("")
        ours = {name: value for name, value in os.environ.items() if name not in ("EXTRAS", "TORCH", "PYTHON", "VENV")}
        return subprocess.run(
            [self.folder / "install.sh"], env=ours | asked, capture_output=True, text=True, timeout=60, check=False
        )

    def run(self, **asked: str) -> list[str]:
        """The requirements that pip was asked to install, in order; the last has the groups."""
        done = self.attempt(**asked)
        assert done.returncode == 0, done.stderr
        return [line.rpartition(" ")[2] for line in self.log.read_text().splitlines()]


LOCKED = [".venv/requirements.txt"] * 2
"""pip's arguments: first the build requirements, then the groups."""


@pytest.fixture
def installer(tmp_path: Path) -> Installer:
    return Installer(tmp_path)


def test_a_second_install_adds_what_is_asked_for(installer: Installer) -> None:
    default = next(pin.requirement for pin in PINS if pin.name == UNHASHED)
    assert installer.run(EXTRAS="none") == [*LOCKED, "."]
    assert installer.run(EXTRAS="none") == []
    assert installer.run(EXTRAS="gateway") == [*LOCKED, ".[gateway]"]
    assert installer.run(EXTRAS="torch,test") == [*LOCKED, default, ".[gateway,test,torch]"]
    assert installer.run() == []
    assert installer.run(TORCH="torch==2.12.0") == [*LOCKED, "torch==2.12.0", ".[gateway,test,torch]"]
    assert installer.run(EXTRAS="gateway") == []  # already installed, and so is the user's own torch


def test_the_first_install_is_for_torch_and_tests(installer: Installer) -> None:
    assert installer.run()[-1] == ".[test,torch]"
    hashed = (installer.folder / ".venv" / "requirements.txt").read_text()
    assert hashed == requirements(pin for pin in select(PINS, {CORE, "test", "torch"}) if pin.name != UNHASHED)
    assert "torch==" not in (installer.folder / ".venv" / "constraints.txt").read_text()


def test_every_locked_install_asks_pip_for_hashes(installer: Installer) -> None:
    installer.run()
    asked = installer.log.read_text().splitlines()
    for line in asked[:2]:
        assert {"--require-hashes", "--no-deps", "--no-build-isolation"} <= set(line.split())
    assert {"--no-index", "--no-build-isolation"} <= set(asked[-1].split())


def test_a_new_lock_file_installs_again_what_was_chosen(installer: Installer) -> None:
    installer.run(EXTRAS="torch,gateway", TORCH="torch==2.12.0")
    with (installer.folder / "requirements.lock").open("a") as file:
        file.write("# changed\n")
    assert installer.run() == [*LOCKED, "torch==2.12.0", ".[gateway,torch]"]


def test_an_install_that_failed_is_tried_again(installer: Installer) -> None:
    (installer.folder / "fail").touch()
    assert installer.attempt(EXTRAS="gateway").returncode != 0
    (installer.folder / "fail").unlink()
    assert installer.run(EXTRAS="gateway") == [*LOCKED, ".[gateway]"]


def test_an_unknown_extra_is_named(installer: Installer) -> None:
    done = installer.attempt(EXTRAS="gatway")
    assert done.returncode != 0
    assert "EXTRAS cannot be gatway" in done.stderr
    assert installer.run(EXTRAS="none")[-1] == "."  # the mistake was not remembered


# The audit

CLIENT = """
import json, sys
outcome, arguments = json.loads(sys.argv[1]), sys.argv[2:]
asked = [line.strip().split("==") for line in open(arguments[arguments.index("-r") + 1])]
if isinstance(outcome, str):
    sys.exit(outcome)
found = [{"name": name, "version": version, "vulns": outcome.get(name, [])} for name, version in asked]
json.dump({"dependencies": found, "fixes": []}, open(arguments[arguments.index("-o") + 1], "w"))
sys.exit(any(outcome.values()))
"""

ADVISORY = {"id": "PYSEC-2026-1", "aliases": ["CVE-2026-1"], "fix_versions": ["9.9"], "description": "It leaks."}


@pytest.fixture
def audited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Runs `make audit`'s command with a pip-audit that ends so, and this allow-file: the status and what it prints."""

    def run(outcome: object, allow: str = "") -> tuple[int, str]:
        (tmp_path / "allowed.toml").write_text(allow)
        monkeypatch.setattr(audit, "ALLOWED", tmp_path / "allowed.toml")
        monkeypatch.setattr(audit, "client", lambda folder, pins: [sys.executable, "-c", CLIENT, json.dumps(outcome)])
        return audit.main(), capsys.readouterr().out

    return run


def test_the_audit_passes_when_nothing_is_known(audited) -> None:
    assert audited({}) == (0, f"The audit found no advisory that counts against the {len(PINS)} pinned packages.\n")


def test_a_known_advisory_fails_the_audit(audited) -> None:
    status, output = audited({"numpy": [ADVISORY]})
    assert status == 1
    version = BY_NAME["numpy"].version
    assert output.startswith(f"numpy {version}: PYSEC-2026-1, CVE-2026-1: It leaks. (fixed in 9.9)\nThe audit failed: ")


def test_an_allowed_advisory_is_told_with_its_reason(audited) -> None:
    allow = '[[allowed]]\nid = "CVE-2026-1"\nreason = "not called"\ndate = 2026-11-23\n'
    status, output = audited({"numpy": [ADVISORY]}, allow)
    assert status == 0
    assert "CVE-2026-1: allowed: not called (2026-11-23)" in output
    assert audited({"numpy": [ADVISORY | {"aliases": []}]}, allow)[0] == 1
    assert "CVE-2026-1 in allowed.toml is about nothing that is pinned now" in audited({}, allow)[1]


@pytest.mark.parametrize("missing", ["id", "reason", "date"])
def test_an_allowed_advisory_needs_a_reason_and_a_date(audited, missing: str) -> None:
    lines = {"id": 'id = "CVE-2026-1"', "reason": 'reason = "not called"', "date": "date = 2026-11-23"}
    del lines[missing]
    with pytest.raises(ValueError, match="every entry needs an id, a reason and a date"):
        audited({}, "\n".join(["[[allowed]]", *lines.values()]))


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("requests.exceptions.ConnectionError: Max retries (Caused by NoRoute('none'))", "reached: NoRoute('none').\n"),
        (
            "ERROR:pip_audit._cli:Could not connect to OSV's vulnerability feed\nTip: ...",
            "reached: Could not connect to OSV",
        ),
        ("requests.exceptions.HTTPError: 403 Client Error\nServiceError", "reached: 403 Client Error.\n"),
    ],
)
def test_an_audit_that_reaches_no_database_says_that_it_did_not_run(audited, end: str, why: str) -> None:
    status, output = audited(end)
    assert status == 0
    assert output.startswith("The audit of the dependencies did not run, because no database of advisories could be")
    assert why in output


def test_an_audit_that_fails_otherwise_does_not_pass(audited) -> None:
    with pytest.raises(RuntimeError, match="pip-audit failed"):
        audited("Traceback: something else")


def test_a_package_about_which_nobody_was_asked_fails_the_audit() -> None:
    pins = [Pin("typing_extensions", "4.0", (CORE,)), Pin("six", "1.0", (CORE,))]
    report = [{"name": "typing-extensions", "version": "4.0", "vulns": []}, {"name": "six", "skip_reason": "unknown"}]
    assert audit.verdict(pins, report, {}) == (["six 1.0: not audited"], [])


@pytest.mark.slow
@pytest.mark.long
def test_pip_audit_itself_asks_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pinned pip-audit, installed by hash, against a database on loopback: nothing known, an advisory, a refusal,
    and nothing there."""
    command = audit.client(tmp_path / "audit", PINS)
    pins = [BY_NAME["numpy"], BY_NAME["torch"]]
    record = {
        "id": "PYSEC-2026-1",
        "summary": "It leaks.",
        "affected": [{"package": {"name": "numpy", "ecosystem": "PyPI"}, "versions": [pins[0].version]}],
    }
    vulnerable: set[str] = set()
    status = 200

    def answer(path: str, body) -> tuple[int, object]:
        known = body["package"]["name"] in vulnerable and body["version"] == pins[0].version
        return status, {"vulns": [record]} if known else {}

    with loopback(answer) as address:
        monkeypatch.setenv("PIP_AUDIT_OSV_URL", address)
        assert audit.verdict(pins, audit.query(command, pins), {}) == ([], [])
        vulnerable.add("numpy")
        failures, _ = audit.verdict(pins, audit.query(command, pins), {})
        assert failures == [f"numpy {pins[0].version}: PYSEC-2026-1: It leaks. (fixed in no release)"]
        status = 403
        with pytest.raises(audit.Unreachable, match="403"):
            audit.query(command, pins)
    with pytest.raises(audit.Unreachable, match="refused"):
        audit.query(command, pins)
