"""How a node starts vLLM, and its messages when it cannot. Needs no vLLM."""

import contextlib
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from codec import Layout
from codec.errors import UsageError
from codec.layout import FileSpec
from node.engines.base import JUDGES, PORTABLE_DRAWS
from node.engines.device_plan import Gpu, Machine, plan_devices, share_of
from node.engines.server_specs import specs_of
from node.engines.sglang.server import environment as sglang_environment
from node.engines.vllm.causes import cause_of, last_error, quantization_of
from node.engines.vllm.compatibility import check_files
from node.engines.vllm.flights import _completion, _seed, _version
from node.engines.vllm.installed import Installed, installed
from node.engines.vllm.launch import StartedVllm
from node.engines.vllm.plugin.swarm_vllm.messages import Front, Output
from node.engines.vllm.server import Server, ServerOptions, attach_to, environment, flags
from node.host.port import free_port
from node.settings.config import JoinConfig


def test_engines_share_the_gpus_and_have_ports_of_their_own(tmp_path: Path):
    config = JoinConfig(
        home=tmp_path, engine="vllm", engines=3, tp=2, engine_port=9000, vllm_arg=("--max-model-len=64",)
    )
    machine = Machine(tuple(Gpu(name, 1 << 40) for name in ("4", "5", "6", "7", "GPU-0", "GPU-1")), ())
    specs = specs_of(config, plan_devices(machine, None, config.engines, config.tp))
    assert [spec.url for spec in specs] == [f"http://127.0.0.1:{port}" for port in (9000, 9001, 9002)]
    assert len({spec.socket for spec in specs}) == 3
    for i, spec in enumerate(specs):
        assert spec.command[-2:] == ("--", "--max-model-len=64")
        assert spec.command[spec.command.index("--gpus") + 1] == ("4,5", "6,7", "GPU-0,GPU-1")[i]
    env = environment({"CUDA_VISIBLE_DEVICES": "4,5,6,7,GPU-0,GPU-1"}, 2, False, None, share_of("GPU-0,GPU-1", ""))
    assert env["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1"


def test_engines_on_cpus_are_bound_to_cores_of_their_own(tmp_path: Path):
    config = JoinConfig(home=tmp_path, engine="vllm", engines=2, tp=2)
    specs = specs_of(config, plan_devices(Machine((), tuple(range(8))), None, 2, 2))
    assert [spec.command[spec.command.index("--cores") + 1] for spec in specs] == ["0,1,2,3", "4,5,6,7"]
    ours = {"PATH": "/bin"}
    assert environment(ours, 2, True, None, share_of("", "4,5,6,7"))["VLLM_CPU_OMP_THREADS_BIND"] == "4,5|6,7"
    assert environment(ours, 1, True, None, share_of("", "4,5"))["VLLM_CPU_OMP_THREADS_BIND"] == "4,5"
    assert environment(ours, 2, True, None, share_of("", "5"))["VLLM_CPU_OMP_THREADS_BIND"] == "5|5"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment(ours, 1, True)
    assert environment(ours, 1, True, 3, share_of("", "4"))["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    sglang = sglang_environment(ours, 2, True, None, share_of("", "4,5,6,7"))
    assert (sglang["OMP_NUM_THREADS"], sglang["SGLANG_CPU_OMP_THREADS_BIND"]) == ("2", "4,5|6,7")
    shared = sglang_environment(ours, 2, True, 2, share_of("", "5"))
    assert (shared["OMP_NUM_THREADS"], shared["SGLANG_CPU_OMP_THREADS_BIND"]) == ("1", "5|5")
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in sglang_environment(ours, 1, True)
    gpus = share_of("GPU-0,3", "")
    assert sglang_environment(ours, 2, False, None, gpus)["CUDA_VISIBLE_DEVICES"] == "GPU-0,3"


def test_an_url_selects_the_vllm_engine(tmp_path: Path):
    config = JoinConfig(home=tmp_path, engine_url=("http://127.0.0.1:1", "http://127.0.0.1:2"))
    assert config.engine == "vllm"
    assert [spec.url for spec in specs_of(config)] == list(config.engine_url)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"tp": 2}, "only with --engine vllm"),
        ({"engine": "none", "engine_url": ("http://x",)}, "leave out --engine"),
        ({"engine": "vllm", "engines": 65}, "1 to 64"),
        ({"engine": "vllm", "tp": -1}, "1 to 64"),
        ({"engine": "none", "engines": 2}, "there is no engine"),
        ({"engine": "transformers", "engines": 2, "device": "cuda:1"}, "cuda:1 is one GPU"),
        ({"engine_url": ("http://x",), "tp": 2}, "leave out .*--tp"),
        ({"engine": "vllm", "engine_port": 70000}, "--engine-port"),
    ],
)
def test_contradictory_settings_are_refused(wrong, sentence, tmp_path: Path):
    with pytest.raises(UsageError, match=sentence):
        JoinConfig(home=tmp_path, **wrong)


