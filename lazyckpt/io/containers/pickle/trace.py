"""Which names a pickle would import and call, also for pickles that `machine` refuses.

`machine` builds the values of honest pickles, and refuses those that Python's unpicklers interpret differently.
`trace` builds no values. It follows the stack, the memo and the calls as any unpickler would, up to the first byte that
none accepts, and keeps only what decides the names: texts, names and calls. It reads the pickle by windows, so that a
gigabyte in one bytes object costs no memory.

Names in the bytes behind such a place, which a reader that resumes may find, are searched for by pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ...limits import CALLED, OBJECTS, OBJECTS_PER_BYTE
from .audit import MAKERS, bomb, excess, large
from .techniques import EXTENSION, PERSISTENT

_FIRST_WINDOW, _WINDOW = 1 << 12, 1 << 20  # bytes of the first read, and of the largest
_AHEAD = 32  # bytes of an opcode and its length
_LINE = 1 << 28  # bytes of the longest argument that is a line
_TEXT = 1 << 10  # characters of the longest text that may be a name
_KEY = 20  # digits of the largest key of a tensor in a tar of torch 0.1
_KEPT = 8  # elements of the largest tuple that is kept
_REMAINDER = 64 << 20  # bytes behind the damage that are searched
_NAME = rb"[A-Za-z_][\w.]{0,200}"
_HIDDEN = re.compile(
    rb"[ci](" + _NAME + rb")\r?\n(" + _NAME + rb")\r?\n"
    rb"|[\x8cX].(?:\0\0\0)?("
    + _NAME
    + rb")(?:\x94|q.|r....)?[\x8cX].(?:\0\0\0)?("
    + _NAME
    + rb")(?:\x94|q.|r....)?\x93",
    re.DOTALL,
)
_PROTOCOL = re.compile(rb"\x80[\0-\x05]|PK\x03\x04|\x1f\x8b|BZh|\xfd7zXZ|c" + _NAME + rb"\n" + _NAME + rb"\n|\([lditc]")


class Bytes(Protocol):
    """Bytes that are read by ranges: a `StoreFile`, or `Held` bytes."""

    size: int

    def at(self, offset: int, size: int) -> bytes: ...


class Held:
    """Bytes in memory, as `trace` reads them."""

    def __init__(self, data: bytes) -> None:
        self._data, self.size = data, len(data)

    def at(self, offset: int, size: int) -> bytes:
        return self._data[offset : offset + size]


class Named(NamedTuple):
    """A class or function that a pickle names."""

    module: str
    name: str


class _Made:
    """The result of a call; ``of`` is None if the callable is not a name."""

    __slots__ = ("args", "of")

    def __init__(self, of: Named | None, args: Any) -> None:
        self.of, self.args = of, args


class Constant(NamedTuple):
    """Bytes in a pickle that may be a pickle or an archive: where they are, or the bytes if they were a text.
    ``unpickled`` says that the pickle itself has them unpickled."""

    offset: int
    size: int
    data: bytes | None = None
    unpickled: bool = False


class _Held(NamedTuple):
    """A bytes object or a long text of a pickle: where it is, and the encoding of a text."""

    offset: int
    size: int
    encoding: str = ""


class _List:
    """A list; ``items`` are its first ones."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: list[Any] = []


@dataclass(slots=True)
class Trace:
    """What a pickle would import and call.

    Attributes
    ----------
    named
        The names -> whether the pickle calls them. Also extension codes and persistent ids (`audit.EXTENSION`).
    allowed
        Names that are dangerous by themselves, but not as this pickle uses them.
    odd
        What no pickler writes, as sentences.
    bombs
        What exhausts memory, as sentences.
    constants
        Bytes that may be a pickle or an archive.
    hidden
        Names in the bytes behind the damage, if there is any.
    end, error
        Where the pickle ends or breaks off; why, or "" if it ends as it should.
    """

    named: dict[Named, bool] = field(default_factory=dict)
    allowed: set[Named] = field(default_factory=set)
    odd: list[str] = field(default_factory=list)
    bombs: list[str] = field(default_factory=list)
    constants: list[Constant] = field(default_factory=list)
    hidden: dict[Named, bool] = field(default_factory=dict)
    end: int = 0
    error: str = ""


class _BrokenOff(Exception):
    pass


