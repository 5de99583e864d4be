"""Real SGLangs. Each takes a minute to start, so tests share them."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from api_kit import WITHIN_S, Sglang

from node.engines.sglang.front import speak_for
from node.engines.sglang.http import Api
from node.engines.vllm.links import Listener, PluginLink


@pytest.fixture(scope="session")
def python() -> Path:
    from scenarios.engines.sglang_environment import sglang_python

    return sglang_python()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from scenarios.engines.engine_models import make_qwen3

    return make_qwen3(tmp_path_factory.mktemp("models") / "untied", layers=2)


@pytest.fixture(scope="session")
def one(model: Path, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An untied Qwen3 on one rank. Tests share it, and each leaves it open, at any version."""
    from scenarios.engines.sglang_bench import bench

    with bench(model, tmp_path_factory.mktemp("one"), python, threads=1) as live:
        yield live


@pytest.fixture(scope="module")
def other(one: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The weights that `one` holds at the beginning of a module's tests, in a transformers engine."""
    from options_kit import transformers_engine

    from codec import write_checkpoint

    folder = tmp_path_factory.mktemp("other") / "weights"
    write_checkpoint(folder, one.replica.layout, one.replica.bits, one.checkpoint.files)
    return transformers_engine(folder)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a module of SGLang's plugin, as in an environment that has vLLM's plugin."""
    for name in ("blocks", "guide", "margins", "messages", "noise", "reshape"):
        module = importlib.import_module(f"node.engines.vllm.plugin.swarm_vllm.{name}")
        monkeypatch.setitem(sys.modules, f"swarm_vllm.{name}", module)
    return lambda name: importlib.import_module(f"node.engines.sglang.plugin.swarm_sglang.{name}")


@pytest.fixture
def sglang() -> Iterator[Sglang]:
    server = Sglang()
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.fixture
def front(sglang: Sglang, tmp_path: Path) -> Iterator[PluginLink]:
    listener = Listener(tmp_path / "s", lambda why: None, "SGLang")
    speak_for(Api(sglang.url), listener.path, fill=True)
    yield listener.next(WITHIN_S)
    listener.close()