def test_an_environment_without_vllm_is_refused_with_an_error():
    with pytest.raises(UsageError, match="has no vLLM"):
        installed(Path(sys.executable))
    with pytest.raises(UsageError, match="no Python that runs"):
        installed(Path("/no/such/python"))


def test_experts_get_the_kernel_that_leaves_them_in_place(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"num_experts": 8}')
    assert "--moe-backend" in flags(tmp_path, 1, tmp_path / "s", 1, False)
    assert "--moe-backend" not in flags(tmp_path, 1, tmp_path / "s", 1, True)
    (tmp_path / "config.json").write_text("{}")
    assert "--moe-backend" not in flags(tmp_path, 1, tmp_path / "s", 1, False)


FP8 = "RuntimeError: _C::static_scaled_fp8_quant() expected at most 0 argument(s) but received 4 argument(s)."
"""As vllm-cpu 0.32 writes it; the logs below are as other releases write them."""


@pytest.mark.parametrize(
    ("log", "quantization", "sentence"),
    [
        (FP8, "fp8", "no kernel for fp8 weights on this machine. Leave out --quantization"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "", "--gpu-memory-utilization"),
        ("ValueError: Free memory on device (3/80 GiB) on startup is less than desired", "", "Raise --tp"),
        ("ValueError: The model's max seq len (40960) is larger than the maximum number of tokens that can be stored "
         "in KV cache (16384).", "", "--max-model-len"),
        ("OSError: [Errno 98] Address already in use", "", "--engine-port"),
        ("api_server.py: error: unrecognized arguments: --max-modl-len 4", "", "does not know --max-modl-len 4"),
        ("ValueError: Model architectures ['NewForCausalLM'] are not supported for now.", "", "newer vLLM"),
    ],
)  # fmt: skip
def test_a_known_cause_of_a_failed_start_comes_with_its_remedy(log, quantization, sentence):
    noise = "INFO quantization=fp8, kv_cache_dtype=auto\nTraceback"
    found = cause_of(f"{noise}\n{log}\nRuntimeError: Engine core initialization failed.", quantization=quantization)
    assert sentence in found


def test_an_unknown_cause_is_quoted_from_the_log(tmp_path: Path):
    log = "INFO all is well\nKeyError: 'x'\nRuntimeError: Engine core initialization failed. See root cause above"
    assert cause_of(log) is None
    assert last_error(log, tmp_path) == f"KeyError: 'x' (all of it: {tmp_path})"
    assert last_error("\n", tmp_path) == f"it wrote nothing; see {tmp_path}"


def test_quantization_is_by_flag_or_by_config():
    assert quantization_of(("--max-model-len", "5", "--quantization", "fp8"), {}) == "fp8"
    assert quantization_of(("--quantization=fp8",), {"quantization_config": {"quant_method": "awq"}}) == "fp8"
    assert quantization_of((), {"quantization_config": {"quant_method": "awq"}}) == "awq"
    assert quantization_of((), {}) == ""


def test_an_url_without_a_vllm_is_refused_in_a_sentence(tmp_path: Path):
    with pytest.raises(UsageError, match="Nothing answers"):
        attach_to(f"http://127.0.0.1:{free_port()}", tmp_path / "s")
    with pytest.raises(UsageError, match="no URL"):
        attach_to("127.0.0.1:8000", tmp_path / "s")


