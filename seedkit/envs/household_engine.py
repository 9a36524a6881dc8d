"""ALFWorld's TextWorld engine, the same text byte for byte, an order of magnitude faster.

TextWorld's PDDL environment parses its text grammar and its queries anew on every step, copies contexts deeply
and re-reads every applicable operator from the planner's library. Here parses are remembered, contexts are
passed down instead of copied, and an operator's command is derived once a game. State, transitions, goal and
grammar are TextWorld's and Fast Downward's own; nothing in the library is patched: `FastPddlEnv` is a subclass
that only our environments create. A parity test plays both engines side by side.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fast_downward import Operator, pddl2sas
from textworld import EnvInfos
from textworld import __version__ as textworld_version
from textworld.core import GameState
from textworld.envs.pddl import logic as pddl_logic
from textworld.envs.pddl import textgen
from textworld.envs.pddl.pddl import PddlEnv
from textworld.logic import Proposition, Rule, Signature, Variable

CHECKED_VERSIONS = ("1.7.0",)
_OPERATOR = np.dtype([("id", "i4"), ("name", "S1024"), ("effects", "i4")])
_warned = False


def make_engine(fast: bool = True) -> PddlEnv:
    """A fast engine, or a stock one (with one warning) where this TextWorld was not checked for parity."""
    global _warned
    infos = EnvInfos(won=True, admissible_commands=True)
    if fast and textworld_version in CHECKED_VERSIONS:
        return FastPddlEnv(infos)
    if fast and not _warned:
        _warned = True
        warnings.warn(
            f"textworld {textworld_version} was not checked with the fast engine (checked: "
            f"{', '.join(CHECKED_VERSIONS)}); using the stock engine, which is slower but the same",
            stacklevel=2,
        )
    return NamedPddlEnv(infos)


@contextlib.contextmanager
def _arguments_kept() -> Iterator[None]:
    """Fast Downward's translator overwrites `sys.argv`; give it back to whoever calls us."""
    arguments = sys.argv
    try:
        yield
    finally:
        sys.argv = arguments


def _translate(domain: str, problem: str) -> tuple[Any, str]:
    """Fast Downward's (task, SAS text) of a problem, nothing pruned, as TextWorld asks for it."""
    return pddl2sas(domain, problem, verbose=False)  # type: ignore[return-value]


def _name_entities(infos: dict[str, Any]) -> None:
    """Give entities ALFWorld's readable names ("sinkbasin 1"), by ALFWorld's own rule."""
    from alfworld.agents.utils.misc import Demangler

    demangler = Demangler(game_infos=infos, shuffle=False)
    for info in infos.values():
        info.name = demangler.demangle_alfred_name(info.id)


def _game_data(given: Any) -> dict[str, Any]:
    return given if isinstance(given, dict) else json.loads(Path(given).read_text(encoding="utf-8"))


class NamedPddlEnv(PddlEnv):
    """The stock engine with ALFWorld's entity names, as `alfworld` itself wraps it."""

    def load(self, filename_or_data: Any) -> None:
        """Load a game from a path or its JSON object."""
        with _arguments_kept():
            super().load(_game_data(filename_or_data))
        _name_entities(self._entity_infos)

    def reset(self) -> GameState:
        """Start the loaded game from its initial state."""
        with _arguments_kept():
            return super().reset()


# --- text grammar -------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _symbols(text: str) -> tuple:
    return tuple(textgen._parse_and_convert(text, rule_name="symbols"))


@functools.lru_cache(maxsize=4096)
def _conjunction(text: str) -> Rule:
    return Rule.parse_conjunctive_query(text)


@functools.lru_cache(maxsize=1024)
def _expression(text: str):
    """Compile a grammar expression such as `o.indefinite + ' ' + o.name`; anything beyond that is refused."""
    tree = ast.parse(text.strip(), mode="eval")
    allowed = (
        ast.Expression,
        ast.Attribute,
        ast.Name,
        ast.Load,
        ast.BinOp,
        ast.Add,
        ast.BoolOp,
        ast.Or,
        ast.Constant,
    )
    for node in ast.walk(tree):
        if not isinstance(node, allowed) or (isinstance(node, ast.Attribute) and node.attr.startswith("_")):
            raise ValueError(f"grammar expression {text!r} does more than join names")
    return compile(tree, "<grammar>", "eval")


