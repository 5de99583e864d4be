# ruff: noqa: E501, B007
"""Renames what is defined under a retired word, and whatever uses it. Run after `moves`, in a clean checkout."""

import ast
import io
import re
import subprocess
import tokenize
from pathlib import Path

from tools.house import moves, pages_of, words

NAME = re.compile(r"[A-Za-z_]\w*")


def pairs(text: str) -> list[tuple[str, str]]:
    return [(old, new) for old, _, new in (word.partition("=") for word in text.split())]


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class Definitions:
    """(module, name) -> new name, for every module that defines or passes on a name that changes."""

    def __init__(self, sources: dict[str, str]) -> None:
        self.new = {(module, old): new for module, row in words.CLASSES.items() for old, new in pairs(row)}
        self.seen: set[tuple[str, str]] = set()
        self.modules = {module_of(path) for path in sources}
        self._imports = {path: self._imported(source) for path, source in sources.items()}
        for (module, name), _ in list(self.new.items()):
            path = module.replace(".", "/") + ".py"
            if path not in sources or not re.search(rf"^(?:class |def |async def )?{name}\b", sources[path], re.M):
                print(f"not in this checkout: {module}:{name}")
        while True:  # packages that pass a name on
            more = {
                (module_of(path), bound): self.new[module, name]
                for path, found in self._imports.items()
                for bound, module, name in found
                if bound == name and (module, name) in self.new and (module_of(path), bound) not in self.new
            }
            if not more:
                break
            self.new |= more

    @staticmethod
    def _imported(source: str) -> list[tuple[str, str, str]]:
        return [
            (alias.asname or alias.name, node.module, alias.name)
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.ImportFrom) and node.module and not node.level
            for alias in node.names
        ]

    def of(self, path: str) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
        """Names of this file -> new; and of modules that it binds: alias -> names in it."""
        module = module_of(path)
        names = {name: new for (at, name), new in self.new.items() if at == module}
        for bound, source, name in self._imports[path]:
            if (source, name) in self.new:
                names[name] = self.new[source, name]
        bound = {
            alias: {old: new for (at, old), new in self.new.items() if at == f"{source}.{name}"}
            for alias, source, name in self._imports[path]
            if f"{source}.{name}" in self.modules
        }
        return names, {alias: found for alias, found in bound.items() if found}


class Words:
    """Which words of identifiers change in a file."""

    def __init__(self, path: str) -> None:
        rules: list[tuple[str, str]] = []
        for scopes, row in words.WORDS.items():
            if any(path == scope or path.startswith(scope + "/") for scope in scopes.split()):
                rules += pairs(row)
        self.rules = [(re.compile(rf"(?<![A-Za-z0-9]){old}(?![A-Za-z0-9])"), new) for old, new in rules]
        self.rules += [
            (re.compile(rf"(?<![A-Za-z0-9]){old.upper()}(?![A-Za-z0-9])"), new.upper()) for old, new in rules
        ]

    def name(self, word: str) -> str:
        if word in words.EXACT:
            return words.EXACT[word]
        if word in KEPT:
            return word
        for old, new in self.rules:
            word = old.sub(new, word)
        return word


KEPT = {"perf_counter", "trio_typing"}


def in_code(source: str, path: str, found: Definitions) -> str:
    names, aliases = found.of(path)
    rules = Words(path)
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    out: list[tuple[int, int, str]] = []
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type != tokenize.NL]
    inside_import = False
    bound_names = set(names)
    quoted = annotations(source)
    for i, token in enumerate(tokens):
        at = starts[token.start[0] - 1] + token.start[1]
        end = starts[token.end[0] - 1] + token.end[1]
        before = tokens[i - 1].string if i else ""
        if token.type == tokenize.NEWLINE:
            inside_import = False
        if token.type == tokenize.NAME:
            if token.string in ("import", "from") and (i == 0 or tokens[i - 1].type != tokenize.NAME):
                inside_import = True
            word = token.string
            if before == "." and not inside_import and i > 1 and tokens[i - 2].string in aliases:
                new = aliases[tokens[i - 2].string].get(word) or rules.name(word)
            elif inside_import:
                line = token.line.lstrip()
                is_module = before in ("from", ".") or not line or (before == "import" and line.startswith("import"))
                if is_module or is_module_name(tokens, i):
                    new = word
                else:
                    new = names.get(word) or (rules.name(word) if not moduleish(source, token, found) else word)
            elif before != "." and word in bound_names:
                new = names[word]
            else:
                new = rules.name(word)
            if new != word:
                out.append((at, end, new))
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            new = in_text(token.string, names, rules, found, annotation=token.start in quoted)
            if new != token.string:
                out.append((at, end, new))
    for at, end, new in reversed(out):
        source = source[:at] + new + source[end:]
    return source


