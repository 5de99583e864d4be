"""Prints what must be the same before and after: wire structs, literals, help texts, config keys, golden files.

    python -m tools.house.encodings > before.txt        in a checkout of main
    python -m tools.house.encodings > after.txt         in one after the codemod; then diff the two

Names of modules and classes are left out, because they change.
"""

import ast
import contextlib
import hashlib
import importlib
import inspect
import io
import subprocess
from collections import Counter
from pathlib import Path

import msgspec

PRODUCT = ("codec", "swarm", "node")


def tracked(*patterns: str) -> list[Path]:
    names = subprocess.run(["git", "ls-files", *patterns], capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in names.splitlines() if not name.startswith("tools/house/")]


def structs() -> list[str]:
    found: dict[int, str] = {}
    for path in tracked(*(f"{package}/*.py" for package in PRODUCT)):
        if "swarm_vllm" in path.parts or path.name == "__main__.py":
            continue
        name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        for thing in vars(module).values():
            if inspect.isclass(thing) and issubclass(thing, msgspec.Struct) and thing.__module__.startswith(PRODUCT):
                config = thing.__struct_config__
                fields = f"{len(thing.__struct_fields__)}" if config.array_like else f"{thing.__struct_encode_fields__}"
                found[id(thing)] = (
                    f"struct tag={config.tag!r} field={config.tag_field!r} array={config.array_like} {fields}"
                )
    return sorted(found.values())


def literals() -> list[str]:
    """Every bytes literal, and every text without a space that is neither a docstring nor in `__all__`: keys, tags."""
    counts: Counter[str] = Counter()
    for path in tracked(*(f"{package}/*.py" for package in PRODUCT)):
        tree = ast.parse(path.read_text())
        left_out = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                left_out.add(id(node.value))
            if isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
            ):
                left_out.update(id(inner) for inner in ast.walk(node))
            for field in ("annotation", "returns"):
                if (part := getattr(node, field, None)) is not None:
                    left_out.update(id(inner) for inner in ast.walk(part))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and id(node) not in left_out:
                if isinstance(node.value, bytes):
                    counts[f"bytes {node.value[:80]!r}"] += 1
                elif isinstance(node.value, str) and node.value and not any(c.isspace() for c in node.value):
                    counts[f"str {node.value!r}"] += 1
    return [f"{text} x{n}" for text, n in sorted(counts.items())]


def helps() -> list[str]:
    try:
        from node.cli.app import run  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        from node.cli import run  # type: ignore[attr-defined, unused-ignore]
    top = io.StringIO()
    with contextlib.redirect_stdout(top):
        run(["--help"])
    commands = (
        "apply config delta demo gateway invite join key keygen kick relay resume revoke seed status version work"
    )
    out = [top.getvalue()]
    for command in commands.split():
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
            run([command, "--help"])
        out.append(f"== {command}\n{text.getvalue()}")
    with contextlib.redirect_stdout(text := io.StringIO()):
        run(["config", "show"])
    return [*out, text.getvalue()]


def golden() -> list[str]:
    paths = [path for path in tracked() if "golden" in path.parts]
    return sorted(f"golden {path.name} {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}" for path in paths)


def main() -> None:
    for part in (structs, golden, literals, helps):
        print(f"#### {part.__name__}")
        print("\n".join(part()))


if __name__ == "__main__":
    main()
