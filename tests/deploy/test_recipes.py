"""The recipes in deploy/: their commands exist, their files fit their schemas, and they leave a node time to finish."""

import copy
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from deploy_kit import DEPLOY, HOUSE, SCHEMA, command_lines, compose, faults, flags_of, manifests, stateful_sets

from node.member.join import LEAVES_WITHIN_S
from node.settings.addresses import duration_s
from node.settings.definitions import CONFIGURABLE, keys_of

# ---------------------------------------------------------------- all recipes


@pytest.mark.parametrize(("recipe", "words"), command_lines().items())
def test_each_command_and_its_flags_exist(recipe: str, words: list[str]) -> None:
    known = flags_of(words[0])
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, recipe


def graces() -> dict[str, float]:
    """Seconds from SIGTERM to SIGKILL, by the name of the recipe that runs `join`."""
    found = {
        f"compose {name}": duration_s(compose()["services"][name]["stop_grace_period"]) for name in ("node-1", "node-2")
    }
    for each in stateful_sets():
        found[f"kubernetes {each['metadata']['name']}"] = each["spec"]["template"]["spec"][
            "terminationGracePeriodSeconds"
        ]
    unit = (DEPLOY / "systemd" / "swarm-join.service").read_text()
    found["swarm-join.service"] = float(re.findall(r"TimeoutStopSec=(\d+)", unit)[0])
    found["slurm"] = float(re.findall(r"--signal=TERM@(\d+)", (DEPLOY / "slurm" / "swarm-node.sbatch").read_text())[0])
    return found


def test_each_recipe_leaves_a_node_time_to_finish_and_to_leave() -> None:
    joins = {name: words for name, words in command_lines().items() if words[0] == "join"}
    assert len(joins) == 5
    for name, words in joins.items():
        given = re.search(r"--finish-within[= ](\S+)", " ".join(words))
        assert given is not None, name
        assert duration_s(given[1]) + LEAVES_WITHIN_S <= graces()[name], name


def test_no_recipe_holds_a_ticket_or_runs_as_root() -> None:
    texts = {path: path.read_text() for path in DEPLOY.rglob("*") if path.is_file()}
    assert not [path for path, text in texts.items() if re.search(r"swarm1[a-z2-7]{16}", text)]
    assert not [path for path, text in texts.items() if re.search(r"network_mode: *host|hostNetwork: *true", text)]


# ---------------------------------------------------------------- the image


def dockerfile() -> str:
    return (DEPLOY / "image" / "Dockerfile").read_text().replace("\\\n", " ")


def test_the_images_files_exist_and_its_user_is_not_root() -> None:
    for path in re.findall(r"/opt/swarm-node/(deploy/\S+\.sh)", dockerfile()):
        assert os.access(HOUSE / path, os.X_OK), path
    assert re.findall(r"(?m)^USER (\S+)", dockerfile()) == ["swarm"]
    assert "useradd --uid 1000" in (DEPLOY / "image" / "setup.sh").read_text()


def test_the_images_variables_are_settings() -> None:
    own = {f"SWARM_{command}_{key}".upper() for command in CONFIGURABLE for key in keys_of(command)}
    known = own | {"SWARM_HOME", "SWARM_CACHE"}
    assert set(re.findall(r"SWARM_\w+(?==)", dockerfile())) <= known
    within = re.findall(r"SWARM_JOIN_FINISH_WITHIN=(\S+)", dockerfile())
    assert [duration_s(text) for text in within] == [8.0]  # docker stop waits for 10 s unless told


