"""A bound on the cost of rendering a chat template: templates come with models, and may be from anyone.

Jinja's sandbox keeps a template from reaching out, not from looping for ever or filling the memory. Here a render has a
budget of work and of time. Every iteration of a loop, call, filter and piece of output spends from it, a text by its
length and a container by its contents, and operations that can make much out of little (``*``, ``replace``, ``join``, a
width in a format) are charged before they run. So no single step is long, memory is bounded by the work, and time is
checked between steps. Features that few templates need and that can be costly in other ways are disabled.

Example: ``{% set x = [x, x] %}`` thirty times makes a value that takes no memory, but a gigabyte once it is shown. Each
new list is charged for everything in it, nested lists once per occurrence, so the twentieth is refused.
"""

from __future__ import annotations

import re
import time
import types
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import jinja2
import jinja2.compiler
import jinja2.nodes
import jinja2.sandbox
from jinja2.runtime import Context

#: The work of one step, of a value within a container, of one character; one step takes about a microsecond.
STEP: Final = 16
_VALUE: Final = 4
#: Additional work allowed to a render per input character.
WORK_PER_CHARACTER: Final = 16
MAX_SOURCE_CHARACTERS: Final = 1 << 20
MAX_DEPTH: Final = 100
_MAX_INDENT: Final = 16
_MAX_INTEGER_BITS: Final = 4096
#: A width, a precision or a nested field in a format.
_COSTLY_FORMAT = re.compile(r"\d{4,}|\*|\{[^{}]*\{")
_LEFT_OUT: Final = ("batch", "center", "pprint", "slice", "striptags", "urlize", "wordwrap", "xmlattr")
_REFUSED_METHODS: Final = frozenset(("translate", "maketrans", "to_bytes", "striptags"))
#: Filters that examine a container, but not its contents.
_SHALLOW: Final = frozenset(
    """
    attr count d default first items last length list map random reject rejectattr reverse select selectattr
    """.split()  # noqa: SIM905
)


class WorkExceeded(jinja2.TemplateError):
    """The template would exceed its budget of work."""


@dataclass(frozen=True)
class Allowance:
    """Budget of a render: work in addition to that for its characters, and seconds."""

    work: int
    seconds: float


#: Upper limit of any render.
MOST: Final = Allowance(32 << 20, 5.0)
#: Limit in the event loop; a render exceeding it is restarted in a thread.
INLINE: Final = Allowance(1 << 19, 0.05)


class Work:
    """Remaining work of one render of texts of ``num_characters``."""

    def __init__(self, allowance: Allowance, num_characters: int) -> None:
        self._left = allowance.work + WORK_PER_CHARACTER * num_characters
        self._seconds = allowance.seconds
        self._until_s = time.monotonic() + allowance.seconds

    def spend(self, amount: int) -> None:
        """Spend ``amount``. Raises WorkExceeded if less is left, or no time."""
        self._left -= amount
        if self._left < 0:
            raise WorkExceeded("it exceeds its limit of work")
        if time.monotonic() > self._until_s:
            raise WorkExceeded(f"it takes more than {self._seconds:g} s")

    def spend_on(self, value: Any, texts: bool = True, indent: int = 0) -> None:
        """Spend the cost of traversing ``value``; without ``texts``, only that of the containers."""
        self._walk(value, texts, indent, 0)

    def _walk(self, value: Any, texts: bool, indent: int, depth: int) -> None:
        if isinstance(value, str | bytes):
            self.spend(len(value) if texts else 0)
        elif isinstance(value, Mapping | list | tuple | set | frozenset):
            if depth > MAX_DEPTH:
                raise WorkExceeded("it nests values too deeply")
            self.spend((_VALUE + indent * depth) * (1 + len(value)))
            for each in value:
                self._walk(each, texts, indent, depth + 1)
                if isinstance(value, Mapping):
                    self._walk(value[each], texts, indent, depth + 1)
        elif texts and isinstance(value, jinja2.utils.Namespace):
            raise WorkExceeded("it outputs a namespace")


_work: ContextVar[Work] = ContextVar("work")


def bounded(work: Work, render: Callable[[], str]) -> str:
    """Return the result of ``render``, limited to ``work``."""
    token = _work.set(work)
    try:
        return render()
    finally:
        _work.reset(token)