_PLAIN = object()  # a value that is no name, text or call
_GETATTR = {Named("builtins", "getattr"), Named("__builtin__", "getattr")}
_LOAD_BYTES = Named("torch.storage", "_load_from_bytes")
_ENCODE = Named("_codecs", "encode")
_SIZED = {Named(root, name) for root in ("builtins", "__builtin__") for name in ("bytearray", "bytes")}
_FILLED = {
    Named(module, name)
    for module in ("builtins", "__builtin__", "collections")
    for name in ("list", "tuple", "set", "frozenset", "bytes", "bytearray", "sorted", "sum", "max", "min", "deque")
}
_ITERATORS = {"range", "xrange", "repeat", "count", "cycle", "product", "permutations", "combinations"}
_ESCAPE = re.compile(rb"\\([4-7][0-7]{2}|.)", re.DOTALL)
_TYPES = {Named("builtins", "type"), Named("__builtin__", "type")}
_PARTIAL = Named("functools", "partial")
_PASSING = {_PARTIAL, Named("copyreg", "__newobj__"), Named("copyreg", "__newobj_ex__")} | {
    Named(module, "_reconstructor") for module in ("copyreg", "copy_reg")
}
_SIZE = Named("torch", "Size")
_MAKERS = {Named(*one) for one in MAKERS}
_MAKES_CLASS = "makes a class with type(...), which may bring functions of its own"
# calls whose arguments matter
_SPECIAL = _GETATTR | _SIZED | _FILLED | _TYPES | _PASSING | _MAKERS | {_LOAD_BYTES, _ENCODE}
# opcodes that push a value without further effect -> bytes of their argument
_VALUES = {
    0x4B: 1, 0x4D: 2, 0x4A: 4, 0x47: 8, 0x4E: 0, 0x88: 0, 0x89: 0, 0x7D: 0, 0x8F: 0, 0x97: 0,
}  # fmt: skip
_TEXTS = {0x58: 4, 0x8C: 1, 0x8D: 8, 0x54: 4, 0x55: 1}  # -> bytes of their length
_RAW = {0x42: 4, 0x43: 1, 0x8E: 8, 0x96: 8, 0x8A: 1, 0x8B: 4}
_EXTENSIONS = {0x82: 1, 0x83: 2, 0x84: 4}


def trace(file: Bytes, start: int = 0, search: bool = True) -> Trace:
    """Return what the pickle at byte ``start`` would import and call.

    Parameters
    ----------
    file
        The bytes.
    start
        Where the pickle begins.
    search
        Search for names behind the place where the pickle breaks off.

    Returns
    -------
    Trace
        Also for damaged pickles, with the names up to the damage.
    """
    tracer = _Tracer(file, start)
    try:
        tracer.run()
    except _BrokenOff as e:
        tracer.found.error = str(e)
    except (IndexError, KeyError, ValueError, TypeError, OverflowError) as e:
        tracer.found.error = f"it is not valid ({type(e).__name__})"
    found = tracer.found
    found.end = tracer.place
    tracer.settle()
    if found.error and search:
        found.hidden = {one: True for one in _hidden(file, found.end) if one not in found.named}
    return found


def _hidden(file: Bytes, start: int) -> Iterator[Named]:
    """Yield the names that the bytes from ``start`` on have as arguments of opcodes."""
    end = min(file.size, start + _REMAINDER)
    while start < end:
        data = file.at(start, min(_WINDOW, end - start))
        for match in _HIDDEN.finditer(data):
            module, name = match[1] or match[3], match[2] or match[4]
            yield Named(module.decode("latin1"), name.decode("latin1"))
        start += max(1, len(data) - 1024) if start + len(data) < end else len(data)