def test_what_the_image_needs_is_not_ignored() -> None:
    ignored = (HOUSE / ".dockerignore").read_text().split()
    for name in (
        "install.sh",
        "pyproject.toml",
        "requirements.lock",
        "README.md",
        "LICENSE",
        "tools",
        "node",
        "deploy",
    ):
        assert (HOUSE / name).exists()
        assert name not in ignored


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A folder with stand-ins for what the entry point calls: they print what they got."""
    for name, script in {
        "swarm-node": 'echo "swarm-node $*"; echo "ticket=${SWARM_TICKET:-} TICKET=${TICKET-unset} home=$SWARM_HOME"',
        "setpriv": 'echo "setpriv $1 $2 $3 $4"; shift 4; exec "$@"',
        "chown": 'echo "chown $*"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def enter(image: Path, *words: str, **environment: str) -> list[str]:
    """The lines of the stand-ins when the entry point is called with these words."""
    variables = {"PATH": f"{image}:/usr/bin:/bin", "SWARM_NODE": str(image / "swarm-node")} | environment
    ran = subprocess.run(
        [DEPLOY / "image" / "entrypoint.sh", *words],
        env=variables | {"SWARM_HOME": str(image / "home")}, capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "called"),
    [
        ((), "join"),
        (("--engine", "none"), "join --engine none"),
        (("--vllm-arg=--max-model-len=4096",), "join --vllm-arg=--max-model-len=4096"),
        (("relay",), "relay"),
        (("swarm-node", "status", "--json"), "status --json"),
        (("swarm-node",), "--help"),
        (("--help",), "--help"),
        (("--version",), "--version"),
        (("doctor",), "doctor"),
    ],
)
def test_the_entry_point_runs_what_was_asked_for(image: Path, words: tuple[str, ...], called: str) -> None:
    assert f"swarm-node {called}" in enter(image, *words)


def test_the_ticket_comes_from_the_environment_and_not_in_the_arguments(image: Path) -> None:
    lines = enter(image, TICKET="swarm1abc")
    assert f"ticket=swarm1abc TICKET=unset home={image / 'home'}" in lines
    assert not any("swarm1abc" in line for line in lines if line.startswith("swarm-node"))


@pytest.mark.skipif(os.getuid() != 0, reason="root becomes another user")
def test_root_becomes_the_images_user(image: Path) -> None:
    lines = enter(image, "relay")
    assert lines[:2] == [
        f"chown swarm:swarm {image / 'home'}",
        "setpriv --reuid=swarm --regid=swarm --init-groups --no-new-privs",
    ]


# ---------------------------------------------------------------- systemd


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_accepts_the_units_and_finds_them_hardened(tmp_path: Path) -> None:
    units = []
    for file in (DEPLOY / "systemd").glob("*.service"):
        unit = tmp_path / file.name.replace("@.", "@trainer.")
        unit.write_text(file.read_text().replace("/opt/swarm-node/.venv/bin/swarm-node", "/bin/true"))
        units.append(unit)
    assert len(units) == 3
    checked = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, timeout=60)
    assert (checked.returncode, checked.stderr) == (0, "")
    for unit in units:
        hardened = ["systemd-analyze", "security", "--offline=true", "--threshold=25", unit]
        judged = subprocess.run(hardened, capture_output=True, text=True, timeout=60)
        assert judged.returncode == 0, judged.stdout


def test_each_instance_of_a_systemd_unit_has_a_home_of_its_own() -> None:
    """systemd gives a `StateDirectory` with all that is in it to the user who starts last."""
    for file in (DEPLOY / "systemd").glob("*.service"):
        unit = file.read_text()
        (state,), (cache,) = (re.findall(rf"(?m)^{kind}Directory=(\S+)$", unit) for kind in ("State", "Cache"))
        assert f"SWARM_HOME=/var/lib/{state} SWARM_CACHE=/var/cache/{cache}\n" in unit
        assert ("%i" in state) == ("%i" in cache) == ("@." in file.name), file.name


# ---------------------------------------------------------------- compose


def composer() -> list[str] | None:
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    if shutil.which("docker") and subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        return ["docker", "compose"]
    return None


@pytest.mark.slow
def test_compose_accepts_its_file(tmp_path: Path) -> None:
    command = composer()
    if command is None:
        pytest.skip("needs docker-compose")
    file = ["-f", str(DEPLOY / "compose" / "compose.yml"), "config", "--quiet"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    given = subprocess.run([*command, *file], env=environment | {"MODEL": "/models/x"}, capture_output=True, text=True)
    assert given.returncode == 0, given.stderr
    lacking = subprocess.run([*command, *file], env=environment, capture_output=True, text=True)
    assert lacking.returncode != 0
    assert "base checkpoint" in lacking.stderr


def test_the_files_that_compose_mounts_exist_and_each_token_is_mounted() -> None:
    services = compose()["services"]
    for service in services.values():
        for source in (volume.partition(":")[0] for volume in service.get("volumes", ())):
            if source.startswith("."):
                assert (DEPLOY / "compose" / source).exists(), source
    copied = re.findall(r"(?m)^for each in (.*); do$", services["tokens"]["entrypoint"][2])[0].split()
    scraped = (DEPLOY / "compose" / "prometheus.yml").read_text()
    for token, target in re.findall(r"credentials_file: (\S+)/monitor\.token\n.*\n.*\"(\S+):9464\"", scraped):
        assert target in copied
        assert token == f"/tokens/{target}"
        assert f"{target}:/homes/{target}:ro" in services["tokens"]["volumes"]
        assert "--metrics=0.0.0.0:9464" in services[target]["command"]
    assert len(re.findall("job_name", scraped)) == 3


def test_compose_gives_no_home_to_a_service_that_a_network_reaches() -> None:
    """The homes hold the keys, `authority.key` and `node.key`, which the user 1000 may read."""
    services = compose()["services"]
    homes = {"seed", "node-1", "node-2"}
    for name, service in services.items():
        held = {volume.partition(":")[0] for volume in service.get("volumes", ())} & homes
        own = {name} if name in homes else {"seed"} if name == "ticket" else set()
        assert held == own or service.get("network_mode") == "none", name


def test_compose_copies_only_the_tokens(tmp_path: Path) -> None:
    for name in ("seed", "node-1", "node-2"):
        (tmp_path / "homes" / name).mkdir(parents=True)
        (tmp_path / "homes" / name / "monitor.token").write_text(name)
        (tmp_path / "homes" / name / "node.key").write_text("secret")
    shell, flags, script = compose()["services"]["tokens"]["entrypoint"]
    script = re.sub(r"/(homes|tokens)/", rf"{tmp_path}/\1/", script.replace("$$", "$"))
    subprocess.run([shell, flags, script], check=True, timeout=20)
    tokens = [path for path in (tmp_path / "tokens").rglob("*") if path.is_file()]
    assert {(path.parent.name, path.name) for path in tokens} == {
        (name, "monitor.token") for name in ("seed", "node-1", "node-2")
    }
    assert {path.stat().st_mode & 0o777 for path in tokens} == {0o600}


@pytest.mark.slow
def test_prometheus_accepts_composes_configuration(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool")
    shutil.copy(DEPLOY / "compose" / "prometheus.yml", tmp_path)
    shutil.copy(DEPLOY / "prometheus" / "alerts.yml", tmp_path)
    command = ["promtool", "check", "config", "--syntax-only", tmp_path / "prometheus.yml"]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr


# ---------------------------------------------------------------- Kubernetes


def test_the_manifests_fit_the_schema() -> None:
    assert sorted(doc["kind"] for doc in manifests()) == ["Service", "Service", "StatefulSet", "StatefulSet"]
    for doc in manifests():
        assert faults(SCHEMA[doc["kind"]], doc, doc["metadata"]["name"]) == []


def test_the_schema_finds_mistakes() -> None:
    doc = copy.deepcopy(stateful_sets()[0])
    container = doc["spec"]["template"]["spec"]["containers"][0]
    container["livenesProbe"] = container.pop("livenessProbe")
    container["ports"][0]["containerPort"] = "4001"
    del doc["spec"]["selector"]
    found = faults(SCHEMA["StatefulSet"], doc, "set")
    assert len(found) == 3, found


def test_probes_ports_volumes_and_selectors_agree() -> None:
    services = {doc["metadata"]["name"]: doc for doc in manifests() if doc["kind"] == "Service"}
    for each in stateful_sets():
        spec, pod = each["spec"], each["spec"]["template"]
        (container,) = pod["spec"]["containers"]
        assert spec["selector"]["matchLabels"] == pod["metadata"]["labels"]
        assert services[spec["serviceName"]]["spec"]["selector"] == pod["metadata"]["labels"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe, path in (("startup", "/healthz"), ("liveness", "/healthz"), ("readiness", "/readyz")):
            assert container[f"{probe}Probe"]["httpGet"] == {"path": path, "port": "monitor"}
        assert f"--metrics=0.0.0.0:{ports['monitor']}" in container["args"]
        assert f"--listen={ports['swarm']}" in container["args"]
        claims = {claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]}
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", ())}
        assert {mount["name"] for mount in container["volumeMounts"]} == claims | volumes
        assert pod["spec"]["securityContext"]["runAsNonRoot"]


# ---------------------------------------------------------------- SLURM


def batch(
    tmp_path: Path, node: str, *, state: str = "RUNNING", left_s: int = 100, **variables: str
) -> tuple[subprocess.Popen[str], Path]:
    """The batch script with stand-ins: srun runs its command as a step, scontrol notes what it is asked, squeue says
    that the job is in `state` and has `left_s` left."""
    for name, script in {
        "srun": 'shift; "$@" & echo $! > "$FOLDER/step"; wait $!; exit $?',
        "scontrol": 'echo "$*" >> "$FOLDER/asked"',
        "squeue": f'echo "{state} $(date -d "+{left_s} seconds" +%Y-%m-%dT%H:%M:%S)"',
        "swarm-node": node,
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin", "FOLDER": str(tmp_path), "SLURM_JOB_ID": "7", "USER": "u",
        "TICKET_FILE": "/t", "HOMES": str(tmp_path / "homes"),
    } | variables  # fmt: skip
    job = subprocess.Popen(["bash", DEPLOY / "slurm" / "swarm-node.sbatch"], env=environment, text=True)
    return job, tmp_path / "asked"


SERVING = 'trap "exit 0" TERM; mkdir -p "$5"; echo "$*" > "$FOLDER/node"; while :; do sleep 0.05; done'
"""A node that runs until SIGTERM; its home is the fifth word."""


def finished(job: subprocess.Popen[str], tmp_path: Path, *, signal_shell: bool = False) -> list[str]:
    """The node's words, after it got SIGTERM and the job has ended with code 0."""
    deadline = time.monotonic() + 20
    while not (tmp_path / "node").exists() or not (tmp_path / "step").read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if signal_shell:
        job.send_signal(signal.SIGTERM)
    os.kill(int((tmp_path / "step").read_text()), signal.SIGTERM)
    assert job.wait(20) == 0
    return (tmp_path / "node").read_text().split()


