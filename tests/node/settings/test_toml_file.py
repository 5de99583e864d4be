"""swarm.toml: where it is looked for, and that each mistake is named with its line."""

from pathlib import Path

import pytest

from codec.errors import UsageError
from node.cli.app import app, run
from node.settings import toml_file
from node.settings.definitions import CONFIGURABLE, keys_of, means_the_same, settings_of, top_level
from node.settings.sources import explain
from node.settings.toml_file import TomlFile, candidates, toml_path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(toml_file, "SYSTEM_FOLDER", tmp_path / "etc")
    return tmp_path


def write(folder: Path, content: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "swarm.toml"
    file.write_text(content)
    return file


def test_the_first_file_that_is_found_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert toml_path() is None
    for place in ("etc", "config/swarm-node", "."):
        written = write(folder / place, f"region = '{place}'\n")
        found = toml_path()
        assert found is not None
        assert found.absolute() == written.absolute()
    assert explain(app, "join")["region"]["value"] == "."
    other = folder / "other.toml"
    other.write_text("region = 'named'\n")
    monkeypatch.setenv("SWARM_CONFIG", str(other))
    assert explain(app, "join")["region"] == {"value": "named", "source": f"{other}:1"}
    assert [path.name for path in candidates()] == ["swarm.toml"] * 3


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("\nup_mbti = 1\n", r"swarm\.toml, line 2: nothing is called 'up_mbti'\. Do you mean up_mbit\?"),
        ("[join]\n# text\nengin = 'none'\n", r"line 3: nothing is called 'engin' in \[join\]\. Do you mean engine\?"),
        ("[seed]\nengine = 'none'\n", r"line 2: nothing is called 'engine' in \[seed\]"),
        ("region = 'a'\n[jion]\n", r"line 2: there is no table \[jion\]\. Do you mean join\?"),
        ("join = 3\n", r"line 1: join is a table; write \[join\]"),
        ("[join]\nup_mbit = 'fast'\n", r"line 2: up_mbit in \[join\] has to be a number, not 'fast'"),
        ("up_mbit = true\n", r"line 1: up_mbit has to be a number, not true"),
        ("[join]\nengine = 'vlm'\n", r"line 2: engine in \[join\] has to be one of none, transformers, vllm"),
        ("[join]\ncopy_model = 'yes'\n", r"line 2: copy_model in \[join\] has to be true or false"),
        ("[join]\nthreads = 1.5\n", r"line 2: threads in \[join\] has to be a whole number, not 1\.5"),
        ("[join]\nmodel = ['a']\n", r"line 2: model in \[join\] has to be a path, in quotes"),
        ("[join]\nlisten = [1.5]\n", r"line 2: listen in \[join\] has to be a list of texts"),
        ("[seed]\nbase = 'a'\n[demo]\nsteps = 'all'\n", r"line 4: steps in \[demo\] has to be a whole number"),
        ("name = '''\nup_mbit = 1\n'''\n[relay]\nup_mbit = 'x'\n", r"line 5: up_mbit in \[relay\]"),
        ("announce = [\n  'up_mbit = 1',\n]\nup_mbit = 'x'\n", r"line 4: up_mbit has to be a number"),
        ("engine = 'none'\n[join]\n'up-mbit' = 'x'\n", r"line 3: up-mbit in \[join\] has to be a number"),
        ("up_mbit = \n", r"cannot be read: .*line 1"),
    ],
)
def test_each_mistake_is_named_with_its_line(folder: Path, content: str, error: str) -> None:
    write(folder, content)
    with pytest.raises(UsageError, match=error):
        explain(app, "join")


def test_a_mistake_ends_any_command_that_reads_the_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, "\n[relay]\nup_mbit = 'x'\n")
    for command in ("status", "relay", "invite"):
        assert run([command]) == 2
        assert "line 3: up_mbit in [relay] has to be a number" in capsys.readouterr().err


def test_a_port_needs_no_quotes(folder: Path) -> None:
    file = write(folder, "metrics = 9464\n[join]\nlisten = [4001]\n")
    assert TomlFile(file).values_for("join")["metrics"].value == 9464
    assert explain(app, "join")["listen"]["value"] in ("4001", ["4001"])


def test_the_top_level_applies_where_a_key_means_the_same(folder: Path) -> None:
    write(folder, 'home = "/data/a"\nmodel = "/models/b"\nnodes = 7\n[demo]\nnodes = 3\n')
    assert explain(app, "join")["model"] == {"value": "/models/b", "source": "swarm.toml:2"}
    assert explain(app, "demo")["model"] == {"value": "tiny", "source": "default"}
    assert explain(app, "invite")["nodes"]["value"] == "7"
    assert explain(app, "demo")["nodes"] == {"value": "3", "source": "swarm.toml:5"}


def test_home_counts_for_commands_without_settings_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, f'home = "{folder}/here"\n')
    import os

    os.environ.pop("SWARM_HOME")
    assert run(["status"]) == 3
    assert f"No swarm process answers in {folder}/here" in capsys.readouterr().err


# ---------------------------------------------------------------- variables


def test_no_variable_means_two_things() -> None:
    """A SWARM_KEY that sets several commands' settings sets settings of one kind, and no SWARM_COMMAND_KEY is one."""
    for key, settings in top_level().items():
        assert len({setting.kind for setting in settings}) == 1, key
        assert len({setting.choices for setting in settings}) == 1, key
    general = {f"SWARM_{key.upper()}" for key in top_level()}
    own = {f"SWARM_{command}_{key}".upper() for command in CONFIGURABLE for key in keys_of(command)}
    assert not general & own
    assert not means_the_same("demo", "model")


def test_swarm_watch_is_the_seeds_folder_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWARM_WATCH", str(folder))
    monkeypatch.setenv("SWARM_HOME", str(folder))
    assert explain(app, "seed")["watch"] == {"value": str(folder), "source": "SWARM_WATCH"}
    assert run(["status"]) == 3  # not 2: --watch is no folder there
    assert "SWARM_WATCH" not in capsys.readouterr().err
    assert run(["status", "--help"]) == 0
    assert "SWARM_STATUS_WATCH" in capsys.readouterr().out
    monkeypatch.setenv("SWARM_STATUS_WATCH", "no bool")
    assert run(["status"]) == 2
    assert "SWARM_STATUS_WATCH" in capsys.readouterr().err


def test_a_command_has_variables_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_UP_MBIT", "100")
    monkeypatch.setenv("SWARM_JOIN_UP_MBIT", "200")
    monkeypatch.setenv("SWARM_DEMO_MODEL", "small")
    monkeypatch.setenv("SWARM_MODEL", "/models/b")
    assert explain(app, "join")["up_mbit"] == {"value": "200", "source": "SWARM_JOIN_UP_MBIT"}
    assert explain(app, "relay")["up_mbit"] == {"value": "100", "source": "SWARM_UP_MBIT"}
    assert explain(app, "demo")["model"] == {"value": "small", "source": "SWARM_DEMO_MODEL"}
    assert explain(app, "join")["model"] == {"value": "/models/b", "source": "SWARM_MODEL"}


def test_a_secret_is_not_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_API_KEY", "hunter2")
    assert explain(app, "gateway")["api_key"] == {"value": "(hidden)", "source": "SWARM_API_KEY"}
    assert settings_of("gateway")["api_key"].secret