class _Teller:
    """Derives text from a grammar in one game; contexts are (mapping, variables) pairs and are never copied deep."""

    def __init__(self, grammar: Any, state: FastState, infos: dict[str, Any]) -> None:
        self.rules, self.state, self.infos = grammar._rules, state, infos

    def tell(self, start: str, mapping: dict) -> str:
        variables = {ph.name: self.infos[var.name] for ph, var in mapping.items()}
        return "".join(self._expand(_symbols(start), mapping, variables))

    def _expand(self, symbols: Any, mapping: dict, variables: dict) -> Iterator[str]:
        for symbol in symbols:
            if isinstance(symbol, textgen.TerminalSymbol):
                yield str(symbol)
            elif isinstance(symbol, textgen.NonterminalSymbol):
                yield from self._expand(self._rule(str(symbol), mapping), mapping, variables)
            elif isinstance(symbol, textgen.ListSymbol):
                yield from self._list(symbol.symbol, mapping, variables)
            elif isinstance(symbol, textgen.ConditionalSymbol):
                for inner_mapping, inner in self._matches(symbol, mapping, variables):
                    yield from self._expand((symbol.expression,), inner_mapping, inner)
            else:
                yield str(eval(_expression(symbol.expression), {"__builtins__": {}}, variables))

    def _rule(self, name: str, mapping: dict) -> Any:
        rules = self.rules.get(name)
        if not rules:
            raise textgen.CSGUnknownSymbolError(textgen.NonterminalSymbol(name))
        for rule in rules:
            if not rule.condition or any(True for _ in self.state.matches(_conjunction(rule.condition), mapping)):
                return rule.rhs
        raise IndexError(f"no production of #{name}# applies")

    def _matches(self, symbol: Any, mapping: dict, variables: dict) -> Iterator[tuple[dict, dict]]:
        if not symbol.given:
            yield mapping, variables
            return
        for found in self.state.matches(_conjunction(symbol.given), mapping):
            yield found, variables | {ph.name: self.infos[var.name] for ph, var in found.items()}

    def _list(self, symbol: Any, mapping: dict, variables: dict) -> Iterator[str]:
        items = [
            "".join(self._expand((symbol.expression,), m, v)) for m, v in self._matches(symbol, mapping, variables)
        ]
        if not items:
            yield from self._expand(self._rule("list_empty", mapping), mapping, variables)
            return
        separator, last = "list_separator", "list_last_separator"
        for n, item in enumerate(items):
            if n:
                name = last if n == len(items) - 1 else separator
                yield from self._expand(self._rule(name, mapping), mapping, variables)
            yield item


class FastState:
    """The facts of a running game with TextWorld's query semantics, sorted once per change instead of per query."""

    def __init__(self, facts: dict[Signature, frozenset[Proposition]], types: Any) -> None:
        self._facts: dict[Signature, set[Proposition]] = {s: set(f) for s, f in facts.items()}
        self._types = types
        self._sorted: dict[Signature, list[Proposition]] = {}
        self._expansions: dict[Signature, list[Signature]] = {}

    def change(self, effects: list[Proposition]) -> None:
        """Apply an action's effects, each of which replaces its negation."""
        for prop in effects:
            gone = prop.negate()
            for signature in (prop.signature, gone.signature):
                self._sorted.pop(signature, None)
            self._facts.get(gone.signature, set()).discard(gone)
            self._facts.setdefault(prop.signature, set()).add(prop)

    def _candidates(self, signature: Signature) -> Iterator[Proposition]:
        if signature not in self._expansions:
            kinds = self._types.multi_subtypes([self._types.get(t) for t in signature.types])
            self._expansions[signature] = [Signature(signature.name, [t.name for t in kind]) for kind in kinds]
        for expanded in self._expansions[signature]:
            if expanded not in self._sorted:
                self._sorted[expanded] = sorted(self._facts.get(expanded, ()))
            yield from self._sorted[expanded]

    def matches(self, rule: Rule, mapping: dict, depth: int = 0) -> Iterator[dict]:
        """All extensions of `mapping` under which the rule's predicates hold; distinct names are distinct things."""
        if depth == len(rule.preconditions):
            yield mapping
            return
        predicate = rule.preconditions[depth]
        for prop in self._candidates(predicate.signature):
            extended, used = mapping, None
            for ph, var in zip(predicate.parameters, prop.arguments, strict=True):
                known = extended.get(ph)
                if known is None:
                    used = set(extended.values()) if used is None else used
                    if var in used:
                        break
                    extended = extended | {ph: var}
                    used.add(var)
                elif known != var:
                    break
            else:
                yield from self.matches(rule, extended, depth + 1)


# --- games --------------------------------------------------------------------------------------------------------


_TASK_LINE = re.compile(r'("task"\s*:\s*\[\s*\{\s*"rhs"\s*:\s*)("(?:[^"\\]|\\.)*")')


