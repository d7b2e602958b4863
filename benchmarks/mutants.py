"""Claim: the tests of the core notice wrong code.

200 mutants, 50 each of the index, write sessions, reclaim and quotas, named by function in `mutants.json`, run against
the tests that execute the mutated statement. A mutant is killed when one of them fails or hangs. The file outlives
refactoring: mutants are found again by function, operator and text after names were replaced (`--renames`), else by the
likeness of their function to that of the commit where they were chosen. Those whose code is gone are replaced by new
ones of the same area. Nothing in the tree is edited: modules are compiled with all of their mutants, each behind a
switch, and every mutant runs in a fork of one process that has collected the tests.

    python benchmarks/mutants.py --list
    python benchmarks/mutants.py --json build/mutants.json [--before FILE] [--renames FILE] [--only NAME]
    python benchmarks/mutants.py --choose --seed 26 --count 200

A run that was cut off goes on where it stopped when started with the same `--json FILE`.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import copy
import difflib
import gc
import importlib.abc
import importlib.machinery
import json
import keyword
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
LIST = HERE.with_suffix(".json")
AREAS = {
    "index": ["kvcm/index/**/*.py"],
    "sessions": [
        "kvcm/cache/*session*.py",
        "kvcm/cache/write_sessions.py",
        "kvcm/cache/write_sessions.py",
        "kvcm/cache/write_*.py",
    ],
    "reclaim": ["kvcm/reclaim/**/*.py"],
    "quotas": [
        "kvcm/cache/*usage*.py",
        "kvcm/cache/quotas.py",
        "kvcm/cache/quotas.py",
        "kvcm/cache/pins.py",
        "kvcm/cache/quotas.py",
        "kvcm/cache/usage_recount.py",
        "kvcm/cache/write_plan.py",
        "kvcm/model/groups.py",
        "kvcm/registry/groups.py",
        "kvcm/registry/instances.py",
        "kvcm/store/redis/quota.py",
    ],
}
WEIGHTS = {  # what hardly any test lets pass is drawn less often
    "comparison": 4,
    "boolean": 4,
    "extreme": 4,
    "jump": 4,
    "arithmetic": 3,
    "constant": 3,
    "negation": 2,
    "deletion": 2,
    "return": 1,
}
TESTS = [
    f"tests/{name}" for name in ("index", "cache", "reclaim", "property", "contract", "registry", "model", "store")
]
UNRELATED = ["tests/contract/test_*storage*.py", "tests/contract/test_made_objects.py"]  # storage backends alone
HANG_SECONDS = 60.0
MEASURE_SECONDS = 3600.0
SAME = 0.62  # likeness from which a statement counts as the one that was mutated before

FLIPS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
WORD = re.compile(r"[A-Za-z_]\w*")
TOKEN = re.compile(r"[A-Za-z_]\w*|\d+|[^\s\w]+")
_LOG = re.compile(r"(self\.)?_?log(ger)?\.")
_SKIPPED = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Site:
    """A mutation that code allows.

    Attributes:
        file: path from the root of the tree.
        function: qualified name, `Class.method` or `outer.inner`.
        operator: kind of mutation.
        expression: source of the mutated part.
        mutated: source of what stands there instead.
        statement: first line of the statement it is in.
        occurrence: number among the alike of the function.
        line: where the statement starts.
        index: number of the statement in the function.
        node: number of the node in the statement.
        variant: which mutation of this kind.
    """

    file: str
    function: str
    operator: str
    expression: str
    mutated: str
    statement: str
    occurrence: int = 0
    line: int = 0
    index: int = field(default=0, compare=False)
    node: int = field(default=0, compare=False)
    variant: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Mutant:
    """A site with its place in the list.

    Attributes:
        number: in the list.
        area: one of AREAS.
        site: as it is in this tree.
        found: "same", "moved", "alike" or "new".
        was: function and expression in the list, where they differ.
    """

    number: int
    area: str
    site: Site
    found: str = "same"
    was: str = ""

    @property
    def name(self) -> str:
        """Function, operator and text."""
        site = self.site
        return f"{site.function} [{site.operator}] {site.expression} -> {site.mutated}"


# ---- Sites ----------------------------------------------------------------------------------------------------------


def header(node: ast.AST) -> str:
    """Return the source of a node, of a compound statement the first line."""
    return ast.unparse(node).strip().partition("\n")[0]


def own_nodes(statement: ast.stmt) -> list[ast.AST]:
    """Return a statement and its expressions, without the statements in it, annotations and text with fields."""
    nodes: list[ast.AST] = [statement]
    for node in nodes:
        for child in ast.iter_child_nodes(node):
            is_block = isinstance(child, ast.stmt | ast.excepthandler | ast.match_case)
            is_annotation = isinstance(node, ast.AnnAssign) and child is node.annotation
            if not is_block and not is_annotation and not isinstance(child, ast.JoinedStr):
                nodes.append(child)
    return nodes


def blocks(statement: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the lists of statements in a compound statement."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if isinstance(block, list):
            yield block
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body


def statements(block: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a function in order, without those of functions and classes inside."""
    for statement in block:
        yield statement
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for inner in blocks(statement):
                yield from statements(inner)


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield all functions of a module with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif not isinstance(node, ast.expr):
            yield from functions(node, prefix)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _statement_kinds(node: ast.AST) -> list[tuple[str, int]]:
    match node:
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            return [("return", 0)]
        case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())):
            return [] if _LOG.match(header(node).removeprefix("await ")) else [("deletion", 0)]
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return [("deletion", 0)]
        case ast.AnnAssign(target=ast.Attribute(), value=ast.expr()) | ast.Delete():
            return [("deletion", 0)]
        case ast.AugAssign():
            swap = [("arithmetic", 0)] if isinstance(node.op, ast.Add | ast.Sub) and not _is_text(node.value) else []
            return [*swap, ("deletion", 0)]
        case ast.Continue() | ast.Break():
            return [("jump", 0)]
        case ast.If() | ast.While():
            return [("negation", 0)]
    return []


