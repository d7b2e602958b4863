"""Counts the code and its words: files, lines, modules with one importer, long functions, words outside the field's.

python benchmarks/structure.py                 the figures as a table
python benchmarks/structure.py --json FILE     and as JSON
python benchmarks/structure.py --check         exit code 1 where a figure is above its limit
python benchmarks/structure.py --places        and where long functions, starred calls, banned names and words are
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

__all__ = ["Source", "check", "main", "measure", "shape", "sources"]

ROOT: Final = Path(__file__).resolve().parents[1]
PRODUCT: Final = ("kvcm", "connectors", "gpu_tier")
GENERATED: Final = ("kvcm/protocol/", "docs/reference/")

MOST_FUNCTION_LINES: Final = 60
MOST_POSITIONAL: Final = 5
"""Positional arguments of one call."""

LIMITS: Final[Mapping[str, float]] = {
    "product_files": 600,
    "modules_with_one_importer": 170,
    "functions_over_60_lines": 0,
    "starred_literals_in_calls": 0,
    "calls_with_over_5_positional_arguments": 0,
}

PROSE: Final[Mapping[str, tuple[str, float]]] = {
    "what is/was": (r"\bwhat(?:'s| is| was)\b", 0.3),
    "told/tell/tells": (r"\b(?:told|tells?|telling)\b", 0.3),
    "nobody": (r"\bnobody\b", 0.1),
    "whoever": (r"\bwhoever\b", 0.1),
    "who": (r"\bwho\b", 0.1),
    "heard/hear": (r"\b(?:heard|hears?|hearing)\b", 0.1),
    "anew": (r"\banew\b", 0.1),
    "room/floor/house": (r"\b(?:rooms?|floors?|houses?)\b", 0.1),
}
"""Patterns of prose, and how often each may stand in 1,000 words."""

NAMES: Final = frozenset(
    {"alike", "anew", "custodian", "custody", "deeds", "errand", "errands", "ground", "hear", "heard", "hears", "house"}
    | {"knock", "knocks", "look", "looks", "nobody", "room", "rooms", "seat", "seats", "shelf", "somebody", "taker"}
    | {"tell", "tells", "told", "unseen", "who", "whoever"}
)
"""Words that no name of a module, class, function, argument or variable has in it."""

PUBLIC_NAMES: Final = frozenset({"WhoAmIDocument", "who_am_i"})
"""Names of the REST resource `/v1/whoami`, which is public."""


@dataclass(frozen=True, slots=True)
class Source:
    """A Python file.

    Attributes:
        path: from the root of the repository.
        text: all of it.
        tree: its syntax.
    """

    path: str
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """Dotted name that it is imported by."""
        parts = Path(self.path).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def is_product(self) -> bool:
        """Whether it is installed."""
        return self.path.startswith(tuple(f"{each}/" for each in PRODUCT))

    @property
    def is_test(self) -> bool:
        """Whether it is part of the tests."""
        return self.path.startswith("tests/")

    def docstrings(self) -> list[ast.Constant]:
        """Return the docstrings of the module, its classes and its functions."""
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [node.body[0].value for node in ast.walk(self.tree) if isinstance(node, kinds) and _has_docstring(node)]
        return [each for each in found if isinstance(each, ast.Constant)]

    def comments(self) -> list[tuple[int, str]]:
        """Return its comments, with their lines."""
        return [(each.start[0], each.string.lstrip("# ")) for each in self._tokens() if each.type == tokenize.COMMENT]

    def code_lines(self) -> int:
        """Return how many lines hold code: none that are blank, a comment or a docstring."""
        ignored = (
            tokenize.COMMENT,
            tokenize.NL,
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
            tokenize.ENDMARKER,
        )
        code = {
            line
            for token in self._tokens()
            if token.type not in ignored
            for line in range(token.start[0], token.end[0] + 1)
        }
        prose = {line for each in self.docstrings() for line in range(each.lineno, (each.end_lineno or 0) + 1)}
        return len(code - prose)

    def _tokens(self) -> list[tokenize.TokenInfo]:
        return list(tokenize.generate_tokens(io.StringIO(self.text).readline))


def _has_docstring(node: Any) -> bool:
    first = node.body[0] if node.body else None
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)


def tracked(suffix: str) -> list[Path]:
    """Return the files of the repository that end so, without generated ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", f"*{suffix}"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / each for each in sorted(listed) if (ROOT / each).is_file() and not each.startswith(GENERATED)]


