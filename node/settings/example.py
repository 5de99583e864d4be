"""The commented example of swarm.toml, and its JSON schema: both from the definitions."""

import json
import textwrap
from collections.abc import Iterator
from typing import Any, Final

from node.settings.definitions import CONFIGURABLE, Setting, settings_of, top_level

__all__ = ["example", "schema"]

_WIDTH: Final = 100
_HEAD: Final = """\
# Settings of swarm-node. swarm-node looks for this file here, and takes the first that it finds:
#
#   the file that SWARM_CONFIG names
#   ./swarm.toml
#   ~/.config/swarm-node/swarm.toml
#   /etc/swarm-node/swarm.toml
#
# A flag has precedence over a variable (SWARM_JOIN_UP_MBIT, then SWARM_UP_MBIT), a variable over this file, and a
# command's own table over the top level. swarm-node config show says what counts and where it comes from.
# Take the "#" away in front of a setting to change it. What is shown is the default, or else an example.
# swarm-node doctor takes the settings of [join].

# For every command that has such a setting:
"""
_AT_TOP: Final = ("home", "name", "region", "up_mbit", "down_mbit")
"""The settings that most commands share: they stand once more at the top."""
_EXAMPLES: Final[dict[str, Any]] = {
    "adapter_rank": 32,
    "announce": ["203.0.113.7:4001"],
    "api_key": "a long random text",
    "api_key_file": "/run/secrets/gateway",
    "base": "/models/Qwen3-8B",
    "council": ["12D3KooWAsp8tDfrn8wj2h6Y71vxzffdf42zFkXSEE7bGCtccRFT@10.0.0.1:4100"],
    "down_mbit": 500,
    "draft": "/models/Qwen3-0.6B",
    "egress_copies": 1.1,
    "engine_url": ["http://127.0.0.1:8000"],
    "finish_within": "100s",
    "home": "/data/swarm",
    "keep": "talk",
    "key": "/secrets/authority.key",
    "log_file": "/var/log/swarm-node.json",
    "log_level": "debug",
    "metrics": "127.0.0.1:9464",
    "model": "/models/Qwen3-8B",
    "name": "box-7",
    "raw_out": "/data/file",
    "region": "eu",
    "reward": ["tests_pass=my_rewards.code:tests_pass"],
    "sglang_arg": ["--context-length=4096"],
    "sglang_python": "/opt/sglang/bin/python",
    "threads": 8,
    "ticket_file": "/run/secrets/ticket",
    "up_gb_day": 50,
    "up_mbit": 200,
    "via": ["203.0.113.9:4001"],
    "vllm_arg": ["--max-model-len=4096"],
    "vllm_python": "/opt/vllm/bin/python",
    "watch": "/runs",
    "watch_marker": "STABLE",
}
"""For settings without a default, or whose default is empty or this machine's: a value that says more than its type."""
_PLACEHOLDERS: Final[dict[str, Any]] = {
    "text": "text", "path": "/path", "number": 1.0, "integer": 1, "flag": True, "texts": ["text"],
}  # fmt: skip
"""For a setting that has neither a default nor an entry in `_EXAMPLES`."""
_TYPES: Final = {"text": "string", "path": "string", "number": "number", "integer": "integer", "flag": "boolean"}


def example() -> str:
    """Every setting with its help, commented out."""
    out = [_HEAD]
    for key in _AT_TOP:
        out += _entry(top_level()[key][0])
    for command in CONFIGURABLE:
        out.append(f"\n[{command}]\n")
        for setting in settings_of(command).values():
            out += _entry(setting)
    return "\n".join(out)


def _entry(setting: Setting) -> Iterator[str]:
    yield from (f"# {line}" for line in textwrap.wrap(_help(setting), _WIDTH - 2, break_on_hyphens=False))
    yield f"#{setting.key} = {json.dumps(_value(setting), ensure_ascii=False)}\n"  # each JSON value here is TOML too


def _help(setting: Setting) -> str:
    choices = f" One of: {', '.join(setting.choices)}." if setting.choices else ""
    return setting.help + choices


def _value(setting: Setting) -> Any:
    """The default, or an example where there is none."""
    if setting.own or setting.default in (None, "", []):
        return _EXAMPLES.get(setting.key, _PLACEHOLDERS[setting.kind])
    return setting.default


def schema() -> dict[str, Any]:
    """The JSON schema of swarm.toml, for editors and for checks."""
    top = {key: _property(settings[0], choices=_choices(settings)) for key, settings in top_level().items()}
    tables = {
        command: {
            "type": "object",
            "description": f"swarm-node {command}",
            "additionalProperties": False,
            "properties": {key: _property(setting) for key, setting in settings_of(command).items()},
        }
        for command in CONFIGURABLE
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "swarm.toml",
        "type": "object",
        "additionalProperties": False,
        "properties": top | tables,
    }


def _choices(settings: list[Setting]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(choice for setting in settings for choice in setting.choices))


def _property(setting: Setting, choices: tuple[str, ...] = ()) -> dict[str, Any]:
    found: dict[str, Any] = {"description": setting.help}
    if setting.kind == "texts":
        found |= {"type": ["array", "string", "integer"], "items": {"type": ["string", "integer"]}}
    elif setting.choices:
        found |= {"enum": list(choices or setting.choices)}
    else:
        found |= {"type": ["string", "integer"] if setting.kind == "text" else _TYPES[setting.kind]}
    if not setting.own and setting.default is not None:
        found["default"] = setting.default
    return found