def test_a_job_whose_time_is_up_finishes_and_is_queued_again(tmp_path: Path) -> None:
    job, asked = batch(tmp_path, SERVING)
    words = finished(job, tmp_path, signal_shell=True)  # some sites signal the shell too
    assert words[:4] == ["join", "--ticket-file", "/t", "--home"]
    assert words[-2:] == ["--finish-within", "100s"]
    assert asked.read_text() == "requeue 7\n"
    assert Path(words[4]).is_dir()  # it is used again


@pytest.mark.parametrize(
    ("state", "left_s"), [("COMPLETING", 0), ("CANCELLED", 0), ("RUNNING", 9999), ("", 0)],
    ids=["cancelled", "cancelled and over", "told to finish by hand", "unknown"],
)  # fmt: skip
def test_a_job_that_was_ended_by_its_user_is_not_queued_again(tmp_path: Path, state: str, left_s: int) -> None:
    job, asked = batch(tmp_path, SERVING, state=state, left_s=left_s)
    words = finished(job, tmp_path)
    assert not asked.exists()
    assert not Path(words[4]).exists()  # nobody would use it again


def test_jobs_and_elements_of_an_array_on_one_machine_have_homes_of_their_own(tmp_path: Path) -> None:
    element = {"SLURM_ARRAY_JOB_ID": "9", "SLURM_PROCID": "0"}
    jobs = {
        "a": {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"},
        "b": {"SLURM_JOB_ID": "8", "SLURM_PROCID": "0"},
        "c": element | {"SLURM_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "1"},
        "d": element | {"SLURM_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "2"},
    }
    homes, requeued = set[str](), list[str]()
    for name, variables in jobs.items():
        (tmp_path / name).mkdir()
        job, asked = batch(tmp_path / name, 'echo "$5" > "$FOLDER/home"', HOMES=str(tmp_path / "homes"), **variables)
        assert job.wait(20) == 0
        homes.add((tmp_path / name / "home").read_text())
        requeued.append(asked.read_text())
    assert len(homes) == 4
    assert requeued == ["requeue 7\n", "requeue 8\n", "requeue 9_1\n", "requeue 9_2\n"]
    assert (tmp_path / "homes").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("case", ["others can write", "a link", "another user's"])
def test_a_folder_for_homes_that_is_not_the_users_alone_is_refused(tmp_path: Path, case: str) -> None:
    folder = tmp_path / "homes"
    if case == "a link":
        (tmp_path / "mine").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "mine")
    else:
        folder.mkdir()
        folder.chmod(0o777 if case == "others can write" else 0o700)
    if case == "another user's":
        if os.getuid() != 0:
            pytest.skip("only root can make another user's folder")
        os.chown(folder, 1, 1)
    job, asked = batch(tmp_path, 'touch "$FOLDER/node"')
    assert job.wait(20) == 2
    assert not asked.exists()
    assert not (tmp_path / "node").exists()


def test_a_job_whose_node_fails_is_not_queued_again(tmp_path: Path) -> None:
    job, asked = batch(tmp_path, "exit 2")
    assert job.wait(20) == 2
    assert not asked.exists()


def test_slurm_is_told_to_requeue_and_to_signal_the_steps() -> None:
    options = re.findall(r"(?m)^#SBATCH (\S+)", (DEPLOY / "slurm" / "swarm-node.sbatch").read_text())
    assert {"--requeue", "--signal=TERM@120", "--open-mode=append"} <= set(options)
    known = {
        *("--job-name", "--nodes", "--ntasks-per-node", "--gpus-per-task", "--cpus-per-task", "--mem", "--time"),
        *("--requeue", "--signal", "--open-mode", "--output"),
    }
    assert {option.partition("=")[0] for option in options} <= known