def size_of(value: Any) -> int:
    """Return the number of characters of all texts in ``value``, as parsed from JSON."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list | tuple):
        return sum(map(size_of, value))
    if isinstance(value, Mapping):
        return sum(map(size_of, value)) + sum(map(size_of, value.values()))
    return 0


def is_within(value: Any, most: int) -> bool:
    """Return whether ``value`` has at most ``most`` characters and values in total; examines no more than that."""
    left, waiting = most, [value]
    while waiting:
        each = waiting.pop()
        left -= 1 + (len(each) if isinstance(each, str | list | tuple | Mapping) else 0)
        if left < 0:
            return False
        if isinstance(each, Mapping):
            waiting += [*each, *each.values()]
        elif isinstance(each, list | tuple):
            waiting += each
    return True


@jinja2.pass_context
def _shown(_: Context, value: Any) -> Any:
    """Spend the work of a piece of output."""
    work = _work.get()
    work.spend(STEP)
    work.spend_on(value)
    return value


@jinja2.pass_context
def _turn(_: Context, value: Any) -> Any:
    """Spend the work of visiting one element of a loop."""
    _work.get().spend(STEP)
    return value


class _Compiler(jinja2.compiler.CodeGenerator):
    """Charges for values that compiled code creates without calling the environment."""

    def visit_Output(self, node: jinja2.nodes.Output, frame: jinja2.compiler.Frame) -> None:
        fixed = sum(len(part.data) for part in node.nodes if isinstance(part, jinja2.nodes.TemplateData))
        self.writeline(f"environment.spend({STEP + fixed})")
        if node.nodes:
            super().visit_Output(node, frame)

    def _made(self, visit: Callable[[Any, Any], None], node: Any, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.made(")
        visit(node, frame)
        self.write(")")

    def visit_List(self, node: jinja2.nodes.List, frame: jinja2.compiler.Frame) -> None:
        self._made(super().visit_List, node, frame)

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: jinja2.compiler.Frame) -> None:
        self._made(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: jinja2.nodes.Tuple, frame: jinja2.compiler.Frame) -> None:
        if node.ctx == "load":
            self._made(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: jinja2.compiler.Frame) -> None:
        if isinstance(node.arg, jinja2.nodes.Slice):
            self._made(super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the bounds of this module; renders only within `bounded`."""

    code_generator_class = _Compiler
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        # Unoptimised: otherwise constants would be computed during compilation, without a bound.
        super().__init__(optimized=False, finalize=_shown, **options)
        del self.globals["lipsum"]
        for name in _LEFT_OUT:
            del self.filters[name]
        self.set_filters(dict(self.filters))
        self.filters["_turn"] = _turn

    def set_filters(self, filters: Mapping[str, Callable[..., Any]]) -> None:
        """Install ``filters``, each wrapped to spend its work."""
        for name, function in filters.items():
            self.filters[name] = _with_work(name, function)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(jinja2.nodes.For):
            loop.body.insert(0, jinja2.nodes.Output([], lineno=loop.lineno))
            if loop.test is not None:
                true = jinja2.nodes.Const(True, lineno=loop.lineno)
                turn = jinja2.nodes.Filter(true, "_turn", [], [], None, None, lineno=loop.lineno)
                loop.test = jinja2.nodes.And(turn, loop.test, lineno=loop.lineno)
        tree.set_environment(self)
        return tree

    # Compiled templates call these.

    def spend(self, amount: int) -> None:
        _work.get().spend(amount)

    def made(self, value: Any) -> Any:
        """Spend the cost of a new value's contents."""
        if isinstance(value, str):
            _work.get().spend(len(value))
        elif isinstance(value, list | tuple | dict):
            _work.get().spend_on(value, texts=False)
        return value

    def joined(self, parts: tuple[Any, ...]) -> str:
        """The operator ``~``."""
        for part in parts:
            _work.get().spend_on(part)
        return "".join(map(str, parts))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        work = _work.get()
        work.spend(STEP)
        if operator == "%" and isinstance(left, str | bytes):
            _spend_on_format(work, left, right)
        elif operator == "+":
            work.spend(_length(left) + _length(right))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_INTEGER_BITS:
                raise WorkExceeded("it computes with too large numbers")
        elif operator == "*":
            count = left if isinstance(left, int) else right if isinstance(right, int) else 0
            work.spend(max(count, 0) * max(_length(left), _length(right)))
        return self.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        work = _work.get()
        work.spend(STEP)
        if isinstance(__obj, types.BuiltinMethodType | types.MethodType):
            args = _prepared_for(work, __obj, args, kwargs)
        elif isinstance(wrapped := getattr(__obj, "__wrapped__", None), types.BuiltinMethodType):
            _spend_on_format(work, wrapped.__self__, (args, kwargs))
        elif __obj is dict or __obj is __self.globals.get("strftime_now"):
            work.spend_on((args, kwargs))
        return __self.made(super().call(__context, __obj, *args, **kwargs))


