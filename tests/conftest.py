"""What all tests share: thread counts for two busy cores, hypothesis profiles, and `--no-skips`."""

import gc
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any, Final

import pytest
import structlog
from hypothesis import HealthCheck, settings

# Before any test imports a library that reads them. Threads of one process wait for each other by spinning, so beside
# another worker's tests two of them take many times as long as one.
_THREADS = "1" if "PYTEST_XDIST_WORKER" in os.environ else "2"
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(_name, _THREADS)
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Who starts the tests in the background may have them, and every process that they start, ignore what Ctrl-C sends.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Everyday runs repeat exactly; `make fuzz` looks further, with new examples each time.
settings.register_profile(
    "everyday",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("fuzz", deadline=None, max_examples=2000, suppress_health_check=list(HealthCheck))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "everyday"))

gc.disable()  # until all tests are collected: what is imported until then stays

from scenarios.harness import forked  # noqa: E402 - it keeps the environment, which is complete here
from scenarios.harness.processes import Processes  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a test that is skipped has failed, and so has no test")


def pytest_collection_finish() -> None:
    """From here on, no garbage collection looks at the modules and tests that there are, a million objects."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, the tests of these files have one worker, too, because they share an inference server.

    `--dist loadgroup` groups nothing: of xdist 3.8, pytest 9.2 does not take the names of the groups.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByServer(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "sglang" if file in _SHARE_AN_SGLANG else file

    return ByServer(config, log)


_SHARE_AN_SGLANG: Final = {
    f"tests/node/engines/sglang/test_sglang_{name}.py" for name in ("options", "structures", "updates")
}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped.append(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _skipped.append(report.nodeid)


_skipped: list[str] = []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """xdist (`-n`) does not send on the reports of modules that were skipped: each worker sends its whole list."""
    _skipped.extend(name for name in getattr(node, "workeroutput", {}).get("skipped", ()) if name not in _skipped)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["skipped"] = _skipped
    if session.config.getoption("--no-skips") and _skipped and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.config.getoption("--no-skips") and _skipped:
        terminalreporter.section("skipped, which counts as failed here")
        for test in _skipped:
            terminalreporter.line(test)


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the settings and the swarm of the user that runs it."""
    for name in [name for name in os.environ if name.startswith("SWARM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SWARM_STRICT", "1")  # what a guard would survive is a failure here
    monkeypatch.setenv("SWARM_HOME", str(tmp_path_factory.getbasetemp() / "swarm-home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / "config"))


@pytest.fixture(autouse=True)
def _forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of swarm-node begin with their imports done, except where time and memory are judged."""
    if request.node.get_closest_marker("alone") is None:
        monkeypatch.setattr(Processes, "starts", staticmethod(forked.start))


@pytest.fixture
def executed(_forked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of swarm-node are executed: for tests of what a process shows of itself."""
    monkeypatch.setattr(Processes, "starts", subprocess.Popen)


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """No test logs to where another one had the log captured, which is closed by then."""
    yield
    structlog.reset_defaults()