class _Tracer:
    """The state of one run: the window of bytes, the stack and the memo."""

    def __init__(self, file: Bytes, start: int) -> None:
        self.found = Trace()
        self._file, self._base = file, start
        self._data = b""
        self._i = 0
        self._room = OBJECTS + int((file.size - start) * OBJECTS_PER_BYTE)
        self._window = _FIRST_WINDOW // 2
        self._names: dict[tuple[str, str], Named] = {}
        self._named_getattr = False
        self._escaped = False  # whether getattr is passed on rather than called
        self._constants: dict[int, Constant] = {}
        self._resolved = 0  # calls of getattr whose result is a name

    @property
    def place(self) -> int:
        return self._base + self._i

    def settle(self) -> None:
        """Allow getattr if every use of it is a call whose result is a name, which is judged itself."""
        self.found.constants = list(self._constants.values())
        if any(one in self.found.named for one in _GETATTR) and (self._escaped or not self._resolved):
            self.found.odd.append("reaches functions through the attributes of values, with getattr")

    # -- bytes

    def _fill(self, need: int) -> None:
        """Make ``need`` bytes from the current place on available, as far as there are any."""
        if len(self._data) - self._i < need:
            self._base += self._i
            self._i = 0
            self._window = min(2 * self._window, _WINDOW)
            size = min(max(need, self._window), self._file.size - self._base)
            self._data = self._file.at(self._base, size) if size > 0 else b""

    def _number(self, width: int) -> int:
        raw = self._data[self._i : self._i + width]
        if len(raw) < width:
            raise _BrokenOff("it ends within an opcode")
        self._i += width
        return int.from_bytes(raw, "little")

    def _skip(self, n: int) -> None:
        if self._base + self._i + n > self._file.size:
            raise _BrokenOff(f"{n:,} bytes are claimed, more than there are")
        if n <= len(self._data) - self._i:
            self._i += n
        else:
            self._base += self._i + n
            self._data, self._i = b"", 0

    def _line(self) -> bytes:
        end = self._data.find(b"\n", self._i)
        size = _FIRST_WINDOW
        while end < 0:
            self._fill(size)
            if self._i >= len(self._data):
                return b""  # as Python's unpickler does
            end = self._data.find(b"\n", self._i)
            if end < 0 and self._base + len(self._data) >= self._file.size:
                end = len(self._data) - 1  # Python takes the rest but for its last byte
            elif end < 0 and size >= _LINE:
                raise _BrokenOff("a line does not end")
            size *= 16
        line = self._data[self._i : end]
        self._i = end + 1
        return line

    # -- values

    def _text(self, n: int) -> Any:
        """Return a text of ``n`` bytes at the current place if it may be a name."""
        if n <= _TEXT:
            self._fill(n)
            raw = self._data[self._i : self._i + n]
            self._skip(n)
            return raw.decode("utf-8", "backslashreplace")
        self._fill(_AHEAD)
        head = self._data[self._i : self._i + _AHEAD].replace(b"\xc2", b"")
        held = _Held(self.place, n, "utf-8")
        if _PROTOCOL.match(head) and n < _REMAINDER:
            self._constants[held.offset] = Constant(held.offset, n, self._latin(held))
        self._skip(n)
        return held

    def _latin(self, held: _Held) -> bytes:
        text = self._file.at(held.offset, held.size).decode(held.encoding, "replace")
        return text.encode("latin1", "replace")

    def _bytes(self, n: int) -> Any:
        self._fill(min(n, 256))
        held = _Held(self.place, n)
        if n > 2 and _PROTOCOL.match(self._data, self._i):
            self._constants[held.offset] = Constant(held.offset, n)
        self._skip(n)
        return held

    def _unpickled(self, value: Any) -> None:
        """Keep bytes that the pickle itself has unpickled; they are looked at as a pickle, however they begin."""
        if type(value) is _Held and not value.encoding:
            self._constants[value.offset] = Constant(value.offset, value.size, None, True)
        else:
            data = None
            if type(value) is _Made and value.of == _ENCODE and type(value.args) is tuple and value.args:
                what, *rest = value.args
                if rest in ([], ["latin1"], ["latin-1"], ["iso-8859-1"]):
                    if type(what) is str:
                        data = what.encode("latin1", "replace")
                    elif type(what) is _Held and what.encoding and what.size < _REMAINDER:
                        data = self._latin(what)
            if data is None:
                self.found.odd.append("unpickles bytes that are computed while it is unpickled")
                return
            offset = what.offset if type(what) is _Held else self.place
            self._constants[offset] = Constant(offset, len(data), data, True)
        self.found.allowed.add(_LOAD_BYTES)  # the bytes themselves are looked at

    def _find(self, module: Any, name: Any) -> Any:
        if type(module) is not str or type(name) is not str:
            self.found.odd.append("names a class or function by values that are computed while it is unpickled")
            return _PLAIN
        one = self._names.get((module, name))
        if one is None:
            one = self._names[module, name] = Named(module, name)
            self._named_getattr = self._named_getattr or one in _GETATTR
            self.found.named.setdefault(one, False)
        return one

    def _pass_on(self, items: list[Any]) -> None:
        """Notice getattr among values that are stored or passed on."""
        if self._named_getattr and not self._escaped:
            self._escaped = any(type(item) is Named and item in _GETATTR for item in items)

    def _call(self, what: Any, args: Any) -> Any:
        if type(what) is not Named:
            return _Made(None, None)
        found = self.found
        found.named[what] = True
        if what not in _SPECIAL:
            return _Made(what, args)
        known = args if type(args) is tuple else ()
        if what in _GETATTR:
            if len(known) in (2, 3) and type(known[0]) is Named and type(known[1]) is str:
                self._resolved += 1
                return self._find(known[0].module, f"{known[0].name}.{known[1]}")
            self._escaped = True
        elif what == _LOAD_BYTES:
            self._unpickled(known[0] if len(known) == 1 else None)
        elif what == _ENCODE and known and type(known[0]) is str:
            data = known[0].encode("latin1", "replace")
            if _PROTOCOL.match(data):
                self._constants[self.place] = Constant(self.place, len(data), data)
        elif what in _SIZED and known and (text := large(what.name, known[0], self._file.size)):
            found.bombs.append(f"has {text}")
        elif what in _FILLED and known and type(known[0]) is _Made and _is_endless(known[0]):
            found.bombs.append(f"fills a {what.name} with more items than any checkpoint has")
        elif _makes_class(what, args):
            found.odd.append(_MAKES_CLASS)
        elif what in _MAKERS and (text := excess(*what, tuple(map(_plain, known)), self._file.size)):
            found.bombs.append(f"has {text}")
        return _Made(what, args)

    def _build(self, target: Any, state: Any) -> None:
        if type(target) is Named:
            self.found.odd.append(f"changes {target.module}.{target.name} itself, for the whole process")
        elif type(target) is _Made and target.of is not None:
            if target.of == _PARTIAL and (type(state) is not tuple or any(one in _TYPES for one in _names(state))):
                self.found.odd.append(_MAKES_CLASS)
            self.found.named[target.of] = True

    def _put(self, memo: dict[int, Any], key: int, value: Any) -> None:
        if key > self._file.size and (text := bomb(key, self._file.size)) and len(self.found.bombs) < _KEPT:
            self.found.bombs.append(f"has {text}")
        memo[key] = value

    # -- opcodes

    def run(self) -> None:
        memo: dict[int, Any] = {}
        marks: list[list[Any]] = []
        stack: list[Any] = []
        count = protocols = frame = 0
        texts, values, raw = _TEXTS, _VALUES, _RAW
        data, i = self._data, self._i
        # the most frequent opcodes work on local names; `self._i` is up to date for all others
        while True:
            if len(data) - i < _AHEAD:
                self._i = i
                self._fill(_AHEAD)
                data, i = self._data, self._i
                if i >= len(data):
                    raise _BrokenOff("it ends without its last opcode")
            if frame and self._base + i >= frame:
                if self._base + i > frame:  # unpicklers that read from a file then skip bytes of a name
                    self.found.odd.append("has a frame that cuts an opcode in two: unpicklers see different names")
                frame = 0
            count += 1
            if not count & 0xFFFF and len(stack) + len(memo) + len(marks) > self._room:
                self.found.bombs.append("describes more objects than an honest file of its size")
                raise _BrokenOff("it describes too many objects")
            op = data[i]
            i += 1
            if op == 0x71:  # BINPUT
                memo[data[i]] = stack[-1]
                i += 1
                continue
            if op == 0x68:  # BINGET
                stack.append(memo[data[i]])
                i += 1
                continue
            if op == 0x4B:  # BININT1
                stack.append(data[i])
                i += 1
                continue
            if op == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
                continue
            if op == 0x28:  # MARK
                marks.append(stack)
                stack = []
                continue
            if op in texts:
                n = int.from_bytes(data[i : i + texts[op]], "little")
                begin = i + texts[op]
                if n <= _TEXT and begin + n <= len(data):
                    i = begin + n
                    stack.append(data[begin:i].decode("utf-8", "backslashreplace"))
                    continue
            self._i = i
            if op in values:
                if op == 0x4A or op == 0x4D:  # BININT, BININT2: sizes matter to calls
                    n = self._number(values[op])
                    stack.append(n - (1 << 32) if n >> 31 else n)
                else:
                    stack.append(_PLAIN)
                    self._skip(values[op])
            elif op == 0x5D:  # EMPTY_LIST
                stack.append(_List())
            elif op == 0x72:  # LONG_BINPUT
                self._put(memo, self._number(4), stack[-1])
            elif op == 0x6A:  # LONG_BINGET
                stack.append(memo[self._number(4)])
            elif op in texts:
                stack.append(self._text(self._number(texts[op])))
            elif op == 0x74:  # TUPLE
                items, stack = stack, marks.pop()
                self._pass_on(items)
                stack.append(tuple(items) if len(items) <= _KEPT else _PLAIN)
            elif op in (0x85, 0x86, 0x87):  # TUPLE1, TUPLE2, TUPLE3
                n = op - 0x84
                if len(stack) < n:
                    raise _BrokenOff("its stack is empty")
                items = stack[-n:]
                self._pass_on(items)
                stack[-n:] = [tuple(items)]
            elif op == 0x29:  # EMPTY_TUPLE
                stack.append(())
            elif op in (0x52, 0x81):  # REDUCE, NEWOBJ
                args = stack.pop()
                stack[-1] = self._call(stack[-1], args)
            elif op == 0x92:  # NEWOBJ_EX
                self._pass_on([stack.pop()])
                args = stack.pop()
                stack[-1] = self._call(stack[-1], args)
            elif op == 0x63:  # GLOBAL
                module, name = self._line(), self._line()
                stack.append(self._find(module.decode("utf-8", "replace"), name.decode("utf-8", "replace")))
            elif op == 0x93:  # STACK_GLOBAL
                name = stack.pop()
                stack[-1] = self._find(stack[-1], name)
            elif op == 0x69:  # INST
                module, name = self._line(), self._line()
                one = self._find(module.decode("utf-8", "replace"), name.decode("utf-8", "replace"))
                items, stack = stack, marks.pop()
                self._pass_on(items)
                stack.append(self._call(one, tuple(items[:_KEPT])))
            elif op == 0x6F:  # OBJ
                items, stack = stack, marks.pop()
                self._pass_on(items[1:])
                stack.append(self._call(items[0], tuple(items[1:_KEPT])))
            elif op == 0x62:  # BUILD
                state = stack.pop()
                self._build(stack[-1], state)
            elif op in (0x75, 0x65, 0x90):  # SETITEMS, APPENDS, ADDITEMS
                items, stack = stack, marks.pop()
                self._pass_on(items)
                self._extend(stack[-1], items)
            elif op in (0x73, 0x61):  # SETITEM, APPEND
                n = 2 if op == 0x73 else 1
                items = stack[-n:]
                self._pass_on(items)
                del stack[-n:]
                self._extend(stack[-1], items)
            elif op in (0x6C, 0x64, 0x91):  # LIST, DICT, FROZENSET
                items, stack = stack, marks.pop()
                self._pass_on(items)
                stack.append(_PLAIN)
            elif op == 0x51:  # BINPERSID
                stack[-1] = self._persistent(stack[-1])
            elif op == 0x50:  # PERSID
                line = self._line()
                stack.append(self._persistent(line.decode("utf-8", "replace")))
            elif op in raw:
                n = self._number(raw[op])
                if op in (0x8A, 0x8B):  # LONG1, LONG4
                    small = n <= 16
                    self._fill(n if small else 0)
                    value = (
                        int.from_bytes(self._data[self._i : self._i + n], "little", signed=True) if small else _PLAIN
                    )
                    self._skip(n)
                    stack.append(value)
                else:
                    stack.append(self._bytes(n))
            elif op in (0x49, 0x4C):  # INT, LONG
                digits = self._line().rstrip(b"L\r")
                stack.append(int(digits) if len(digits) < 40 and digits.isdigit() else _PLAIN)
            elif op == 0x46:  # FLOAT
                self._line()
                stack.append(_PLAIN)
            elif op in (0x53, 0x56):  # STRING, UNICODE
                begin, line = self.place, self._line()
                quoted = line.strip()[1:-1] if op == 0x53 else line
                if len(quoted) <= 8 * _TEXT:
                    stack.append(_escaped(quoted, op == 0x53))
                else:
                    stack.append(_PLAIN if op == 0x53 else _Held(begin, len(line), "raw-unicode-escape"))
            elif op in (0x70, 0x67):  # PUT, GET
                key = int(self._line())
                if op == 0x70:
                    self._put(memo, key, stack[-1])
                else:
                    stack.append(memo[key])
            elif op in _EXTENSIONS:
                one = Named(EXTENSION, f"extension {self._number(_EXTENSIONS[op])}")
                self.found.named[one] = True
                stack.append(_PLAIN)
            elif op == 0x80:  # PROTO
                version = self._number(1)
                protocols += 1
                if protocols == 2:
                    self.found.odd.append("declares its protocol twice")
                if version > 5:
                    raise _BrokenOff(f"it declares protocol {version}")
            elif op == 0x95:  # FRAME
                length = self._number(8)
                frame = self.place + length
            elif op == 0x30:  # POP
                if stack:
                    stack.pop()
                else:
                    stack = marks.pop()
            elif op == 0x31:  # POP_MARK
                stack = marks.pop()
            elif op == 0x32:  # DUP
                stack.append(stack[-1])
            elif op == 0x98:  # READONLY_BUFFER
                pass
            elif op == 0x2E:  # STOP
                return
            else:
                self._i -= 1
                raise _BrokenOff(f"byte 0x{op:02x} is no opcode")
            data, i = self._data, self._i

    def _extend(self, target: Any, items: list[Any]) -> None:
        if type(target) is _List:
            if len(target.items) < _KEPT:
                target.items += items[:_KEPT]
        elif type(target) is Named:
            self.found.odd.append(f"changes {target.module}.{target.name} itself, for the whole process")

    def _persistent(self, pid: Any) -> Any:
        """Return the object for a persistent id: a storage of torch, or a class of a legacy file of torch.

        Tar files of torch 0.1 have keys of tensors and storages, which are numbers, and (class, file, source)."""
        if type(pid) is tuple and pid and pid[0] == "storage" and len(pid) >= 5:
            return _PLAIN
        if type(pid) is tuple and len(pid) > 1 and pid[0] == "module" and type(pid[1]) is Named:
            return pid[1]
        if type(pid) is tuple and len(pid) == 3 and type(pid[0]) is Named:
            return pid[0]
        if type(pid) is str and pid.isdecimal() and len(pid) <= _KEY:
            return _PLAIN
        text = (
            pid if type(pid) is str else pid[0] if type(pid) is tuple and pid and type(pid[0]) is str else "an object"
        )
        self.found.named[Named(PERSISTENT, text[:100])] = True
        return _PLAIN