def is_module_name(tokens: list[tokenize.TokenInfo], i: int) -> bool:
    """Whether token `i` of an import statement stands between `from` and `import`."""
    while i >= 0 and tokens[i].string not in ("from", "import"):
        i -= 1
    return i >= 0 and tokens[i].string == "from"


def moduleish(source: str, token: tokenize.TokenInfo, found: Definitions) -> bool:
    """Whether an imported word is a module: those keep the names that `moves` gave them."""
    return any(module.rpartition(".")[2] == token.string for module in found.modules)


def annotations(source: str) -> set[tuple[int, int]]:
    """Where texts begin that are annotations, names in `__all__` or `__slots__`, or arguments of getattr and the like."""
    places: set[tuple[int, int]] = set()

    def take(node: ast.AST) -> None:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                places.add((inner.lineno, inner.col_offset))

    for node in ast.walk(ast.parse(source)):
        for field in ("annotation", "returns"):
            if isinstance(part := getattr(node, field, None), ast.AST):
                take(part)
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id in ("__all__", "__slots__") for target in node.targets
        ):
            take(node.value)
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("setattr", "getattr", "hasattr", "delattr", "cast", "attrgetter"):
                for argument in node.args[:2]:
                    take(argument)
    return places


TICKED = re.compile(r"`([^`\n]+)`")
DOTTED = re.compile(r"(?<![\w./-])(?:codec|swarm|node|scenarios|tests)(?:\.[A-Za-z_]\w*)+")


def in_text(text: str, names: dict[str, str], rules: Words, found: Definitions, annotation: bool) -> str:
    def word(match: re.Match[str]) -> str:
        return names.get(match[0]) or rules.name(match[0])

    def dotted(match: re.Match[str]) -> str:
        parts = match[0].split(".")
        for n in range(len(parts) - 1, 0, -1):
            module = ".".join(parts[:n])
            if module in found.modules:
                rest = [found.new.get((module, parts[n])) or rules.name(parts[n])]
                if f"{module}.{parts[n]}" in found.modules:
                    rest = [parts[n]]
                return ".".join([module, *rest, *(rules.name(part) for part in parts[n + 1 :])])
        return match[0]

    def ticked(match: re.Match[str]) -> str:
        inner = match[1]
        if not re.fullmatch(r"[A-Za-z_][\w.]*(\(.*\))?", inner) or inner in found.short or DOTTED.match(inner):
            return match[0]
        return f"`{NAME.sub(word, inner)}`"

    if annotation and not text.lstrip("rbuRBU").startswith(('"""', "'''")):
        return DOTTED.sub(dotted, text) if DOTTED.search(text) else NAME.sub(word, text)
    prefix = re.match(r"\w*", text)
    if prefix and "f" in prefix[0].lower() and text[len(prefix[0]) :][:1] in "\"'":
        text = re.sub(r"(?<!\{)\{([^{}]+)\}(?!\})", lambda m: "{" + in_braces(m[1], word) + "}", text)
    return DOTTED.sub(dotted, TICKED.sub(ticked, text))


def in_braces(code: str, word: object) -> str:
    expression, mark, form = code.partition("!")
    if not mark:
        expression, mark, form = code.partition(":")
    parts = re.split(r"(\"[^\"]*\"|'[^']*')", expression)
    return "".join(part if i % 2 else NAME.sub(word, part) for i, part in enumerate(parts)) + mark + form  # type: ignore[call-overload]


def main() -> None:
    tracked = moves.tracked()
    sources = {name: Path(name).read_text() for name in tracked if name.endswith(".py")}
    found = Definitions(sources)
    found.short = {module.rpartition(".")[2] for module in found.modules}  # type: ignore[attr-defined]
    for name, source in sources.items():
        new = in_code(source, name, found)
        for old, after in words.BY_HAND.get(name, ()):
            if old not in new:
                raise SystemExit(f"{name}: {old!r} is gone; see BY_HAND in tools/house/words.py")
            new = new.replace(old, after)
        if new != source:
            ast.parse(new)
            Path(name).write_text(new)
    pages_of.copy()
    moves.polish()
    subprocess.run(["git", "add", "-A"], check=True)


if __name__ == "__main__":
    main()
