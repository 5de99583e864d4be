"""Moves modules, tests and data into their rooms, and rewrites whatever names them. Run in a clean checkout."""

import ast
import re
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

from tools.house import mapping

ROOTS = ("codec", "swarm", "node", "scenarios", "tests", "tools")
OWN = "tools/house/"


def git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


def tracked() -> list[str]:
    return [name for name in git("ls-files").splitlines() if not name.startswith(OWN) and Path(name).is_file()]


def dotted(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


class Plan:
    """Where every tracked file goes. `modules`: old dotted name -> new; `files`: old path -> new, moved ones only."""

    def __init__(self, names: list[str]) -> None:
        self.modules: dict[str, str] = {}
        self.files: dict[str, str] = {}
        whole = mapping.WHOLE.items()
        self.folders: dict[str, str] = {old: new for old, new in whole if not old.endswith((".py", ".txt"))}
        unknown, wanted = [], {}
        for row, words in mapping.ROOMS.items():
            old, new = row.split(" > ")
            for word in words.split():
                before, _, after = word.partition("=")
                wanted[f"{old}.{before}"] = f"{new}.{after or before}"
        present = {dotted(name) for name in names if name.endswith(".py")}
        for name in names:
            package, _, base = dotted(name).rpartition(".")
            if name.endswith(".py") and package in mapping.SPLIT and base not in ("__init__", "__main__"):
                if dotted(name) in wanted:
                    self.modules[dotted(name)] = wanted[dotted(name)]
                else:
                    unknown.append(name)
        if unknown:
            raise SystemExit(
                "No room for " + ", ".join(unknown) + ": add each module's name to the row of ROOMS in"
                " tools/house/mapping.py whose right side is the package where it belongs, then run this again."
            )
        gone = sorted(set(wanted) - present)
        if gone:
            print("not in this checkout (remove from ROOMS):", ", ".join(gone), file=sys.stderr)
        self.packages = dict(mapping.PACKAGES)
        lent = re.compile(
            r"^ *from (test_\w+) import|^ *import (test_\w+)", re.M
        )  # imported by name: stays beside the kits
        self.lent = {
            first or second
            for name in names
            if name.startswith("tests/") and name.endswith(".py")
            for first, second in lent.findall(Path(name).read_text())
        }
        for old, new in self.modules.items():
            if old != new:
                self.files[old.replace(".", "/") + ".py"] = new.replace(".", "/") + ".py"
        for name in names:
            if name in self.files:
                continue
            for old, new in mapping.WHOLE.items():
                if name == old or name.startswith(old + "/"):
                    self.files[name] = self._room_of_test(name, new + name[len(old) :])
                    break
            else:
                room = self._room_of_test(name, name)
                if room != name:
                    self.files[name] = room
        for name, new in self.files.items():
            if name.endswith(".py") and not name.endswith("__init__.py") and dotted(name) not in self.modules:
                self.modules[dotted(name)] = dotted(new)

    def _room_of_test(self, name: str, new: str) -> str:
        """`tests/protocol/test_lease.py` -> `tests/swarm/protocol/membership/test_lease.py`: as the module moved."""
        folder, _, base = name.rpartition("/")
        if folder not in mapping.TESTS_OF or not base.startswith("test_") or not base.endswith(".py"):
            return new
        module = f"{mapping.TESTS_OF[folder]}.{base[5:-3]}"
        if module not in self.modules or base[:-3] in self.lent:
            return new
        package, _, stem = self.modules[module].rpartition(".")
        return f"tests/{package.replace('.', '/')}/test_{stem}.py"

    def name(self, old: str) -> str:
        """The new dotted name of a module, a package, or what stands in one: the longest part that has moved."""
        parts = old.split(".")
        for n in range(len(parts), 0, -1):
            head = ".".join(parts[:n])
            new = self.modules.get(head) or (self.packages.get(head))
            if new is not None:
                return ".".join([new, *parts[n:]])
        return old

    def path(self, old: str) -> str:
        if old in self.files:
            return self.files[old]
        if old + ".py" in self.files:
            return self.files[old + ".py"].removesuffix(".py")
        best = max((f for f in self.folders if old == f or old.startswith(f + "/")), key=len, default=None)
        if best is not None:
            return self.folders[best] + old[len(best) :]
        return self.name(old.replace("/", ".")).replace("/", ".").replace(".", "/") if "." not in old else old


DOTTED = re.compile(r"(?<![\w./-])(?:codec|swarm|node|scenarios|tests)(?:\.[A-Za-z_]\w*)+")
PATHED = re.compile(
    r"(?:(?<![\w./-])|(?<=\.\./))(?:codec|swarm|node|scenarios|tests)(?:/[\w-]+)+(?:\.(?:py|txt|toml|json))?"
)


def texts(text: str, plan: Plan) -> str:
    """Names of modules in prose, commands and paths."""

    def name(found: re.Match[str]) -> str:
        old = found[0]
        before = text[max(0, found.start() - 3) : found.start()]
        if old == "node.cli" or (old.startswith("node.cli.") and "-m" in before):
            return old  # `python -m node.cli` stays: the package has a `__main__`
        return plan.name(old)

    text = re.sub(r"from node\.cli import (?=run|explain|app)", "from node.cli.app import ", DOTTED.sub(name, text))
    return PATHED.sub(lambda found: plan.path(found[0]), text)


def spans(source: str) -> list[tuple[int, int]]:
    """(start, end) of every comment and every string outside of braces of an f-string, as offsets."""
    import io
    import tokenize

    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        at = starts[token.start[0] - 1] + token.start[1]
        end = starts[token.end[0] - 1] + token.end[1]
        if token.type == tokenize.COMMENT:
            found.append((at, end))
        elif token.type == tokenize.STRING:
            prefix = re.match(r"\w*", token.string)
            assert prefix is not None
            if "f" in prefix[0].lower():
                depth, begun = 0, at
                for offset, char in enumerate(token.string):
                    if char == "{":
                        if depth == 0:
                            found.append((begun, at + offset))
                        depth += 1
                    elif char == "}":
                        depth = max(0, depth - 1)
                        begun = at + offset + 1
                found.append((begun, end))
            else:
                found.append((at, end))
    return found


def in_texts(source: str, change: "object") -> str:
    out, last = [], 0
    for start, end in spans(source):
        out += [source[last:start], change(source[start:end])]  # type: ignore[operator]
        last = end
    return "".join([*out, source[last:]])


def imports(source: str, plan: Plan) -> str:
    """Every import statement that names what moved; and the uses of a module whose own name changed."""
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    data = source.encode()
    bound = Counter(
        node.id if isinstance(node, ast.Name) else node.arg
        for node in ast.walk(tree)
        if isinstance(node, ast.arg) or (isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load))
    )
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | set(bound)
    names |= {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom | ast.Import)
        for alias in node.names
    }
    edits: list[tuple[int, int, str]] = []
    uses: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                new = plan.name(alias.name)
                if new != alias.name:
                    start = starts[alias.lineno - 1] + alias.col_offset
                    edits.append((start, start + len(alias.name.encode()), new))
        if not isinstance(node, ast.ImportFrom) or node.level or node.module is None:
            continue
        if node.module.split(".")[0] not in ROOTS:
            continue
        groups: dict[str, list[str]] = {}
        changed = False
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            if whole in plan.modules:
                package, _, base = plan.modules[whole].rpartition(".")
            elif whole in plan.packages:
                package, _, base = plan.packages[whole].rpartition(".")
            else:
                package, base = plan.name(node.module), alias.name
                if node.module in plan.packages and node.module not in plan.modules:
                    package = plan.packages[node.module]
            word = base
            if alias.asname:
                word = f"{base} as {alias.asname}" if alias.asname != base else base
            elif base != alias.name:
                if base in names or bound[alias.name]:
                    word = f"{base} as {alias.name}"
                else:
                    uses[alias.name] = base
            changed |= package != node.module or base != alias.name
            groups.setdefault(package, []).append(word)
        if changed:
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            indent = " " * node.col_offset
            comments = re.findall(rb"#[^\n]*", data[start:end])
            assert not comments, comments
            made = [f"from {package} import {', '.join(sorted(words))}" for package, words in sorted(groups.items())]
            made = [line if len(line) < 100 else line.replace("import ", "import (", 1) + ")" for line in made]
            edits.append((start, end, f"\n{indent}".join(made)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in uses:
            start = starts[node.lineno - 1] + node.col_offset
            if data[start : start + len(node.id)].decode() == node.id:
                edits.append((start, start + len(node.id), uses[node.id]))
            else:
                raise SystemExit(f"an f-string uses the module {node.id}: import it under another name")
    for start, end, new in sorted(set(edits), reverse=True):
        data = data[:start] + new.encode() + data[end:]
    return data.decode()


HERE = re.compile(
    r"Path\(__file__\)(?P<up>(?:\.parents\[\d\]|\.parent\b)+)(?P<down>(?: / \"[^\"]+\")*)"
    r"|Path\(__file__\)\.with_name\(\"(?P<beside>[^\"]+)\"\)"
)


def here(source: str, old: str, new: str, plan: Plan) -> str:
    """`Path(__file__).parent...` of a file that moved, or that looks into a folder that did."""

    def moved_path(found: re.Match[str]) -> str:
        if found["beside"]:
            target = Path(old).parent / found["beside"]
        else:
            target = Path(old)
            for index, _ in re.findall(r"\.parents\[(\d)\]|\.(parent)\b", found["up"]):
                for _ in range(int(index) + 1 if index else 1):
                    target = target.parent
            for part in re.findall(r'"([^"]+)"', found["down"]):
                target = target / part
        moved = Path(plan.path(str(target))) if str(target) != "." else target
        if str(target) in TOP:
            moved = target
        if str(moved) == str(target) and Path(old).parent == Path(new).parent:
            return found[0]
        if moved.parent == Path(new).parent and found["beside"]:
            return f'Path(__file__).with_name("{moved.name}")'
        up, base = 0, Path(new).parent
        while base != Path(".") and base != moved and base not in moved.parents:
            base, up = base.parent, up + 1
        down = moved.relative_to(base).parts
        head = "Path(__file__).parent" if up == 0 else f"Path(__file__).parents[{up}]"
        return head + "".join(f' / "{part}"' for part in down)

    return HERE.sub(moved_path, source)


TOP = set(ROOTS)


def first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return re.split(r"(?<=[.:])\s", " ".join(text.split("\n\n")[0].split()))[0].rstrip(".:")


def inits(plan: Plan) -> None:
    """A docstring for each room: what is in it, and its modules. One that has names to export keeps them."""
    for package, text in mapping.INITS.items():
        folder = Path(package.replace(".", "/"))
        file = folder / "__init__.py"
        old = file.read_text() if file.exists() else ""
        body = old
        tree = ast.parse(old)
        if tree.body and ast.get_docstring(tree) is not None:
            lines = old.splitlines(keepends=True)
            body = "".join(lines[tree.body[0].end_lineno :])
        head = textwrap.dedent("    " * 2 + text).strip()
        rooms = sorted(p.parent.name for p in folder.glob("*/__init__.py"))
        modules = sorted(p for p in folder.glob("*.py") if not p.name.startswith("__"))
        listed = [f"- `{name}/`" for name in rooms]
        for module in modules:
            line = f"- `{module.stem}`: {first_line(module)}"
            listed += textwrap.wrap(line, 116, subsequent_indent="  ", break_on_hyphens=False)[:2]
        text = head + ("\n\nModules:\n\n" + "\n".join(listed) if listed else "")
        text = "\n".join(line.rstrip() for line in text.splitlines())
        file.write_text(f'"""{text}\n"""\n' + (body if body.strip() else ""))
        git("add", str(file))


WIDTH = 120


def polish() -> None:
    """Sorted imports, lines of at most `WIDTH`, the project's format; says what is left for a person."""
    subprocess.run(["ruff", "check", "--select", "I,F401,RUF022,RUF023", "--fix", "-q", "."], check=False)
    subprocess.run(["ruff", "format", "-q", "."], check=True)
    for name in git("ls-files", "*.py").splitlines():
        path = Path(name)
        if not name.startswith(OWN) and path.exists():
            text = path.read_text()
            if (wrapped := wrap(text)) != text:
                path.write_text(wrapped)
    subprocess.run(["ruff", "format", "-q", "."], check=True)
    subprocess.run(["ruff", "check", "--output-format", "concise", "."], check=False)


def wrap(source: str) -> str:
    """Breaks lines that became too long: of docstrings and comments at a space, of code by the formatter."""
    if all(len(line) <= WIDTH for line in source.splitlines()):
        return source
    inside: set[int] = set()  # lines (from 1) of texts over several lines, and of docstrings
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            inside.update(range(node.lineno, (node.end_lineno or 0) + 1))
    out: list[str] = []
    lines = source.splitlines()
    for number in range(len(lines)):
        line = lines[number]
        if len(line) <= WIDTH:
            out.append(line)
            continue
        indent = line[: len(line) - len(line.lstrip())]
        comment = line.lstrip().startswith("#")
        if number + 1 in inside or comment:
            lead = indent + ("# " if comment else "")
            at = line.rfind(" ", 0, WIDTH + 1)
            rest, line = line[at + 1 :], line[:at].rstrip()
            if (
                re.match(r"\s*(python -m|make|\$)", line) or "  " in line.strip()
            ):  # a command, or a table: aligned by hand
                line, rest = re.sub(r" {6,}", lambda gap: gap[0][:-4], lines[number], count=1), ""
                if len(line) > WIDTH:
                    line = re.sub(r" {2,}(?=\S+( \S+)*$)", "  ", lines[number])
            out.append(line)
            following = lines[number + 1] if number + 1 < len(lines) else ""
            joins = (
                following.startswith(lead)
                and following[len(lead) :][:1] not in ("", " ", "-", "#", ":", '"')
                and (number + 2 in inside or comment)
            )
            if rest and joins:
                lines[number + 1] = lead + rest + " " + following[len(lead) :]
            elif rest:
                out.append(lead + rest)
        else:
            out.append(line)
    text = "\n".join(out) + "\n"
    long = {n for n, line in enumerate(text.splitlines(), 1) if len(line) > WIDTH}
    if long:
        made = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.stmt) and not isinstance(
                node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef
            ):
                last = node.end_lineno or 0
                if any(node.lineno <= n <= last for n in long):
                    for n in range(node.lineno, last + 1):
                        made[n - 1] = re.sub(r"  # fmt: skip$", "", made[n - 1])
        text = "\n".join(made) + "\n"
    return text


def main() -> None:
    names = tracked()
    plan = Plan(names)
    for name in names:
        path = Path(name)
        if path.suffix in (".png", ".svg", ".lock") or "golden" in name or name == "requirements.lock":
            continue
        try:
            old = path.read_text()
        except UnicodeDecodeError:
            continue
        text = old
        if path.suffix == ".py":
            text = imports(text, plan)
            text = in_texts(text, lambda part: texts(part, plan))
            text = here(text, name, plan.files.get(name, name), plan)
        else:
            text = texts(text, plan)
        for before, after in mapping.BY_HAND.get(name, ()):
            if before not in text:
                raise SystemExit(f"{name}: {before!r} is gone; see BY_HAND in tools/house/mapping.py")
            text = text.replace(before, after)
        if text != old:
            path.write_text(text)
    for old, new in sorted(plan.files.items()):
        Path(new).parent.mkdir(parents=True, exist_ok=True)
        if Path(new).exists():
            raise SystemExit(f"{old} -> {new}, which is there: rename one of them in tools/house/mapping.py")
        git("mv", old, new)
    for folder in mapping.EMPTY:
        file = Path(folder) / "__init__.py"
        if file.exists():
            git("rm", "-qf", str(file))
    for name, text in mapping.NEW.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
        git("add", name)
    inits(plan)
    polish()
    git("add", "-A")


if __name__ == "__main__":
    main()