@functools.lru_cache(maxsize=16)
def _parsed_grammar(text: str) -> tuple[dict, Any]:
    return pddl_logic._parse_and_convert(text, rule_name="pddlStart")


def _game_logic(domain: str, grammar: str) -> pddl_logic.GameLogic:
    """TextWorld's game logic; grammars that differ in the task sentence alone are parsed once."""
    logic = object.__new__(pddl_logic.GameLogic)
    logic.domain, logic.actions, logic.grammar = domain, {}, textgen.ContextSensitiveGrammar()
    logic.types = pddl_logic.textworld.logic.TypeHierarchy()
    found = _TASK_LINE.search(grammar)
    if found is None:
        actions, rules = _parsed_grammar(grammar)
        logic.grammar.update(rules)
    else:
        actions, rules = _parsed_grammar(_TASK_LINE.sub(r'\1"TASK"', grammar, count=1))
        logic.grammar.update(rules)
        sentence = json.loads(found.group(2))
        rule = textgen.ProductionRule(lhs="task", rhs=list(_symbols(sentence)))
        logic.grammar._rules["task"] = [rule, *logic.grammar._rules["task"][1:]]
    logic.actions.update(actions)
    return logic


class _Operation(NamedTuple):
    """A grounded operator of a game; `mapping` fills its placeholders, `effects` counts the facts it changes."""

    number: int
    full: str
    name: str
    mapping: dict
    effects: int


class LoadedGame:
    """Everything about one game that does not change while it is played; shared between engines."""

    def __init__(self, data: dict[str, Any], engine: PddlEnv) -> None:
        self.logic = _game_logic(data["pddl_domain"], data["grammar"])
        lib = engine.downward_lib
        state = object.__new__(pddl_logic.PddlState)
        # PddlState's constructor also translates for its planner, which playing does not need: leave that half out.
        state._facts = pddl_logic.defaultdict(set)
        state._vars_by_name, state._vars_by_type = {}, pddl_logic.defaultdict(set)
        state._var_counts, state._logic = pddl_logic.Counter(), self.logic
        with _arguments_kept():
            task, sas = _translate(self.logic.domain, data["pddl_problem"])
        self.sas = sas.encode("utf-8")
        kinds = {kind.name: kind for kind in reversed(task.types)}  # the domain declares `object` a second time
        for kind in kinds.values():
            self.logic.types.add(pddl_logic.textworld.logic.Type(kind.name, kind.supertype_names))
        self.name2type = {o.name: o.type_name for o in task.objects}
        self.parameters = {a.name: a.parameters for a in task.actions}
        for item in task.init:
            fact = self._initial_fact(item)
            if fact is not None:
                state.add_fact(fact)
        lib.load_sas(self.sas)
        atoms = (pddl_logic.Atom * lib.get_state_size())()
        lib.get_state(atoms)
        self.effects_of: dict[bytes, Proposition] = {}
        for atom in atoms:
            fact = atom.get_fact(self.name2type)
            if not fact.is_negation:
                state.add_fact(fact)
        self.facts = {s: frozenset(f) for s, f in state._facts.items()}
        names = sorted({v.name: v for f in state.facts for v in f.arguments}.values(), key=lambda v: v.name)
        self.infos = {v.name: _describe(v) for v in names}
        _name_entities(self.infos)
        fluents = {e.literal.predicate for a in task.actions for e in a.effects}
        self._fixed = {name: self._is_fixed(a.template, fluents) for name, a in self.logic.actions.items()}
        self.operators: dict[int, _Operation] = {}
        self.commands: dict[int, str] = {}

    def _initial_fact(self, item: Any) -> Proposition | None:
        """A fact of the problem's initial state, by PddlState's own rule; costs and distances are not facts."""
        if hasattr(item, "predicate"):
            if item.predicate == "=":
                return None
            return Proposition(item.predicate, [Variable(a, self.name2type[a]) for a in item.args])
        name = str(item.expression.value)
        if item.fluent.symbol == "total-cost" or name.isdigit():
            return None
        return Proposition(name, [Variable(a, self.name2type[a]) for a in item.fluent.args])

    @staticmethod
    def _is_fixed(template: str, fluents: set[str]) -> bool:
        """Whether a command's text cannot change during a game: its template asks about constant facts only."""

        def predicates(symbol: Any) -> Iterator[str]:
            inner = getattr(symbol, "symbol", None)
            if isinstance(symbol, textgen.NonterminalSymbol):
                yield "*"
            if isinstance(inner, textgen.Symbol):
                yield from predicates(inner)
            if isinstance(symbol, textgen.ConditionalSymbol):
                yield from predicates(symbol.expression)
                if symbol.given:
                    yield from (p.name for p in _conjunction(symbol.given).preconditions)

        asked = {p for symbol in _symbols(template) for p in predicates(symbol)}
        return "*" not in asked and not asked & fluents

    def operator(self, number: int, row: Any) -> _Operation:
        """Remember a grounded operator from the planner's description of it."""
        full = bytes(row["name"]).split(b"\0", 1)[0].decode("cp1252")
        name, *arguments = full.split()
        mapping = {
            pddl_logic.Placeholder(p.name.strip("?"), p.type_name): Variable(a, p.type_name)
            for p, a in zip(self.parameters[name], arguments, strict=False)
        }
        self.operators[number] = _Operation(number, full, name, mapping, int(row["effects"]))
        return self.operators[number]

    def command(self, operator: _Operation, teller: _Teller) -> str:
        """The command that stands for an operator, from ALFWorld's template for its action."""
        if operator.number in self.commands:
            return self.commands[operator.number]
        text = teller.tell(self.logic.actions[operator.name].template, operator.mapping)
        if self._fixed[operator.name]:
            self.commands[operator.number] = text
        return text


