"""Arithmetic expressions of an operation's parameters, as `tokens * top_k` or `ceil(context / 16)`.

Numbers are exact until the end: `/` gives fractions.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache

from flexq_bench.workloads.errors import WorkloadError

Value = int | str
Number = int | float | Fraction
Size = Callable[[int, int], int]  # rows, columns -> bytes of a packed matrix

MAX_LENGTH = 500  # characters
_MAX_DEPTH = 50
_MAX_RESULT = 1 << 63
_ROUND: Mapping[str, Callable[[Number], int]] = {"ceil": math.ceil, "floor": math.floor}
FUNCTIONS = (*_ROUND, "min", "max")
_FORMS = "write numbers, parameters, + - * / // % **, comparisons, x if c else y, ceil, min, max"


def evaluate(
    text: str, values: Mapping[str, Value], sizes: Mapping[str, Size] | None = None
) -> int | float:
    """Return the value of an expression; whole numbers are integers.

    sizes: functions of rows and columns that it may call, besides those of FUNCTIONS.
    Raises WorkloadError if it has another form or unknown names, or is no number below 2^63.
    """
    try:
        result = _Evaluation(values, sizes or {}).of(_parsed(text))
        if isinstance(result, str):
            raise WorkloadError("it is a word, not a number")
        if not -_MAX_RESULT < result < _MAX_RESULT:
            raise WorkloadError("it is not below 2^63")
    except (WorkloadError, ArithmeticError, TypeError, ValueError) as error:
        raise WorkloadError(f"expression {text[:60]!r}: {error}") from None
    if isinstance(result, float):
        return result
    return int(result) if Fraction(result).denominator == 1 else float(result)


def names_of(text: str) -> frozenset[str]:
    """Return the names in an expression, those of called functions included.

    Raises WorkloadError if it is none.
    """
    return frozenset(node.id for node in ast.walk(_parsed(text)) if isinstance(node, ast.Name))


@lru_cache(maxsize=4096)
def _parsed(text: str) -> ast.expr:
    if len(text) > MAX_LENGTH:
        raise WorkloadError(f"an expression has at most {MAX_LENGTH} characters, got {len(text)}")
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise WorkloadError(f"{text[:60]!r} is no expression: {_FORMS}") from None
    if _is_deeper(parsed, _MAX_DEPTH):
        raise WorkloadError(f"{text[:60]!r} is nested more than {_MAX_DEPTH} deep")
    return parsed


def _is_deeper(node: ast.AST, limit: int) -> bool:
    return limit == 0 or any(_is_deeper(inner, limit - 1) for inner in ast.iter_child_nodes(node))


class _Evaluation:
    """Values of the nodes of one expression."""

    def __init__(self, values: Mapping[str, Value], sizes: Mapping[str, Size]) -> None:
        self._values, self._sizes = values, sizes

    def of(self, node: ast.expr) -> Number | str:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str):
            if isinstance(node.value, float):
                return Fraction(node.value)
            if not isinstance(node.value, bool):
                return node.value
        if isinstance(node, ast.Name):
            if node.id not in self._values:
                known = ", ".join(self._values) or "none"
                raise WorkloadError(f"no parameter {node.id!r}: there are {known}")
            return self._values[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._number(node.operand)
        if isinstance(node, ast.BinOp):
            return _combined(node.op, self._number(node.left), self._number(node.right))
        if isinstance(node, ast.IfExp):
            return self.of(node.body if self._holds(node.test) else node.orelse)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            return self._called(node.func.id, [self._number(item) for item in node.args])
        raise WorkloadError(f"{ast.unparse(node)!r} can't be evaluated: {_FORMS}")

    def _number(self, node: ast.expr) -> Number:
        value = self.of(node)
        if isinstance(value, str):
            raise WorkloadError(f"{value!r} is no number")
        return value

    def _holds(self, node: ast.expr) -> bool:
        if isinstance(node, ast.BoolOp):
            parts = map(self._holds, node.values)
            return all(parts) if isinstance(node.op, ast.And) else any(parts)
        if not (isinstance(node, ast.Compare) and len(node.ops) == 1):
            raise WorkloadError(f"{ast.unparse(node)!r} is no condition: write a == b, a < b")
        left, right = self.of(node.left), self.of(node.comparators[0])
        equal = left == right
        if isinstance(left, str) != isinstance(right, str):
            raise WorkloadError(f"{ast.unparse(node)!r} compares a word with a number")
        below = left < right  # type: ignore[operator]  # of one type, as checked
        results = {
            ast.Eq: equal,
            ast.NotEq: not equal,
            ast.Lt: below,
            ast.LtE: below or equal,
            ast.Gt: not (below or equal),
            ast.GtE: not below,
        }
        if type(node.ops[0]) not in results:
            raise WorkloadError(f"{ast.unparse(node)!r} is no condition: write a == b, a < b")
        return results[type(node.ops[0])]

    def _called(self, name: str, arguments: list[Number]) -> Number:
        if name in ("min", "max") and len(arguments) >= 2:
            return min(arguments) if name == "min" else max(arguments)
        if name in _ROUND and len(arguments) == 1:
            return _ROUND[name](arguments[0])
        if name in self._sizes and len(arguments) == 2:
            rows, columns = (math.ceil(number) for number in arguments)
            return self._sizes[name](rows, columns)
        known = ", ".join((*FUNCTIONS, *self._sizes))
        raise WorkloadError(f"no function {name!r} of {len(arguments)} numbers: there are {known}")


def _combined(operator: ast.operator, left: Number, right: Number) -> Number:
    if isinstance(operator, ast.Add):
        return left + right
    if isinstance(operator, ast.Sub):
        return left - right
    if isinstance(operator, ast.Mult):
        return left * right
    if isinstance(operator, ast.FloorDiv):
        return left // right
    if isinstance(operator, ast.Mod):
        return left % right
    if isinstance(operator, ast.Div):
        exact = not (isinstance(left, float) or isinstance(right, float))
        return Fraction(left) / Fraction(right) if exact else left / right
    if isinstance(operator, ast.Pow):
        return math.pow(left, right)  # exact powers of fractions may be huge
    raise WorkloadError(_FORMS)