def sources(below: Sequence[str] = ("",)) -> list[Source]:
    """Return the Python files of the repository whose paths begin so."""
    found = ((path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in tracked(".py"))
    return [Source(path, text, ast.parse(text)) for path, text in found if path.startswith(tuple(below))]


def importers(product: Sequence[Source]) -> dict[str, set[str]]:
    """Return which modules import each module of the product, anywhere in their code."""
    found: dict[str, set[str]] = {each.module: set() for each in product if not each.path.endswith("__init__.py")}
    for source in product:
        for node in ast.walk(source.tree):
            for name in _imported(node, found):
                if name != source.module:
                    found[name].add(source.module)
    return found


def _imported(node: ast.AST, modules: Container[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in modules)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            if inner in modules or node.module in modules:
                yield inner if inner in modules else node.module


def long_functions(found: Iterable[Source]) -> list[str]:
    """Return the functions that are longer than 60 lines, docstrings included; a kernel is one function: in
    parts, its inner loop passes arrays from one to the next."""
    return [
        f"{source.path}:{node.lineno} {node.name}"
        for source in found
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MOST_FUNCTION_LINES
        and not source.path.endswith("triton_impl.py")
        and not any(isinstance(each, ast.Name) and each.id == "compiled" for each in node.decorator_list)
    ]


def starred_literals(found: Iterable[Source]) -> list[str]:
    """Return the calls with `*(…)`: tuples that are written out only to be unpacked."""
    return [
        f"{source.path}:{node.lineno}"
        for source in found
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and any(isinstance(each, ast.Starred) and isinstance(each.value, ast.Tuple) for each in node.args)
    ]


def long_calls(found: Sequence[Source]) -> list[str]:
    """Return the calls of our own functions and classes with more than five positional arguments, but of kernels: Numba
    and Triton compile them and their callers, which know no names."""
    product = [each for each in found if not each.path.startswith("gpu_tier/kernels/")]
    nodes = [(source, node) for source in product for node in ast.walk(source.tree)]
    named: dict[str, int] = {}
    for _, node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_compiled(node):
            named[node.name] = max(named.get(node.name, 0), len(node.args.args))
        elif isinstance(node, ast.ClassDef):
            named[node.name] = _constructor_arguments(node)
    compiled = {node.name for _, node in nodes if isinstance(node, ast.FunctionDef) and _is_compiled(node)}
    return [
        f"{source.path}:{node.lineno}"
        for source, node in nodes
        if isinstance(node, ast.Call)
        and (name := _name_of(node.func)) not in compiled
        and MOST_POSITIONAL < len(node.args) <= named.get(name, 0)
    ]


def _is_compiled(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("compiled" in ast.unparse(each) for each in node.decorator_list)


def _constructor_arguments(node: ast.ClassDef) -> int:
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            return len(each.args.args)
    return sum(isinstance(each, ast.AnnAssign) for each in node.body)


def _name_of(function: ast.expr) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def names(source: Source) -> Iterator[tuple[str, int]]:
    """Yield the names that a file gives, with their lines: modules, classes, functions, arguments, variables."""
    yield Path(source.path).stem, 1
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def words_of(name: str) -> list[str]:
    """Return the words of a name, in lower case."""
    return [each.lower() for each in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def prose(found: Iterable[Source]) -> list[tuple[str, int, str]]:
    """Return docstrings, comments and documents, without the code in them, with path and line."""
    parts = [(source.path, each.lineno, str(each.value)) for source in found for each in source.docstrings()]
    parts += [(source.path, line, text) for source in found for line, text in source.comments()]
    for path in tracked(".md"):
        text = re.sub(r"```.*?```", _blank, path.read_text(encoding="utf-8"), flags=re.DOTALL)
        parts.append((path.relative_to(ROOT).as_posix(), 1, text))
    return parts


def _blank(block: re.Match[str]) -> str:
    return "\n" * block[0].count("\n")  # lines behind a block of code keep their numbers


def prose_places(parts: Iterable[tuple[str, int, str]]) -> list[str]:
    """Return where the words of PROSE stand, with the line."""
    words = re.compile("|".join(pattern for pattern, _ in PROSE.values()), re.IGNORECASE)
    return [
        f"{path}:{first + number} {line.strip()}"
        for path, first, text in parts
        for number, line in enumerate(text.split("\n"))
        if words.search(line)
    ]


def shape(product: Sequence[Source]) -> dict[str, Any]:
    """Return the figures of the product's files, and where long functions and calls are."""
    return {
        "product_files": len(product),
        "modules_with_one_importer": sum(len(each) == 1 for each in importers(product).values()),
        "functions_over_60_lines": len(long := long_functions(product)),
        "calls_with_over_5_positional_arguments": len(calls := long_calls(product)),
        "places": {"long_functions": long, "calls": calls},
    }


def measure() -> dict[str, Any]:
    """Return every figure."""
    found = sources()
    product, tests = [each for each in found if each.is_product], [each for each in found if each.is_test]
    lines = {each.path: each.text.count("\n") for each in found}
    figures = shape(product)
    parts = prose(found)
    text = "\n".join(text for _, _, text in parts)
    word_count = len(re.findall(r"[A-Za-z']+", text))
    banned = [
        (word, f"{each.path}:{line} {name}")
        for each in found
        if not each.path.startswith("gpu_tier/kernels/")  # a kernel and its reference share the names of its paper
        for name, line in sorted(set(names(each)))
        for word in words_of(name)
        if word in NAMES and name not in PUBLIC_NAMES
    ]
    places = figures.pop("places")
    return {
        **figures,
        "product_code_lines": sum(each.code_lines() for each in product),
        "test_files": len(tests),
        "test_code_lines": sum(each.code_lines() for each in tests),
        "starred_literals_in_calls": len(starred := starred_literals(found)),
        "prose_words": word_count,
        "prose_per_1000_words": {
            name: round(1000 * len(re.findall(pattern, text, re.IGNORECASE)) / word_count, 3)
            for name, (pattern, _) in PROSE.items()
        },
        "banned_words_in_names": dict(Counter(word for word, _ in banned).most_common()),
        "longest_files": dict(sorted(lines.items(), key=lambda item: -item[1])[:10]),
        "places": {
            **places,
            "starred": starred,
            "names": [place for _, place in banned],
            "prose": prose_places(parts),
        },
    }


def check(figures: Mapping[str, Any]) -> list[str]:
    """Return the figures that are above their limits."""
    above = [
        f"{name} is {figures[name]}, at most {limit}"
        for name, limit in LIMITS.items()
        if name in figures and figures[name] > limit
    ]
    for name, rate in figures.get("prose_per_1000_words", {}).items():
        if rate > (limit := PROSE[name][1]):
            above.append(f"{name!r} stands {rate} times in 1,000 words, at most {limit}")
    above += [f"longer than {MOST_FUNCTION_LINES} lines: {place}" for place in figures["places"]["long_functions"]]
    return above + [f"a name has a banned word: {place}" for place in figures["places"].get("names", ())]


def _print(figures: Mapping[str, Any], *, with_places: bool) -> None:
    for name, value in figures.items():
        if name == "places":
            continue
        if isinstance(value, dict):
            print(f"{name.replace('_', ' ')}:")
            for inner, count in value.items():
                print(f"  {inner:<60} {count}")
        else:
            print(f"{name.replace('_', ' '):<62} {value:>8,}")
    for name, places in figures["places"].items() if with_places else ():
        print(f"{name}:", *places, sep="\n  ")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures, and compare them with their limits with `--check`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("--check", action="store_true", help="fail where a figure is above its limit")
    parser.add_argument("--places", action="store_true", help="list where functions, calls, names and words are")
    options = parser.parse_args(arguments)
    figures = measure()
    _print(figures, with_places=options.places)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    above = check(figures) if options.check else []
    print(*above, sep="\n", file=sys.stderr)
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