def _describe(variable: Variable) -> Any:
    """TextWorld's description of a thing, as its PDDL environment fills it in."""
    from textworld.generator.game import EntityInfo

    info: Any = EntityInfo(variable.name, variable.type)
    info.name, info.definite, info.indefinite = variable.name, "the", "a"
    return info


class FastPddlEnv(PddlEnv):
    """TextWorld's PDDL environment with remembered parses. Fills in feedback, admissible commands, won and done."""

    def load(self, filename_or_data: Any) -> None:
        """Load a game from a path, its JSON object, or a `LoadedGame` that another engine loaded."""
        if isinstance(filename_or_data, LoadedGame):
            self.game = filename_or_data
        else:
            self.game = LoadedGame(_game_data(filename_or_data), self)
        self._room = 0

    def restart(self) -> None:
        """Put the loaded game into its initial state without deriving any text."""
        self.downward_lib.load_sas(self.game.sas)
        self._state = FastState(self.game.facts, self.game.logic.types)
        self._teller = _Teller(self.game.logic.grammar, self._state, self.game.infos)

    def reset(self) -> GameState:
        """Start the loaded game from its initial state."""
        self.restart()
        return self._observe(self._teller.tell("#intro#", {}))

    def step(self, command: str) -> tuple[GameState, int, bool]:
        """Send one command; anything not admissible changes nothing."""
        number = self._numbers.get(command.strip())
        text = "Nothing happens."
        if number is not None:
            self.apply(number)
            operator = self.game.operators[number]
            text = self._teller.tell(self.game.logic.actions[operator.name].feedback_rule, operator.mapping)
        state = self._observe(text)
        return state, state["score"], state["done"]

    def number_of(self, command: str) -> int | None:
        """The operator behind an admissible command of the current state."""
        return self._numbers.get(command.strip())

    def apply(self, number: int) -> None:
        """Carry out an operator without deriving any text."""
        count = self.game.operators[number].effects
        effects = (pddl_logic.Atom * count)()
        self.downward_lib.apply_operator(number, effects)
        known = self.game.effects_of
        props = []
        for atom in effects:
            raw = atom._name
            if raw not in known:
                known[raw] = atom.get_fact(self.game.name2type)
            props.append(known[raw])
        self._state.change(props)

    def look_around(self) -> None:
        """Find out which commands are admissible after operators were applied."""
        self._observe("")

    def _observe(self, text: str) -> GameState:
        count = self.downward_lib.get_applicable_operators_count()
        if count > self._room:
            self._room = 2 * count
            self._buffer = (Operator * self._room)()
            self._rows = np.frombuffer(self._buffer, dtype=_OPERATOR)
        self.downward_lib.get_applicable_operators(self._buffer)
        numbers: dict[str, int] = {}
        seen: set[str] = set()
        for row, number in enumerate(self._rows["id"][:count].tolist()):
            operator = self.game.operators.get(number) or self.game.operator(number, self._rows[row])
            if operator.full in seen:
                continue
            seen.add(operator.full)
            numbers.setdefault(self.game.command(operator, self._teller), number)
        self._numbers = numbers
        state = GameState()
        won = self.downward_lib.check_goal()
        state["feedback"], state["won"], state["lost"] = text, won, False
        state["admissible_commands"] = sorted(numbers)
        state["score"], state["done"] = int(won), won
        self.state = state
        return state