def kinds(node: ast.AST) -> list[tuple[str, int]]:
    """Return the mutations of one node: operator and variant."""
    match node:
        case ast.Compare():
            return [("comparison", at) for at, operator in enumerate(node.ops) if type(operator) in FLIPS]
        case ast.BinOp(op=ast.Add() | ast.Sub()) if not _is_text(node.left) and not _is_text(node.right):
            return [("arithmetic", 0)]
        case ast.Constant(value=int()) if not isinstance(node.value, bool):
            return [("constant", 1), ("constant", -1)]
        case ast.BoolOp():
            return [("boolean", 0)]
        case ast.IfExp():
            return [("negation", 0)]
        case ast.comprehension():
            return [("negation", at) for at in range(len(node.ifs))]
        case ast.Call(func=ast.Name(id="min" | "max")):
            return [("extreme", 0)]
    return _statement_kinds(node)


def _not(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    return ast.UnaryOp(ast.Not(), test)


def _negate(node: Any, variant: int) -> None:
    if isinstance(node, ast.comprehension):
        node.ifs[variant] = _not(node.ifs[variant])
    else:
        node.test = _not(node.test)


def _emptied(value: ast.expr | None) -> ast.expr:
    match value:
        case ast.Constant(value=bool() as truth):
            return ast.Constant(not truth)
        case ast.List() | ast.ListComp() if not (isinstance(value, ast.List) and not value.elts):
            return ast.List([], ast.Load())
        case ast.Dict() | ast.DictComp() if not (isinstance(value, ast.Dict) and not value.keys):
            return ast.Dict([], [])
    return ast.Constant(None)


def change(node: Any, operator: str, variant: int) -> ast.stmt | None:
    """Mutate a node in place, or return the statement that stands in the place of this one."""
    match operator:
        case "comparison":
            node.ops[variant] = FLIPS[type(node.ops[variant])]()
        case "arithmetic":
            node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        case "constant":
            node.value += variant
        case "boolean":
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case "negation":
            _negate(node, variant)
        case "extreme":
            node.func.id = "max" if node.func.id == "min" else "min"
        case "return":
            node.value = _emptied(node.value)
        case "jump":
            return ast.Break() if isinstance(node, ast.Continue) else ast.Continue()
        case "deletion":
            return ast.Pass()
    return None


def mutated(statement: ast.stmt, site: Site) -> ast.stmt:
    """Return a mutated copy of a statement."""
    duplicate = copy.deepcopy(statement)
    instead = change(own_nodes(duplicate)[site.node], site.operator, site.variant)
    return ast.copy_location(instead, statement) if instead is not None else duplicate


def function_sites(file: str, name: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Site]:
    """Yield every mutation of a function."""
    seen: Counter[tuple[str, ...]] = Counter()
    for index, statement in enumerate(statements(function.body)):
        if isinstance(statement, _SKIPPED):
            continue
        for number, node in enumerate(own_nodes(statement)):
            for operator, variant in kinds(node):
                if operator == "deletion" and name.endswith("__init__"):  # the first use fails
                    continue
                duplicate = copy.deepcopy(node)
                instead = change(duplicate, operator, variant)
                before, after = header(node), header(instead if instead is not None else duplicate)
                same = (operator, before, after)
                yield Site(
                    file=file,
                    function=name,
                    operator=operator,
                    expression=before,
                    mutated=after,
                    statement=header(statement),
                    occurrence=seen[same],
                    line=statement.lineno,
                    index=index,
                    node=number,
                    variant=variant,
                )
                seen[same] += 1


@dataclass
class Code:
    """A function of a tree: its sites, and its words for comparisons."""

    file: str
    name: str
    sites: list[Site]
    tokens: list[str]

    @property
    def last(self) -> str:
        """Its name without those of classes."""
        return self.name.rpartition(".")[2]


def words(source: str) -> list[str]:
    """Return the tokens of a source."""
    return TOKEN.findall(source)


def read_functions(file: str, source: str) -> list[Code]:
    """Return the functions of a module that can be mutated."""
    found = []
    for name, node in functions(ast.parse(source)):
        if name.rpartition(".")[2] in {"__repr__", "__str__"}:
            continue
        bare = copy.deepcopy(node)
        if ast.get_docstring(bare) is not None:
            bare.body = bare.body[1:] or [ast.Pass()]
        found.append(Code(file, name, list(function_sites(file, name, node)), words(ast.unparse(bare))))
    return found


def product_files(root: Path, patterns: Sequence[str]) -> list[str]:
    """Return the files that match, sorted."""
    return sorted({str(path.relative_to(root)) for pattern in patterns for path in root.glob(pattern)})


# ---- Choosing -------------------------------------------------------------------------------------------------------


def choose(codes: Sequence[Code], count: int, draw: random.Random, used: Iterable[str] = ()) -> list[Site]:
    """Draw sites: first one of each function, then a second; within a function the operators by their weight.

    Args:
        codes: functions to draw from.
        count: how many.
        draw: random numbers.
        used: functions that have a mutant already, which come last.
    """
    chosen: list[Site] = []
    known = set(used)
    open_codes = sorted((code for code in codes if code.sites), key=lambda code: (code.file, code.name))
    draw.shuffle(open_codes)
    open_codes.sort(
        key=lambda code: f"{code.file}:{code.name}" in known or {each.operator for each in code.sites} == {"return"}
    )
    taken: set[Site] = set()
    while len(chosen) < count and open_codes:
        for code in list(open_codes):
            left = [site for site in code.sites if site not in taken]
            if not left:
                open_codes.remove(code)
            elif len(chosen) < count:
                operators = sorted({site.operator for site in left})
                [operator] = draw.choices(operators, [WEIGHTS[each] for each in operators])
                chosen.append(draw.choice([site for site in left if site.operator == operator]))
                taken.add(chosen[-1])
    return chosen


def choose_all(root: Path, seed: int, count: int) -> list[Mutant]:
    """Choose an equal share of every area."""
    mutants: list[Mutant] = []
    for number, (area, patterns) in enumerate(AREAS.items()):
        share = count // len(AREAS) + (number < count % len(AREAS))
        codes = [code for file in product_files(root, patterns) for code in read_functions(file, _text(root, file))]
        draw = random.Random(f"{seed} {area}")
        sites = sorted(choose(codes, share, draw), key=lambda site: (site.file, site.line, site.expression))
        mutants.extend(Mutant(len(mutants) + at, area, site) for at, site in enumerate(sites))
    return mutants


def _text(root: Path, file: str) -> str:
    return (root / file).read_text()


# ---- Finding mutants again ------------------------------------------------------------------------------------------


class Renames:
    """Old names and new ones.

    Keys are `Name` or `Class.method`, either behind the module that had it (`kvcm.cache.pins:Pins.take`); values
    are the new last name. Functions are renamed by their whole name. In other text a word is replaced where all rules
    for it agree; a private name of a module is replaced in that module alone.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._whole: dict[str, str] = {}
        self._private: defaultdict[str, dict[str, str]] = defaultdict(dict)
        rules: defaultdict[str, set[str]] = defaultdict(set)
        for key, new in names.items():
            module, _, name = key.rpartition(":")
            old, last = name.rpartition(".")[2], new.rpartition(".")[2]
            self._whole[name] = last
            if module and name.startswith("_"):
                self._private[module.replace(".", "/") + ".py"][name] = last
            else:
                rules[old].add(last)
        self._words = {old: min(new) for old, new in rules.items() if len(new) == 1}

    def text(self, source: str, file: str) -> str:
        """Return source with new identifiers."""
        private = self._private.get(file, {})
        return WORD.sub(lambda found: private.get(found[0]) or self._words.get(found[0], found[0]), source)

    def function(self, name: str, file: str) -> str:
        """Return the new qualified name of a function."""
        parts = name.split(".")
        owners = [".".join(parts[: at + 1]) for at in range(len(parts))]
        return ".".join(
            self._whole[owner] if owner in self._whole else self.text(part, file)
            for owner, part in zip(owners, parts, strict=True)
        )

    def site(self, site: Site) -> Site:
        """Return a site with new names."""
        return replace(
            site,
            function=self.function(site.function, site.file),
            expression=self.text(site.expression, site.file),
            mutated=self.text(site.mutated, site.file),
            statement=self.text(site.statement, site.file),
        )


def shape(tokens: Sequence[str]) -> tuple[str, ...]:
    """Return tokens with all names alike, so that code is comparable across renames."""
    return tuple(token if keyword.iskeyword(token) or not WORD.fullmatch(token) else "n" for token in tokens)


@lru_cache(maxsize=200_000)
def _ratio(one: tuple[str, ...], other: tuple[str, ...]) -> float:
    return difflib.SequenceMatcher(None, one, other, autojunk=False).ratio()


def likeness(one: Sequence[str], other: Sequence[str]) -> float:
    """Return how alike two sources are, 0 to 1: half by their words, half by their shape."""
    if tuple(one) == tuple(other):
        return 1.0
    return (_ratio(tuple(one), tuple(other)) + _ratio(shape(one), shape(other))) / 2


def _overlap(one: Counter[str], other: Counter[str]) -> float:
    return (one & other).total() / max(1, max(one.total(), other.total()))


class Finder:
    """Finds mutants of a list in a tree.

    Args:
        root: of the tree.
        commit: where the list was made; of its functions the history has the source.
        renames: names that have changed since.
    """

    def __init__(self, root: Path, commit: str, renames: Renames) -> None:
        self._root, self._commit, self._renames = root, commit, renames
        files = product_files(root, ["kvcm/**/*.py"])
        files = [file for file in files if not file.startswith("kvcm/protocol/")]
        self.codes = [code for file in files for code in read_functions(file, _text(root, file))]
        self._bags = [Counter(code.tokens) for code in self.codes]
        self._old: dict[str, dict[str, Code]] = {}

    def _old_tokens(self, site: Site) -> list[str]:
        """Return the tokens of the function as it was; of its statement where there is no history."""
        if site.file not in self._old:
            shown = subprocess.run(
                ["git", "-C", str(self._root), "show", f"{self._commit}:{site.file}"],
                capture_output=True,
                text=True,
                check=False,
            )
            codes = read_functions(site.file, shown.stdout) if shown.returncode == 0 else []
            self._old[site.file] = {code.name: code for code in codes}
        code = self._old[site.file].get(site.function)
        return words(self._renames.text(" ".join(code.tokens) if code is not None else site.statement, site.file))

    def candidates(self, site: Site) -> list[tuple[float, Site]]:
        """Return sites of this tree that may be the one of the list, with their likeness."""
        wanted, tokens = self._renames.site(site), self._old_tokens(site)
        bag, last = Counter(tokens), wanted.function.rpartition(".")[2]
        rough = [
            (_overlap(bag, other) + (code.name == wanted.function) + 0.3 * (code.last == last), at)
            for at, (code, other) in enumerate(zip(self.codes, self._bags, strict=True))
        ]
        found = []
        for _score, at in sorted(rough, reverse=True)[:8]:
            code = self.codes[at]
            name = 1.0 if code.name == wanted.function else 0.8 if code.last == last else 0.3
            near = 0.4 * name + 0.6 * likeness(tokens, code.tokens)
            sites = [other for other in code.sites if _is_same_change(wanted, other)]
            found.extend((self._score(wanted, other, near), other) for other in sites)
        return found

    @staticmethod
    def _score(wanted: Site, other: Site, near: float) -> float:
        if _identity(wanted) == _identity(other):
            return 2.0
        expression = likeness(words(wanted.expression), words(other.expression))
        statement = likeness(words(wanted.statement), words(other.statement))
        order = 0.02 * (wanted.occurrence == other.occurrence)
        return 0.35 * expression + 0.35 * statement + 0.3 * near + order

    def _exact(self, mutants: Sequence[Mutant]) -> dict[int, Mutant]:
        known = {(site.file, *_identity(site)): site for code in self.codes for site in code.sites}
        found = {mutant.number: known.get((mutant.site.file, *_identity(mutant.site))) for mutant in mutants}
        return {
            mutant.number: replace(mutant, site=site)
            for mutant in mutants
            if (site := found[mutant.number]) is not None
        }

    def find(self, mutants: Sequence[Mutant]) -> dict[int, Mutant]:
        """Return by number the mutants that this tree still has; no two are the same site."""
        found = self._exact(mutants)
        taken = {mutant.site for mutant in found.values()}
        offers = [
            (score, -mutant.number, mutant, site)
            for mutant in mutants
            if mutant.number not in found
            for score, site in self.candidates(mutant.site)
            if score >= SAME
        ]
        for score, _number, mutant, site in sorted(offers, key=lambda offer: offer[:2], reverse=True):
            if mutant.number not in found and site not in taken:
                taken.add(site)
                found[mutant.number] = _moved(mutant, site, score)
        return found


def _is_same_change(wanted: Site, other: Site) -> bool:
    """Return whether two mutations are of one kind and do the same, apart from names."""
    if wanted.operator != other.operator:
        return False
    if wanted.operator in {"return", "deletion", "jump", "negation"}:
        return True
    return _differences(wanted) == _differences(other)


def _identity(site: Site) -> tuple[str | int, ...]:
    return site.function, site.operator, site.expression, site.mutated, site.statement, site.occurrence


def _differences(site: Site) -> tuple[list[str], list[str]]:
    before, after = words(site.expression), words(site.mutated)
    removed = Counter(before) - Counter(after)
    added = Counter(after) - Counter(before)
    return sorted(removed.elements()), sorted(added.elements())


def _moved(mutant: Mutant, site: Site, score: float) -> Mutant:
    old = mutant.site
    if score >= 2.0 or (old.function, old.statement) == (site.function, site.statement):
        return replace(mutant, site=site, found="same" if old.function == site.function else "moved")
    was = f"{old.file}: {old.function}: {old.statement} [{old.expression}]"
    return replace(mutant, site=site, found="moved" if score > 0.95 else "alike", was=f"{was} ({score:.2f})")


def locate(root: Path, document: Mapping[str, Any], renames: Renames) -> list[Mutant]:
    """Return the mutants of a list as they are in a tree, with new ones in the place of those that are gone."""
    mutants = [
        Mutant(number, each["area"], Site(**{name: each[name] for name in Site.__dataclass_fields__ if name in each}))
        for number, each in enumerate(document["mutants"])
    ]
    finder = Finder(root, document["commit"], renames)
    found = finder.find(mutants)
    used = [f"{mutant.site.file}:{mutant.site.function}" for mutant in found.values()]
    for area in AREAS:
        gone = [mutant for mutant in mutants if mutant.area == area and mutant.number not in found]
        files = {mutant.site.file for mutant in found.values() if mutant.area == area}
        files |= set(product_files(root, AREAS[area]))
        codes = [code for code in finder.codes if code.file in files]
        sites = choose(codes, len(gone), random.Random(f"{document['seed']} {area} again"), used)
        for mutant, site in zip(gone, sites, strict=True):
            old = mutant.site
            was = f"{old.file}: {old.function}: {old.statement} [{old.expression}]"
            found[mutant.number] = Mutant(mutant.number, area, site, "new", was)
    return [found[number] for number in sorted(found)]


def save(mutants: Sequence[Mutant], seed: int, commit: str, file: Path) -> None:
    """Write a list of mutants."""
    kept = ("file", "function", "operator", "expression", "mutated", "statement", "occurrence", "line")
    rows = [{"area": each.area, **{name: getattr(each.site, name) for name in kept}} for each in mutants]
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    file.write_text(f'{{\n "seed": {seed},\n "commit": "{commit}",\n "mutants": [\n{lines}\n ]\n}}\n')


# ---- Modules with switches ------------------------------------------------------------------------------------------


class Switch:
    """Says at every mutated statement which mutant is on, and notes which were reached."""

    def __init__(self) -> None:
        self.active: int | None = None
        self.reached: set[int] = set()

    def __call__(self, number: int) -> bool:
        self.reached.add(number)
        return number == self.active


def _switched(statement: ast.stmt, mutants: Sequence[Mutant]) -> ast.stmt:
    result = statement
    for mutant in mutants:
        test = ast.Call(ast.Name("__kvcm_mutant__", ast.Load()), [ast.Constant(mutant.number)], [])
        result = ast.copy_location(ast.If(test, [mutated(statement, mutant.site)], [result]), statement)
    return ast.fix_missing_locations(result)


def _rewrite(block: list[ast.stmt], wanted: Mapping[ast.stmt, list[Mutant]]) -> None:
    for at, statement in enumerate(block):
        for inner in blocks(statement):
            _rewrite(inner, wanted)
        if statement in wanted:
            block[at] = _switched(statement, wanted[statement])


def compiled(root: Path, file: str, mutants: Sequence[Mutant]) -> types.CodeType:
    """Return the code of a module in which each mutant is behind the switch."""
    tree = ast.parse(_text(root, file))
    wanted: defaultdict[ast.stmt, list[Mutant]] = defaultdict(list)
    for name, function in functions(tree):
        own = list(statements(function.body))
        for mutant in mutants:
            if mutant.site.function == name:
                wanted[own[mutant.site.index]].append(mutant)
    assert sum(map(len, wanted.values())) == len(mutants), file
    _rewrite(tree.body, wanted)
    return compile(tree, str(root / file), "exec", dont_inherit=True)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, code: types.CodeType) -> None:
        super().__init__(name, path)
        self._code = code

    def get_code(self, _fullname: str) -> types.CodeType:
        return self._code


class Overlay(importlib.abc.MetaPathFinder):
    """Imports modules with their mutants; the tree stays as it is."""

    def __init__(self, root: Path, mutants: Sequence[Mutant]) -> None:
        by_file: defaultdict[str, list[Mutant]] = defaultdict(list)
        for mutant in mutants:
            by_file[mutant.site.file].append(mutant)
        self._codes = {
            file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): compiled(root, file, some)
            for file, some in by_file.items()
        }

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return the module's spec with a loader of the code that was compiled here."""
        if fullname not in self._codes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None, fullname
        assert spec.origin is not None, fullname
        spec.loader = _Loader(fullname, spec.origin, self._codes[fullname])
        return spec


# ---- Running --------------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """A test without any mutant.

    Attributes:
        cpu_seconds: of this process; servers that it starts do not count.
        outcome: "passed", "failed" or "skipped".
        reached: mutated statements that it executed, by number of the mutant.
    """

    cpu_seconds: float
    outcome: str
    reached: list[int]


def wait_until_idle() -> None:
    """Return when this process gets a fair part of a processor: tests that starve fail without any mutant."""
    while True:
        begin, enough = time.monotonic(), time.process_time() + 0.05
        while time.process_time() < enough:
            pass
        if time.monotonic() - begin < 0.25:
            return
        time.sleep(10.0)


def _waited(process: int, cpu_seconds: float) -> bool:
    """Wait for a process; False when it hangs: it used too much of the processor, or slept for long.

    Time on the wall alone says nothing: on a busy machine a process waits to run.
    """
    used, since = 0.0, time.monotonic()
    while os.waitpid(process, os.WNOHANG)[0] == 0:
        time.sleep(0.02)
        with contextlib.suppress(FileNotFoundError):
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            now = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            if now > used or fields[0] == "R":
                used, since = now, time.monotonic()
            if used > cpu_seconds or time.monotonic() - since > HANG_SECONDS:
                return False
    return True


def in_child(action: Callable[[], Any], log: Path, cpu_seconds: float) -> Any:
    """Return what an action returns in a fork of this process; None when it failed or hung.

    The fork leads a session of its own, has its own directory for temporary files, and all of that goes with it.
    """
    directory = Path(tempfile.mkdtemp(prefix="mutant-"))
    answer = directory / "answer.json"
    process = os.fork()
    if process == 0:
        code = 1
        try:
            os.setsid()
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ["TMPDIR"] = os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.tempdir = str(directory)
            answer.write_text(json.dumps(action()))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    done = _waited(process, cpu_seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    if not done:
        os.waitpid(process, 0)
    result = json.loads(answer.read_text()) if answer.exists() and done else None
    shutil.rmtree(directory, ignore_errors=True)
    return result


class Runner:
    """A plug-in of pytest that runs mutants in forks instead of all tests.

    Args:
        mutants: those to run.
        switch: turns one on.
        options: of the command line.
    """

    def __init__(self, mutants: Sequence[Mutant], switch: Switch, options: argparse.Namespace) -> None:
        self._mutants, self._switch, self._options = mutants, switch, options
        self._failed = self._skipped = False
        self._message = ""
        self._log: Path = options.json.with_suffix(".log")
        self._tests: dict[str, Any] = {}
        self.results: dict[int, dict[str, Any]] = {}
        self.failed: list[str] = []

    def pytest_configure(self) -> None:
        """Have failing examples reported as they are found: a kill needs no smallest one."""
        from hypothesis import Phase, settings

        settings.register_profile(
            "mutants",
            parent=settings.get_profile("repeatable"),
            phases=(Phase.explicit, Phase.generate),
            report_multiple_bugs=False,
        )
        settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record the outcome of a test."""
        if report.failed and not self._failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self._message = str(crash.message if crash is not None else report.longrepr).partition("\n")[0][:200]
        self._failed |= report.failed
        self._skipped |= report.skipped

    def pytest_runtestloop(self, session: Any) -> bool:
        """Measure the tests, then run the mutants."""
        assert not session.testsfailed, "tests cannot be collected"
        self._tests = {item.nodeid: item for item in session.items}
        gc.freeze()
        measured = self._measured()
        progress = self._options.json.with_suffix(".progress")
        done = [json.loads(line) for line in progress.read_text().splitlines()] if progress.exists() else []
        self.results = {row["number"]: row for row in done}
        for mutant in self._mutants:
            if mutant.number not in self.results:
                if self._options.when_idle:
                    wait_until_idle()
                result = {"number": mutant.number, **self._run(mutant, measured)}
                self.results[mutant.number] = result
                with progress.open("a") as file:
                    file.write(json.dumps(result) + "\n")
                print(f"{len(self.results)}: {result['outcome']}, {result['seconds']} s: {mutant.name}", flush=True)
        return True

    def _measured(self) -> dict[str, Measured]:
        """Return the tests as they are without mutants, measured once for each output file."""
        groups: defaultdict[str, list[str]] = defaultdict(list)
        for name in self._tests:
            groups[str(Path(name.partition("::")[0]).parent)].append(name)
        for group, names in groups.items():
            begin = time.monotonic()
            while left := [name for name in names if name not in self._read_measured()]:
                in_child(partial(self._measure, left), self._log, MEASURE_SECONDS)
                still = [name for name in left if name not in self._read_measured()]
                if still:  # it hung or ended the process
                    self._write_measured(still[0], Measured(0.0, "failed", []))
            print(f"{group}: {len(names)} tests, {time.monotonic() - begin:.1f} s", flush=True)
        failed = [name for name, test in self._read_measured().items() if test.outcome == "failed"]
        if failed:  # once more, for those that a busy machine failed
            in_child(partial(self._measure, failed), self._log, MEASURE_SECONDS)
        measured = self._read_measured()
        self.failed = sorted(name for name, test in measured.items() if test.outcome == "failed")
        print(f"{len(self.failed)} tests fail without mutants and are left out", *self.failed, sep="\n  ", flush=True)
        return measured

    def _read_measured(self) -> dict[str, Measured]:
        file = self._options.json.with_suffix(".tests")
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return {name: Measured(*row) for name, *row in rows}

    def _write_measured(self, name: str, test: Measured) -> None:
        with self._options.json.with_suffix(".tests").open("a") as file:
            file.write(json.dumps((name, test.cpu_seconds, test.outcome, test.reached)) + "\n")

    def _measure(self, names: Sequence[str]) -> None:
        for number, (name, following) in enumerate(zip(names, (*names[1:], None), strict=True)):
            if self._options.when_idle and number % 25 == 0:
                wait_until_idle()
            self._switch.reached.clear()
            begin = time.process_time()
            passed = self._passes(name, following)
            cpu_seconds = round(time.process_time() - begin, 4)
            outcome = "failed" if not passed else "skipped" if self._skipped else "passed"
            self._write_measured(name, Measured(cpu_seconds, outcome, sorted(self._switch.reached)))

    def _passes(self, name: str, following: str | None) -> bool:
        self._failed = self._skipped = False
        item = self._tests[name]
        nextitem = self._tests[following] if following is not None else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        return not self._failed

    def _first_failures(self, names: Sequence[str], number: int | None) -> list[str]:
        """Return the first test that fails under a mutant, or under none, and how; nothing when all pass."""
        self._switch.active = number
        for name, following in zip(names, (*names[1:], None), strict=True):
            if not self._passes(name, following):
                with contextlib.suppress(BaseException):
                    self._tests[name].session._setupstate.teardown_exact(None)
                return [name, self._message]
        return []

    def _run(self, mutant: Mutant, measured: Mapping[str, Measured]) -> dict[str, Any]:
        begin = time.monotonic()
        names = self._selected(mutant, measured)
        row: dict[str, Any] = {"tests": len(names), "outcome": "survived" if names else "not reached", "by": None}
        while names:
            most = HANG_SECONDS + 3 * sum(measured[name].cpu_seconds for name in names)
            failed = in_child(partial(self._first_failures, names, mutant.number), self._log, most)
            if failed is None:
                unchanged = in_child(partial(self._first_failures, names, None), self._log, most)
                row |= {"outcome": "unclear" if unchanged is None else "hung"}
                break
            if not failed:
                break
            name, message = failed
            if in_child(partial(self._first_failures, [name], None), self._log, most) == []:
                row |= {"outcome": "killed", "by": name, "message": message}
                break
            names = names[names.index(name) + 1 :]  # it fails without the mutant, too: it says nothing
        return row | {"seconds": round(time.monotonic() - begin, 1)}

    def _needs_servers(self, name: str) -> bool:
        """Return whether a test starts servers, once per fork."""
        fixtures = set(getattr(self._tests[name], "fixturenames", ()))
        return "redis" in name.lower() or not fixtures.isdisjoint({"standalone", "cluster", "sentinel"})

    def _selected(self, mutant: Mutant, measured: Mapping[str, Measured]) -> list[str]:
        """Return the tests to run: the cheapest of each file in turn, those with Redis last, while the budget lasts."""
        by_file: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
        for name, test in measured.items():
            if test.outcome == "passed" and mutant.number in test.reached and name in self._tests:
                by_file[name.partition("::")[0]].append((test.cpu_seconds, name))
        turns = [
            (self._needs_servers(name), turn, seconds, name)
            for tests in by_file.values()
            for turn, (seconds, name) in enumerate(sorted(tests))
        ]
        names: list[str] = []
        left = self._options.seconds
        for _redis, _turn, seconds, name in sorted(turns):
            if len(names) < self._options.tests and (seconds <= left or not names):
                names.append(name)
                left -= seconds
        return sorted(names, key=lambda name: (self._needs_servers(name), measured[name].cpu_seconds))


# ---- Report ---------------------------------------------------------------------------------------------------------


def is_killed(row: Mapping[str, Any]) -> bool:
    """Return whether tests noticed a mutant."""
    return row["outcome"] in {"killed", "hung"}


def shares(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """Return killed and all, by area and in total."""
    counted = {area: [is_killed(row) for row in rows if row["area"] == area] for area in AREAS}
    counted["all"] = [is_killed(row) for row in rows]
    return {area: (sum(each), len(each)) for area, each in counted.items()}


def report(rows: Sequence[dict[str, Any]], before: Sequence[Mapping[str, Any]] | None) -> bool:
    """Print the shares and what survived; return whether none is lower than before."""
    earlier = shares(before) if before is not None else {}
    is_kept = True
    print(f"{'area':<10} {'killed':>7} {'of':>5} {'share':>8} {'before':>8}")
    for area, (killed, count) in shares(rows).items():
        share = killed / max(1, count)
        was = earlier[area][0] / max(1, earlier[area][1]) if area in earlier else None
        if area == "all" and was is not None:
            is_kept = share >= was
        print(f"{area:<10} {killed:>7} {count:>5} {share:>8.1%} {'' if was is None else f'{was:.1%}':>8}")
    print("found:", ", ".join(f"{count} {found}" for found, count in Counter(row["found"] for row in rows).items()))
    if before is not None:
        killers = {row["number"] for row in before if is_killed(row)}
        for row in rows:
            if row["number"] in killers and not is_killed(row):
                print(f"no longer killed: {row['number']} {row['file']}:{row['line']} {row['name']} ({row['found']})")
    for row in rows:
        if not is_killed(row):
            print(f"{row['outcome']}: {row['number']} {row['file']}:{row['line']} {row['name']}")
    return is_kept


def commit_of(root: Path) -> str:
    """Return the commit of a tree."""
    shown = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return shown.stdout.strip() or "unknown"


def options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("build/mutants.json"), help="file to write the outcomes to")
    parser.add_argument("--before", type=Path, help="outcomes of an earlier run to compare with")
    parser.add_argument(
        "--renames", type=Path, nargs="*", default=[], help='JSON objects of names: {"Old": "New", "Old.look": "get"}'
    )
    parser.add_argument("--only", help="only mutants whose file, function or area contains this")
    parser.add_argument("--list", action="store_true", help="show the mutants as they are found in this tree")
    parser.add_argument("--choose", action="store_true", help="choose mutants again and write the list")
    parser.add_argument("--relocate", action="store_true", help="write the list as it is found in this tree")
    parser.add_argument("--mutants", type=Path, default=LIST, help="the list")
    parser.add_argument("--seed", type=int, default=26)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--tests", type=int, default=60, help="most tests for one mutant")
    parser.add_argument("--seconds", type=float, default=8.0, help="most CPU seconds of tests for one mutant")
    parser.add_argument("--when-idle", action="store_true", help="pause while other processes leave too little time")
    parser.add_argument("--root", type=Path, default=HERE.parents[1], help="the tree to try")
    return parser.parse_args()


def run(root: Path, mutants: Sequence[Mutant], chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Run mutants; return the outcome of each."""
    import pytest

    chosen.json = chosen.json.resolve()
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    os.chdir(root)
    sys.path[:] = [str(root), *(path for path in sys.path if Path(path or ".").resolve() != HERE.parent)]
    sys.modules["triton"] = None  # type: ignore[assignment]  # tests/conftest.py imports it where it is installed
    switch = Switch()
    builtins.__kvcm_mutant__ = switch  # type: ignore[attr-defined]
    sys.meta_path.insert(0, Overlay(root, mutants))
    runner = Runner(mutants, switch, chosen)
    folders = [folder for folder in TESTS if (root / folder).is_dir()]
    flags = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "timeout=0"]
    flags += [f"--ignore-glob={pattern}" for pattern in UNRELATED]
    code = pytest.main([*flags, *folders], plugins=[runner])
    assert code == 0, f"pytest ended with {code}"
    return [
        {
            "number": mutant.number,
            "area": mutant.area,
            "found": mutant.found,
            "was": mutant.was,
            "name": mutant.name,
            **{name: value for name, value in asdict(mutant.site).items() if name not in {"index", "node", "variant"}},
            **runner.results[mutant.number],
        }
        for mutant in mutants
    ]


def main() -> int:
    """Choose, show or run mutants; return the exit status."""
    chosen = options()
    root = chosen.root.resolve()
    if chosen.choose:
        save(choose_all(root, chosen.seed, chosen.count), chosen.seed, commit_of(root), chosen.mutants)
        return 0
    document = json.loads(chosen.mutants.read_text())
    renames = Renames({old: new for file in chosen.renames for old, new in json.loads(file.read_text()).items()})
    mutants = locate(root, document, renames)
    if chosen.relocate:
        save(mutants, document["seed"], commit_of(root), chosen.mutants)
    if chosen.only:
        mutants = [each for each in mutants if chosen.only in f"{each.area} {each.site.file} {each.name}"]
    if chosen.list or chosen.relocate:
        for each in mutants:
            print(f"{each.number:>3} {each.area:<9} {each.found:<6} {each.site.file}:{each.site.line} {each.name}")
            if each.was:
                print(f"{'':>20} was {each.was}")
        print(Counter(each.found for each in mutants))
        return 0
    rows = run(root, mutants, chosen)
    before = json.loads(chosen.before.read_text())["mutants"] if chosen.before else None
    document = {"rows": shares(rows), "commit": commit_of(root), "seed": document["seed"], "mutants": rows}
    chosen.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if report(rows, before) else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # without the warnings that some libraries print at exit
