"""A pickle machine that cannot run anything: it has no import and no call.

It interprets the opcodes of protocols 0 to 5 over plain containers. What a pickle would call is looked up in a table
that the reader brings (`Rebuild`: tensors, numpy arrays, dates, ...); everything else becomes an `Opaque` record. The
machine never recurses, never allocates by a size that the file merely claims, and its memo is a dict: a hostile file
costs time and memory in proportion to its own length.

Opcodes: CPython's Lib/pickletools.py. A global that a pickle names is kept with its spelling, so a reader can tell what
the file would have done.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import CorruptError
from .records import Attributed, Opaque
from .repeats import FEW, Items, Note

# What rebuilds a value of a known class from the arguments that the pickle gives it; raising means "make it Opaque".
Rebuild = Mapping[tuple[str, str], Any]


_DAMAGE = (
    IndexError, KeyError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError, MemoryError,
    struct.error,
)  # fmt: skip


class Pickle:
    """One pickle, read: ``value``, the ``globals`` it names (name -> whether it would be called), where it ``end``s.

    ``known``: items of the dicts that other pickles were, which are taken over where the same bytes stand here, too.
    """

    __slots__ = ("_known", "end", "globals", "value")

    def __init__(
        self,
        data: bytes | memoryview,
        where: str,
        rebuild: Rebuild,
        persistent: Callable[[Any], Any],
        start: int = 0,
        known: Items | None = None,
    ) -> None:
        self.globals: dict[tuple[str, str], bool] = {}
        self._known = known
        self.end = start
        try:
            self.value = self._run(bytes(data), rebuild, persistent, start)
        except CorruptError as e:
            raise CorruptError(f"{where}: {e}") from None
        except _DAMAGE as e:
            raise CorruptError(
                f"{where}: not a valid pickle near byte {self.end:,} ({type(e).__name__}: {e}). "
                "The file is damaged, or it is no torch file: copy it again from its source."
            ) from None

    def _run(self, data: bytes, rebuild: Rebuild, persistent: Callable[[Any], Any], i: int) -> Any:
        # One long loop, the most frequent opcodes of torch files first: it runs some forty times per tensor.
        stack: list[Any] = []
        marks: list[list[Any]] = []
        memo: dict[int, Any] = {}
        named: dict[tuple[str, str], Any] = {}
        push = stack.append
        int_from = int.from_bytes
        size = len(data)
        known = self._known
        notes: list[Note] = []  # where the items of the outermost dict may begin

        def find(module: str, name: str) -> Any:
            key = (module, name)
            value = named.get(key, memo)
            if value is memo:
                value = named[key] = rebuild[key] if key in rebuild else Opaque(module, name)
                self.globals.setdefault(key, False)
            return value

        while True:
            self.end = i
            op = data[i]
            i += 1
            if op == 0x71:  # BINPUT
                memo[data[i]] = stack[-1]
                i += 1
            elif op == 0x72:  # LONG_BINPUT
                memo[int_from(data[i : i + 4], "little")] = stack[-1]
                i += 4
            elif op == 0x68:  # BINGET
                push(memo[data[i]])
                i += 1
            elif op == 0x4B:  # BININT1
                push(data[i])
                i += 1
            elif op == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif op == 0x58:  # BINUNICODE
                if known is not None and len(marks) == 1 and len(stack) < FEW and len(notes) < FEW:
                    item = known.find(data, i - 1, memo) if not len(stack) % 2 else None
                    if item is not None:
                        notes.append(Note.of(i - 1, stack, len(memo)))
                        stack += item.values
                        memo.update(item.memo)
                        self.globals |= item.globals
                        i += len(item.data) - 1
                        continue
                    notes.append(Note.of(i - 1, stack, len(memo)))
                n = int_from(data[i : i + 4], "little")
                i += 4
                push(_exactly(data, i, n).decode("utf-8", "surrogatepass"))
                i += n
            elif op == 0x8C:  # SHORT_BINUNICODE
                n = data[i]
                i += 1
                push(_exactly(data, i, n).decode("utf-8", "surrogatepass"))
                i += n
            elif op == 0x28:  # MARK
                marks.append(stack)
                stack = []
                push = stack.append
            elif op == 0x74:  # TUPLE
                value = tuple(stack)
                stack = marks.pop()
                push = stack.append
                push(value)
            elif op == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif op == 0x86:  # TUPLE2
                stack[-2:] = [(stack[-2], stack[-1])]
            elif op == 0x87:  # TUPLE3
                stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
            elif op == 0x29:  # EMPTY_TUPLE
                push(())
            elif op == 0x52:  # REDUCE
                args = stack.pop()
                stack[-1] = self._made(rebuild, stack[-1], args)
            elif op == 0x51:  # BINPERSID
                stack[-1] = persistent(stack[-1])
            elif op == 0x4D:  # BININT2
                push(data[i] | data[i + 1] << 8)
                i += 2
            elif op == 0x4A:  # BININT
                push(int_from(_exactly(data, i, 4), "little", signed=True))
                i += 4
            elif op == 0x89:  # NEWFALSE
                push(False)
            elif op == 0x88:  # NEWTRUE
                push(True)
            elif op == 0x6A:  # LONG_BINGET
                push(memo[int_from(data[i : i + 4], "little")])
                i += 4
            elif op == 0x4E:  # NONE
                push(None)
            elif op == 0x47:  # BINFLOAT
                push(struct.unpack(">d", data[i : i + 8])[0])
                i += 8
            elif op == 0x7D:  # EMPTY_DICT
                push({})
            elif op == 0x5D:  # EMPTY_LIST
                push([])
            elif op == 0x75 or op == 0x73:  # SETITEMS, SETITEM
                if op == 0x75:
                    items = stack
                    stack = marks.pop()
                    push = stack.append
                else:
                    items = stack[-2:]
                    del stack[-2:]
                if len(items) % 2:
                    raise CorruptError("a key without a value")
                if known is not None and len(marks) == 0 and op == 0x75:
                    known.learn(data, [*notes, Note.of(i - 1, items, len(memo))], memo, self.globals)
                    notes = []
                _set_items(stack[-1], items)
            elif op == 0x65:  # APPENDS
                items = stack
                stack = marks.pop()
                push = stack.append
                _extend(stack[-1], items)
            elif op == 0x61:  # APPEND
                value = stack.pop()
                _extend(stack[-1], [value])
            elif op == 0x63:  # GLOBAL
                j = data.index(b"\n", i)
                k = data.index(b"\n", j + 1)
                push(find(data[i:j].decode(), data[j + 1 : k].decode()))
                i = k + 1
            elif op == 0x93:  # STACK_GLOBAL
                name = stack.pop()
                module = stack[-1]
                if type(name) is not str or type(module) is not str:
                    raise CorruptError("a global whose name is no text")
                stack[-1] = find(module, name)
            elif op == 0x62:  # BUILD
                state = stack.pop()
                _build(stack[-1], state)
            elif op == 0x80:  # PROTO
                if data[i] > 5:
                    raise CorruptError(f"pickle protocol {data[i]} is not known (0 to 5 are)")
                i += 1
            elif op == 0x95:  # FRAME
                if i + 8 + int_from(data[i : i + 8], "little") > size:
                    raise CorruptError("a frame is longer than the pickle: truncated?")
                i += 8
            elif op == 0x2E:  # STOP
                self.end = i
                return stack.pop()
            elif op == 0x81:  # NEWOBJ
                args = stack.pop()
                stack[-1] = self._made(rebuild, stack[-1], args)
            elif op == 0x92:  # NEWOBJ_EX
                kwargs = stack.pop()
                args = stack.pop()
                stack[-1] = self._made(rebuild, stack[-1], args, kwargs)
            elif op == 0x8A or op == 0x8B:  # LONG1, LONG4
                width = 1 if op == 0x8A else 4
                n = int_from(_exactly(data, i, width), "little")
                i += width
                push(int_from(_exactly(data, i, n), "little", signed=True))
                i += n
            elif op in _COUNTED:
                width, kind = _COUNTED[op]
                n = int_from(_exactly(data, i, width), "little")
                i += width
                raw = _exactly(data, i, n)
                i += n
                push(_COUNTED_VALUE[kind](raw))
            elif op in _LINES:
                j = data.index(b"\n", i)
                line = data[i:j]
                i = j + 1
                if op == 0x70:  # PUT
                    memo[int(line)] = stack[-1]
                elif op == 0x67:  # GET
                    push(memo[int(line)])
                elif op == 0x50:  # PERSID
                    push(persistent(line.decode("ascii")))
                else:
                    push(_LINES[op](line))
            elif op == 0x8F:  # EMPTY_SET
                push(set())
            elif op == 0x90 or op == 0x91:  # ADDITEMS, FROZENSET
                items = stack
                stack = marks.pop()
                push = stack.append
                for item in items:
                    check_key(item)
                if op == 0x91:
                    push(frozenset(items))
                elif isinstance(stack[-1], set):
                    stack[-1].update(items)
                else:
                    _extend(stack[-1], items)
            elif op == 0x6C or op == 0x64:  # LIST, DICT
                items = stack
                stack = marks.pop()
                push = stack.append
                if op == 0x6C:
                    push(items)
                else:
                    made: dict[Any, Any] = {}
                    _set_items(made, items)
                    push(made)
            elif op == 0x30:  # POP
                if stack:
                    stack.pop()
                else:
                    stack = marks.pop()
                    push = stack.append
            elif op == 0x31:  # POP_MARK
                stack = marks.pop()
                push = stack.append
            elif op == 0x32:  # DUP
                push(stack[-1])
            elif op == 0x69:  # INST
                j = data.index(b"\n", i)
                k = data.index(b"\n", j + 1)
                args = tuple(stack)
                stack = marks.pop()
                push = stack.append
                push(self._made(rebuild, find(data[i:j].decode(), data[j + 1 : k].decode()), args))
                i = k + 1
            elif op == 0x6F:  # OBJ
                cls, *rest = stack
                stack = marks.pop()
                push = stack.append
                push(self._made(rebuild, cls, tuple(rest)))
            elif op in (0x82, 0x83, 0x84):  # EXT1, EXT2, EXT4: numbers from a registry that no checkpoint may rely on
                width = {0x82: 1, 0x83: 2, 0x84: 4}[op]
                push(Opaque("copyreg", f"extension {int_from(_exactly(data, i, width), 'little')}"))
                i += width
            elif op == 0x97:  # NEXT_BUFFER
                raise CorruptError("it refers to out-of-band buffers, which no file holds")
            elif op == 0x98:  # READONLY_BUFFER
                pass
            else:
                raise CorruptError(f"unknown pickle opcode 0x{op:02x} at byte {i - 1:,} of {size:,}")

    def _made(self, rebuild: Rebuild, what: Any, args: Any, kwargs: Any = None) -> Any:
        """What a call would have made: by our own table, or a record of it."""
        if not isinstance(args, tuple):
            raise CorruptError("arguments that are no tuple")
        if isinstance(what, Opaque):
            if what.args is None:
                self.globals[what.module, what.name] = True
                return Opaque(what.module, what.name, args, kwargs)
            made = _through_partial(what)
            return made or Opaque(what.module, f"{what.name}(...)", args, kwargs)  # what a record would have returned
        if not callable(what):
            raise CorruptError(f"a call of {type(what).__name__}, which is nothing to call")
        try:
            made = what(*args) if not kwargs else what(*args, **kwargs)
        except CorruptError:
            raise
        except _DAMAGE:  # not what the real thing takes, or more than we want to take
            module, name = next((key for key, value in rebuild.items() if value is what), ("", "call"))
            return Opaque(module, name, args, kwargs)
        if isinstance(made, Opaque) and made.args is None:  # an attribute of a named thing is a named thing
            self.globals.setdefault((made.module, made.name), False)
        return made


def _through_partial(what: Opaque) -> Opaque | None:
    """How protocols 2 and 3 spell __new__ with keywords: the call of functools.partial(cls.__new__, cls, ...)."""
    state = what.state
    if (what.module, what.name) != ("functools", "partial") or not isinstance(state, tuple) or len(state) < 3:
        return None
    func, args, kwargs = state[:3]
    if not isinstance(func, Opaque) or not func.name.endswith("__new__") or not isinstance(args, tuple) or not args:
        return None
    cls = args[0]
    return Opaque(cls.module, cls.name, args[1:], kwargs or None) if isinstance(cls, Opaque) else None


def _exactly(data: bytes, at: int, n: int) -> bytes:
    raw = data[at : at + n]
    if len(raw) != n:
        raise CorruptError(f"{n:,} bytes are claimed at byte {at:,}, but the pickle ends at {len(data):,}: truncated?")
    return raw


def _decimal(line: bytes) -> Any:
    if line in (b"00", b"01"):  # protocol 0 spells booleans so
        return line == b"01"
    return int(line.removesuffix(b"L"))


def _quoted(line: bytes) -> str:
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise CorruptError("a string without its quotes")
    return line[1:-1].decode("unicode_escape")


# opcode -> (bytes of the length, what the counted bytes are)
_COUNTED = {
    0x54: (4, "latin1"),  # BINSTRING
    0x55: (1, "latin1"),  # SHORT_BINSTRING
    0x42: (4, "bytes"),  # BINBYTES
    0x43: (1, "bytes"),  # SHORT_BINBYTES
    0x8E: (8, "bytes"),  # BINBYTES8
    0x8D: (8, "utf8"),  # BINUNICODE8
    0x96: (8, "bytearray"),  # BYTEARRAY8
}
_COUNTED_VALUE: dict[str, Callable[[bytes], Any]] = {
    "latin1": lambda raw: raw.decode("latin1"),
    "bytes": bytes,
    "utf8": lambda raw: raw.decode("utf-8", "surrogatepass"),
    "bytearray": bytearray,
}
# opcodes whose argument is the rest of the line
_LINES: dict[int, Callable[[bytes], Any]] = {
    0x70: int,  # PUT
    0x67: int,  # GET
    0x50: bytes,  # PERSID
    0x49: _decimal,  # INT
    0x4C: _decimal,  # LONG
    0x46: float,  # FLOAT
    0x53: _quoted,  # STRING
    0x56: lambda line: line.decode("raw-unicode-escape"),  # UNICODE
}


def check_key(key: Any) -> None:
    """Hashing a tuple recurses in C, and visits a shared element as often as it is referred to: refuse what no honest
    key is."""
    level, seen = [key], 0
    for _ in range(16):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, tuple | frozenset):
                seen += len(one)
                if seen > 4096:
                    raise CorruptError("a dictionary key that expands to thousands of elements")
                inner.extend(one)
        if not inner:
            return
        level = inner
    raise CorruptError("a dictionary key that is nested absurdly deep")


def _set_items(target: Any, items: list[Any]) -> None:
    entries = target.entries if isinstance(target, Opaque) else target
    if not isinstance(entries, dict):
        raise CorruptError(f"keys are set on a {type(target).__name__}")
    for n in range(0, len(items), 2):
        key = items[n]
        if isinstance(key, tuple | frozenset):
            check_key(key)
        entries[key] = items[n + 1]


def _extend(target: Any, items: Iterable[Any]) -> None:
    if isinstance(target, Opaque):
        target.items.extend(items)
    elif isinstance(target, list):
        target.extend(items)
    else:
        raise CorruptError(f"items are appended to a {type(target).__name__}")


def _build(target: Any, state: Any) -> None:
    """Give a record its state; our own records of numpy things take it by `set_state`."""
    if isinstance(target, Opaque | Attributed):
        target.state = state
        return
    take = getattr(target, "set_state", None)
    if take is None:
        raise CorruptError(f"a state is given to a {type(target).__name__}")
    take(state)