def test_a_port_in_use_is_reported_before_vllm_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("node.engines.server_process.PORT_FREE_WITHIN_S", 0.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        where = Installed(Path("/no/python"), "0.32", True)
        with pytest.raises(UsageError, match=f"Port {port} is taken.*--engine-port"):
            Server(where, tmp_path, tmp_path / "log", tmp_path, ServerOptions(port))


@pytest.mark.parametrize(("busy", "wrong"), [(2, None), (10**6, "another swarm-node")])
def test_attaching_waits_for_a_driver_that_just_hung_up(busy, wrong, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("node.engines.vllm.server.LOOK_EVERY_S", 0.01)
    monkeypatch.setattr("node.engines.vllm.server.HUNG_UP_WITHIN_S", 600.0 if wrong is None else 0.1)
    requests = 0

    class Front(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal requests
            requests += 1
            self.send_response(409 if requests <= busy else 200)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "another swarm-node is attached to this engine"}}')

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Front) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with contextlib.nullcontext() if wrong is None else pytest.raises(UsageError, match=wrong):
            attach_to(url, tmp_path / "s")
        server.shutdown()
    assert wrong is not None or requests == 3


def test_the_model_folders_files_must_be_the_swarms():
    layout = Layout((), (FileSpec("config.json", 2, b"c" * 32), FileSpec("tokenizer.json", 2, b"t" * 32)))
    right = {"config.json": b"c" * 32, "tokenizer.json": b"t" * 32, "more.txt": b"m" * 32}
    check_files(layout, Front(1, "0.32", 1, right, "", None), "vLLM")
    with pytest.raises(UsageError, match=r"tokenizer\.json is not the swarm's"):
        check_files(layout, Front(1, "0.32", 1, right | {"tokenizer.json": b"x" * 32}, "", None), "vLLM")
    with pytest.raises(UsageError, match=r"lacks the swarm's config\.json"):
        check_files(layout, Front(1, "0.32", 1, {"tokenizer.json": b"t" * 32}, "", None), "vLLM")
    with pytest.raises(UsageError, match=r"has a chat_template\.jinja that the swarm's has not"):
        check_files(layout, Front(1, "0.32", 1, right | {"chat_template.jinja": b"x" * 32}, "", None), "vLLM")


def test_impossible_answers_are_refused():
    completion = _completion(Output((1, 2, 3), (-1.0, -2.0, 0.0), "length", (("0.3", 0, 2), ("1.0", 2, 3))))
    assert [span.version for span in completion.spans] == [(0, 3), (1, 0)]
    for wrong in (
        Output((1,), (-1.0,), "abort", (("0.3", 0, 1),)),
        Output((1, 2), (-1.0,), "stop", (("0.3", 0, 2),)),
        Output((1,), (-1.0,), "stop", (("default", 0, 1),)),
        Output((1, 2), (-1.0, -1.0), "stop", (("0.3", 0, 1),)),
    ):
        with pytest.raises(Exception, match=r"the engine"):
            _completion(wrong)
    assert _version("2.17") == (2, 17)
    seeds = {_seed(seed, stream) for seed in (0, 1, 2**64 - 1) for stream in (0, 1, 2**64 - 1)}
    assert len(seeds) == 9
    assert all(0 <= seed < 1 << 63 for seed in seeds)


@pytest.mark.parametrize(
    ("where", "flags", "able"),
    [
        ({"cpu": True, "judges": True}, (), {JUDGES, PORTABLE_DRAWS}),
        ({"cpu": True, "judges": True}, ("--speculative-config={}",), {JUDGES}),
        ({"cpu": True, "judges": False}, (), set()),
        ({"cpu": False, "judges": True}, (), set()),
    ],
)
def test_abilities_that_were_not_run_are_not_named(where, flags, able, tmp_path: Path):
    """An older plugin, drafts of tokens, and GPUs."""
    found = StartedVllm(Installed(Path("python"), "0.32", **where), tmp_path / "log", ServerOptions(1, flags=flags))
    assert found.abilities & {JUDGES, PORTABLE_DRAWS} == able


@pytest.mark.parametrize(("plugin", "judges"), [("0.1.0", False), ("0.2.0", True), ("1.0", True)])
def test_the_plugins_version_says_whether_it_judges(plugin: str, judges: bool, tmp_path: Path):
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh\necho '[["vllm-cpu", "0.32.0"], ["swarm-vllm", "{plugin}"]]'\n""")
    python.chmod(0o755)
    assert installed(python).judges == judges