def _length(value: Any) -> int:
    return (
        len(value) if isinstance(value, str | bytes) else _VALUE * len(value) if isinstance(value, list | tuple) else 1
    )


def _spend_on_format(work: Work, text: Any, arguments: Any) -> None:
    """Spend the cost of formatting: each field may show all of ``arguments``."""
    if isinstance(text, bytes) or _COSTLY_FORMAT.search(text):
        raise WorkExceeded("it formats with too large a width")
    for _ in range(1 + text.count("{") + text.count("%")):
        work.spend_on(arguments)
        work.spend(STEP)
    work.spend(len(text) + 1000 * text.count("%") + 1000 * text.count("{"))


def _prepared_for(work: Work, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a text's method, after spending its work; the counted values can no longer change."""
    owner, name = method.__self__, method.__name__
    if name in _REFUSED_METHODS:
        raise WorkExceeded(f"it calls {name}")
    if not isinstance(owner, str | bytes):
        return args
    work.spend(len(owner))
    if name == "replace" and len(args) >= 2:
        _spend_on_replace(work, owner, args[0], args[1])
    elif name == "join" and args:
        args = (_listed(args[0]), *args[1:])
        work.spend_on(args[0])
        work.spend(len(owner) * _length(args[0]))
    elif name == "expandtabs":
        size = next(iter((*args, *kwargs.values())), 8)
        work.spend(len(owner) * size if isinstance(size, int) else 0)
    else:
        work.spend(max((each for each in (*args, *kwargs.values()) if isinstance(each, int)), default=0))
    return args


def _spend_on_replace(work: Work, text: Any, old: Any, new: Any) -> None:
    count = len(text) + 1
    if isinstance(text, str) and isinstance(old, str) and old:
        count = text.count(old)
    work.spend(count * len(new) if isinstance(new, str | bytes) else 0)


def _listed(value: Any) -> Any:
    """Return ``value``, or its items if it is an iterator."""
    return list(value) if isinstance(value, types.GeneratorType | map | filter | range | reversed) else value


def _with_work(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` as a filter that spends its work: on its arguments before, and on its result afterwards."""
    passed = getattr(function, "jinja_pass_arg", None)
    first = 1 if passed is not None else 0

    def bounded_filter(*args: Any, **kwargs: Any) -> Any:
        work = _work.get()
        work.spend(STEP)
        given = list(args[first:])
        if name in _SHALLOW:
            work.spend(sum(map(_length, given)))
        else:
            given = [_listed(each) for each in given]
            for each in (*given, *kwargs.values()):
                work.spend_on(each)
            _spend_on_filter(work, name, given, kwargs)
        result = function(*args[:first], *given, **kwargs)
        if isinstance(result, str):
            work.spend(len(result))
        elif isinstance(result, list | tuple | dict):
            work.spend_on(result, texts=False)
        return result

    if passed is not None:
        bounded_filter.jinja_pass_arg = passed  # type: ignore[attr-defined]
    return bounded_filter


def _spend_on_filter(work: Work, name: str, given: list[Any], kwargs: Mapping[str, Any]) -> None:
    """Spend the cost of a filter that can make much out of little."""
    if name == "replace" and len(given) >= 3:
        _spend_on_replace(work, str(given[0]), str(given[1]), str(given[2]))
    elif name == "join":
        separator = given[1] if len(given) > 1 else kwargs.get("d", "")
        work.spend(_length(separator) * _length(given[0]))
    elif name == "format":
        _spend_on_format(work, str(given[0]), (given[1:], dict(kwargs)))
    elif name in ("indent", "tojson"):
        widths = [each for each in (*given[1:], *kwargs.values()) if isinstance(each, int | str)]
        width = max((each if isinstance(each, int) else len(each) for each in widths), default=0)
        if width > _MAX_INDENT and name == "tojson":
            raise WorkExceeded("it indents too far")
        work.spend(width * (str(given[0]).count("\n") + 1) if name == "indent" else 0)
        work.spend_on(given[0], indent=width)
    elif name == "sum" and not all(isinstance(each, int | float) for each in (*given[2:], kwargs.get("start", 0))):
        raise WorkExceeded("it sums values that are not numbers")
