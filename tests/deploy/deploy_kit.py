"""What the tests of the recipes share: the commands in them, and a checker for the manifests' schema."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from node.cli.app import app

HOUSE = Path(__file__).parents[2]
DEPLOY = HOUSE / "deploy"
SCHEMA = json.loads((Path(__file__).with_name("manifest_schema.json")).read_text())
_TYPES: dict[str, type] = {"string": str, "integer": int, "boolean": bool}


def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose" / "compose.yml").read_text())


def manifests() -> list[dict[str, Any]]:
    return [
        doc for file in sorted((DEPLOY / "kubernetes").glob("*.yaml")) for doc in yaml.safe_load_all(file.read_text())
    ]


def stateful_sets() -> list[dict[str, Any]]:
    return [doc for doc in manifests() if doc["kind"] == "StatefulSet"]


def flags_of(command: str) -> set[str]:
    """The flags that a command of swarm-node takes."""
    sub = app[command]
    with app.app_stack([app, sub]):
        return {name for argument in sub.assemble_argument_collection() for name in argument.names}


def command_lines() -> dict[str, list[str]]:
    """The words after `swarm-node` that each recipe runs, by a name for people."""
    found: dict[str, list[str]] = {}
    for file in sorted((DEPLOY / "systemd").glob("*.service")):
        start = re.search(r"(?m)^ExecStart=\S+/swarm-node (.+)$", file.read_text())
        assert start is not None
        found[file.name] = shlex.split(start[1])
    for name, service in compose()["services"].items():
        if str(service.get("image", "")).startswith("${IMAGE") and "entrypoint" not in service:
            found[f"compose {name}"] = service["command"]
    for each in stateful_sets():
        found[f"kubernetes {each['metadata']['name']}"] = each["spec"]["template"]["spec"]["containers"][0]["args"]
    slurm = (DEPLOY / "slurm" / "swarm-node.sbatch").read_text().replace("\\\n", " ")
    words = re.search(r'exec "\$SWARM_NODE" (.+?)\'\n', slurm)
    assert words is not None
    found["slurm"] = re.sub(r"\$\{MODEL:\+(.*?)\}", r"\1", words[1]).replace('"', "").split()
    return found


def faults(schema: dict[str, Any], value: Any, where: str) -> list[str]:
    """What does not fit; the schema's keywords are those of `manifest_schema.json`."""
    if "ref" in schema:
        return faults(SCHEMA[schema["ref"]], value, where)
    if "enum" in schema:
        return [] if value in schema["enum"] else [f"{where}: {value!r} is none of {schema['enum']}"]
    if "pattern" in schema:
        return [] if re.fullmatch(schema["pattern"], str(value)) else [f"{where}: {value!r}"]
    if "type" in schema:
        fits = isinstance(value, _TYPES[schema["type"]]) and (schema["type"] == "boolean") == isinstance(value, bool)
        return [] if fits else [f"{where}: {value!r} is no {schema['type']}"]
    if "items" in schema:
        if not isinstance(value, list):
            return [f"{where}: is no list"]
        return [fault for i, each in enumerate(value) for fault in faults(schema["items"], each, f"{where}[{i}]")]
    if not isinstance(value, dict):
        return [f"{where}: is no map"]
    if "map" in schema:
        return [fault for key, each in value.items() for fault in faults(schema["map"], each, f"{where}.{key}")]
    found = [f"{where}: lacks {key}" for key in schema.get("required", ()) if key not in value]
    for key, each in value.items():
        if key in schema["properties"]:
            found += faults(schema["properties"][key], each, f"{where}.{key}")
        else:
            found.append(f"{where}: nothing is called {key}")
    return found