def _makes_class(what: Named, args: Any) -> bool:
    """Return whether a call makes a class with ``type``, itself or by what passes ``type`` on."""
    if type(args) is not tuple:
        return False
    passed = what in _PASSING and any(one in _TYPES for one in args if type(one) is Named)
    return passed or (what in _TYPES and len(args) == 3)


def _plain(value: Any) -> Any:
    """Return what a value says about a shape: its numbers."""
    if type(value) is _Made and value.of == _SIZE and type(value.args) is tuple and value.args:
        value = value.args[0]
    return value.items if type(value) is _List else value


def _names(state: Any) -> list[Named]:
    """Return the names in a tuple, and in tuples in it."""
    found = []
    for one in state:
        found += [one] if type(one) is Named else _names(one) if type(one) is tuple and one is not state else []
    return found


def _is_endless(made: _Made) -> bool:
    """Return whether a call makes an iterator of more items than any checkpoint has."""
    if made.of is None or made.of.name not in _ITERATORS:
        return False
    numbers = [n for n in (made.args if type(made.args) is tuple else ()) if type(n) is int]
    return made.of.module == "itertools" or any(n > CALLED for n in numbers)


def _usual(escape: re.Match[bytes]) -> bytes:
    """Return an escape such that decoding it warns of nothing: unknown ones stand for themselves."""
    what = escape[1]
    if len(what) == 3:
        return b"\\%c%s" % (what[0] - 4, what[1:])
    return escape[0] if what in b"\\'\"\nabfnrtvx01234567" else b"\\" + escape[0]


def _escaped(line: bytes, quoted: bool) -> Any:
    import codecs

    if quoted:
        raw: bytes = codecs.escape_decode(_ESCAPE.sub(_usual, line))[0]
        return raw.decode("latin1")
    return line.decode("raw-unicode-escape", "replace")
