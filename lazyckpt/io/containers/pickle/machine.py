"""A pickle machine that cannot execute anything: it never imports or calls what a pickle names.

It interprets the opcodes of protocols 0 to 5 over plain containers. Callables that a pickle names are looked up in a
closed table (`Rebuild`: tensors, numpy arrays, dates, ...); any other becomes an `Opaque` record. The machine never
recurses, never allocates by a size that the file merely claims, and its memo is a dict, so the time and memory for a
hostile file are proportional to the file's length (io/limits.py). Pickles that Python's unpicklers interpret
differently (the C and the Python one, from memory and from a file) are rejected.

Opcodes: CPython's Lib/pickletools.py. The names of globals are kept as the pickle spells them, to report what the file
would have done.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container, Mapping
from typing import Any, Protocol

from ....errors import CorruptError, some
from ...limits import Budget, ExcessError
from .audit import bomb, dangerous, excess, large
from .memo import FEW, NOTED, Changes, Item, Items, Memo, Note, refuse_shared
from .opcodes import COUNTED, LINES, counted, exactly, place, unknown
from .rebuild import persistent_storage
from .records import Opaque, build, extend, through_partial
from .shortcut import MADE, TENSOR, Tensors
from .techniques import BOMB, EXTENSION, PERSISTENT
from .values import Keys

# (module, name) -> a function that rebuilds the value from the pickled arguments. If it raises, the value is an Opaque.
Rebuild = Mapping[tuple[str, str], Any]

_STRIDE = 1 << 16  # bytes between two charges to the budget
_DEEP = 10_000  # maximum open marks; a pickler's own recursion ends at a thousand
# opcodes of protocol 4 that often follow each other
_NEW, _STATE, _CALL = b"\x81\x94", b"}\x94", b"\x85\x94R\x94"
_TENSOR = 6  # minimum number of arguments from which a tensor is rebuilt
_COPIED = (str, bytes, bytearray, list, tuple, dict, set, frozenset)
_DAMAGE = (
    IndexError, KeyError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError, MemoryError,
    struct.error,
)  # fmt: skip


class Runs(Protocol):
    """Runs of records that a machine need not interpret one by one, and the memo that has their entries."""

    @property
    def memo(self) -> dict[int, Any]: ...

    @property
    def starts(self) -> Container[int]:
        """The bytes at which runs may begin."""

    @property
    def skipped(self) -> int:
        """The number of memo entries that are not in `memo` itself, because no record had to be interpreted."""

    def at(self, i: int, frame: int) -> tuple[list[Any], int, int] | None:
        """Return the values that the run at byte ``i`` puts on the stack, its end, and the number of its objects; None
        if no run begins there. A run ends before the end of the ``frame``, if that is not 0."""


class Pickle:
    """A parsed pickle: its ``value``, its ``end`` offset, the ``globals`` it names (name -> whether it would call it).

    ``known`` is a cache of dict items of other pickles, which are reused for identical bytes. It does not change the
    result. With ``runs``, the value holds runs in the place of the records that they represent; the attribute ``runs``
    is None if it does not, because the pickle uses the records in another way.
    """

    __slots__ = ("end", "globals", "runs", "value")

    def __init__(
        self,
        data: bytes | memoryview,
        where: str,
        rebuild: Rebuild,
        persistent: Callable[[Any], Any],
        start: int = 0,
        known: Items | None = None,
        runs: Runs | None = None,
    ) -> None:
        data = bytes(data)
        if known is not None or runs is not None:
            machine = _Machine(data, rebuild, persistent, Budget(where, len(data)), known, runs)
            try:
                self.value, self.end, self.globals = machine.run(start), machine.end, machine.globals
                self.runs = runs
                return
            except (Changes, CorruptError, *_DAMAGE):
                pass  # without sharing and runs, parsing may succeed, or fail at another offset
        self.runs = None
        machine = _Machine(data, rebuild, persistent, Budget(where, len(data)))
        try:
            self.value = machine.run(start)
        except ExcessError:
            raise
        except CorruptError as e:
            raise CorruptError(f"{where}: {e}{_warning(machine)}") from None
        except _DAMAGE as e:
            raise CorruptError(
                f"{where}: not a valid pickle near byte {machine.end:,} ({type(e).__name__}: {e!s:.200}). "
                f"The file is damaged, or it is not a torch file: copy it again from its source.{_warning(machine)}"
            ) from e
        self.end, self.globals = machine.end, machine.globals


def _warning(machine: _Machine) -> str:
    """Return a sentence about the names that a pickle has had until it breaks off, if no checkpoint needs them."""
    named = [f"{module}.{name}" for module, name in machine.globals if dangerous(module, name)]
    return f" It names {some(named)}, which no checkpoint needs: nothing was run, but do not load it" if named else ""


class _Machine:
    """The state of one run: the named globals, the current offset and the remaining budget."""

    __slots__ = (
        "_budget", "_data", "_keys", "_known", "_persistent", "_rebuild", "_runs", "_taken", "end", "framed", "globals"
    )  # fmt: skip

    def __init__(
        self,
        data: bytes,
        rebuild: Rebuild,
        persistent: Callable[[Any], Any],
        budget: Budget,
        known: Items | None = None,
        runs: Runs | None = None,
    ) -> None:
        self._data, self._rebuild, self._persistent, self._budget, self._known, self._runs = (
            data, rebuild, persistent, budget, known, runs
        )  # fmt: skip
        self._taken: list[Item] = []
        self._keys = Keys(budget)
        self.globals: dict[tuple[str, str], bool] = {}
        self.framed = False
        self.end = 0

    def run(
        self,
        i: int,
        memo: dict[int, Any] | None = None,
        stack: list[Any] | None = None,
        named: dict[tuple[str, str], Any] | None = None,
    ) -> Any:
        """Interpret the opcodes from byte ``i`` on and return the object on top of the stack at STOP."""
        # One long loop, with the most frequent opcodes of torch files first: it runs about forty times per tensor.
        data, rebuild, persistent, known = self._data, self._rebuild, self._persistent, self._known
        runs = self._runs
        if memo is None:
            memo = {} if runs is None else runs.memo
        starts: Container[int] = () if runs is None else runs.starts
        skipped = 0  # memo entries of runs
        stack = [] if stack is None else stack
        named = named if named is not None else {} if known is None else known.named
        marks: list[list[Any]] = []
        push = stack.append
        int_from = int.from_bytes
        size = len(data)
        tensors = Tensors(data) if persistent is persistent_storage else None
        # states at which an item may begin, by the number of open marks: of the outermost dict, of the open one in it
        notes: list[list[Note]] = [[], [], []]
        shared = 3 if known is not None else 0  # number of open marks from which on no items are shared
        fence = i + _STRIDE  # offset at which the frame ends or the next charge to the budget follows
        frame = made = seen = noted = 0

        def find(module: str, name: str) -> Any:
            key = (module, name)
            value = named.get(key, memo)
            if value is memo:
                value = named[key] = rebuild[key] if key in rebuild else Opaque(module, name)
            self.globals.setdefault(key, False)  # also if another pickle put it into `named`
            return value

        try:
            while True:
                if i >= fence:
                    if frame and i >= frame:
                        if i > frame:
                            raise CorruptError(f"the frame that ends at byte {frame:,} cuts an opcode in two")
                        frame = 0
                    seen = self._charge(made, memo, seen, marks)
                    made = 0
                    fence = min(frame, i + _STRIDE) if frame else i + _STRIDE
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
                elif op == 0x94:  # MEMOIZE
                    memo[len(memo) + skipped] = stack[-1]
                elif op == 0x4B:  # BININT1
                    push(data[i])
                    i += 1
                elif op == 0x58:  # BINUNICODE
                    if 0 < len(marks) < shared and len(stack) < FEW and len(notes[len(marks)]) < FEW:
                        item = None if len(stack) % 2 or frame else self._shared(i - 1, memo)
                        notes[len(marks)].append(Note.of(i - 1, stack, len(memo)))
                        if item is not None:
                            stack += item.values
                            memo.update(item.memo)
                            i += len(item.data) - 1
                            continue
                    n = int_from(data[i : i + 4], "little")
                    i += 4
                    push(exactly(data, i, n).decode("utf-8", "surrogatepass"))
                    i += n
                elif op == 0x28:  # MARK
                    if stack and stack[-1] is TENSOR and tensors is not None and not frame:
                        tensor = tensors.read(i - 1, memo)
                        if tensor is not None:
                            stack[-1], i = tensor
                            made += MADE
                            continue
                    made += 1
                    marks.append(stack)
                    stack = []
                    push = stack.append
                    if shared == 3 and len(marks) == 2 and notes[2]:
                        noted += len(notes[2])
                        notes[2] = []
                        shared = 3 if noted < NOTED else 2
                    while i in starts and runs is not None and (run := runs.at(i, frame)) is not None:
                        stack += run[0]
                        i, made, skipped = run[1], made + run[2], runs.skipped
                elif op >= 0x80:
                    if op == 0x8C:  # SHORT_BINUNICODE
                        n = data[i]
                        i += 1
                        push(exactly(data, i, n).decode("utf-8", "surrogatepass"))
                        i += n
                    elif op < 0x88 and op > 0x84:  # TUPLE1, TUPLE2, TUPLE3
                        if op == 0x86:
                            stack[-2:] = [(stack[-2], stack[-1])]
                        elif op == 0x85:
                            stack[-1] = (stack[-1],)
                        else:
                            stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
                        if i + 5 < fence and data[i] == 0x94:  # MEMOIZE, at once
                            value = memo[len(memo) + skipped] = stack[-1]
                            i += 1
                            if data.startswith(_CALL, i) and len(stack) > 1:  # the only argument of a call
                                args = memo[len(memo) + skipped] = (stack.pop(),)
                                made += 1
                                i += 4
                                stack[-1] = memo[len(memo) + skipped] = self._made(stack[-1], args)
                    elif op == 0x81:  # NEWOBJ
                        made += 1
                        args = stack.pop()
                        stack[-1] = self._made(stack[-1], args)
                    elif op == 0x89:  # NEWFALSE
                        push(False)
                    elif op == 0x88:  # NEWTRUE
                        push(True)
                    elif op == 0x93:  # STACK_GLOBAL
                        name = stack.pop()
                        module = stack[-1]
                        if type(name) is not str or type(module) is not str:
                            raise CorruptError("a global whose name is not a string")
                        stack[-1] = find(module, name)
                    elif op == 0x8A or op == 0x8B:  # LONG1, LONG4
                        width = 1 if op == 0x8A else 4
                        n = int_from(exactly(data, i, width), "little")
                        i += width
                        push(int_from(exactly(data, i, n), "little", signed=True))
                        i += n
                    elif op == 0x80:  # PROTO
                        if data[i] > 5:
                            raise CorruptError(f"pickle protocol {data[i]} is not known (0 to 5 are)")
                        i += 1
                    elif op == 0x95:  # FRAME
                        if frame:
                            where = f"at byte {i - 1:,}, within the one that ends at {frame:,}"
                            raise CorruptError(f"a frame begins {where}")
                        i += 8
                        frame = i + int_from(exactly(data, i - 8, 8), "little")
                        if frame > size:
                            raise CorruptError("a frame is longer than the pickle: truncated?")
                        fence = min(fence, frame)
                        self.framed = True
                        while i in starts and runs is not None and (run := runs.at(i, frame)) is not None:
                            stack += run[0]
                            i, made, skipped = run[1], made + run[2], runs.skipped
                    elif op == 0x92:  # NEWOBJ_EX
                        made += 1
                        kwargs = stack.pop()
                        args = stack.pop()
                        stack[-1] = self._made(stack[-1], args, kwargs)
                    elif op == 0x8F:  # EMPTY_SET
                        made += 1
                        push(set())
                    elif op == 0x90 or op == 0x91:  # ADDITEMS, FROZENSET
                        items = stack
                        stack = marks.pop()
                        push = stack.append
                        if op == 0x91:
                            made += 1
                            Keys(self._budget).check(items, items)
                            push(frozenset(items))
                        else:
                            if known is not None:
                                refuse_shared(stack[-1], self._taken)
                            self._keys.check(stack[-1], items)
                            if isinstance(stack[-1], set):
                                stack[-1].update(items)
                            else:
                                extend(stack[-1], items)
                    elif op in (0x82, 0x83, 0x84):  # EXT1, EXT2, EXT4: numbers from a registry of the process
                        width = {0x82: 1, 0x83: 2, 0x84: 4}[op]
                        extension = (EXTENSION, f"extension {int_from(exactly(data, i, width), 'little')}")
                        self.globals[extension] = True
                        push(Opaque(*extension))
                        i += width
                    elif op == 0x97:  # NEXT_BUFFER
                        raise CorruptError("it refers to out-of-band buffers, which no file holds")
                    elif op == 0x98:  # READONLY_BUFFER
                        pass
                    elif op in COUNTED:
                        value, i = counted(op, data, i)
                        push(value)
                    else:
                        raise unknown(op, i, size)
                elif op == 0x6A:  # LONG_BINGET
                    push(memo[int_from(data[i : i + 4], "little")])
                    i += 4
                elif op == 0x74:  # TUPLE
                    value = tuple(stack)
                    stack = marks.pop()
                    push = stack.append
                    push(value)
                elif op == 0x29:  # EMPTY_TUPLE
                    if i + 4 < fence and stack and data.startswith(_NEW, i):  # the arguments of an object
                        made += 1
                        i += 2
                        value = stack[-1] = memo[len(memo) + skipped] = self._made(stack[-1], ())
                        if data.startswith(_STATE, i):
                            made += 1
                            i += 2
                            value = memo[len(memo) + skipped] = {}
                            push(value)
                    else:
                        push(())
                elif op == 0x52:  # REDUCE
                    made += 1
                    args = stack.pop()
                    stack[-1] = self._made(stack[-1], args)
                elif op == 0x4D:  # BININT2
                    push(data[i] | data[i + 1] << 8)
                    i += 2
                elif op == 0x51:  # BINPERSID
                    value = stack[-1] = persistent(stack[-1])
                    if type(value) is Opaque:
                        self._note_persistent(value)
                elif op == 0x4A:  # BININT
                    push(int_from(exactly(data, i, 4), "little", signed=True))
                    i += 4
                elif op == 0x7D:  # EMPTY_DICT
                    made += 1
                    push({})
                elif op == 0x62:  # BUILD
                    state = stack.pop()
                    if known is not None:
                        refuse_shared(stack[-1], self._taken)
                    build(stack[-1], state)
                    while i in starts and runs is not None and (run := runs.at(i, frame)) is not None:
                        stack += run[0]
                        i, made, skipped = run[1], made + run[2], runs.skipped
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
                    if known is not None:
                        if op == 0x75 and len(marks) + 1 < shared and (here := notes[len(marks) + 1]):
                            here.append(Note.of(i - 1, items, len(memo)))
                            if not marks:
                                known.learn(data, here)
                            elif not self._taken:
                                known.learn_run(data, here)
                            notes[len(marks) + 1] = []
                        refuse_shared(stack[-1], self._taken)
                    self._set_items(stack[-1], items)
                elif op == 0x4E:  # NONE
                    push(None)
                elif op == 0x47:  # BINFLOAT
                    push(struct.unpack(">d", data[i : i + 8])[0])
                    i += 8
                elif op == 0x5D:  # EMPTY_LIST
                    made += 1
                    push([])
                elif op == 0x65:  # APPENDS
                    items = stack
                    stack = marks.pop()
                    push = stack.append
                    if known is not None:
                        refuse_shared(stack[-1], self._taken)
                    extend(stack[-1], items)
                elif op == 0x61:  # APPEND
                    value = stack.pop()
                    if known is not None:
                        refuse_shared(stack[-1], self._taken)
                    extend(stack[-1], [value])
                elif op == 0x63:  # GLOBAL
                    j = data.index(b"\n", i)
                    k = data.index(b"\n", j + 1)
                    push(find(data[i:j].decode(), data[j + 1 : k].decode()))
                    i = k + 1
                elif op == 0x2E:  # STOP
                    if frame > i:
                        raise CorruptError(f"the pickle ends at byte {i:,}, within a frame that ends at {frame:,}")
                    self._charge(made, memo, seen, marks)
                    if known is not None and not self._taken:
                        known.last = data
                    if text := bomb(max(dict.keys(memo), default=0), size):
                        self.globals[BOMB, text] = True
                    return stack.pop()
                elif op in COUNTED:
                    value, i = counted(op, data, i)
                    push(value)
                elif op in LINES:
                    j = data.index(b"\n", i)
                    line = data[i:j]
                    i = j + 1
                    if op == 0x70:  # PUT
                        memo[place(line)] = stack[-1]
                    elif op == 0x67:  # GET
                        push(memo[place(line)])
                    elif op == 0x50:  # PERSID
                        push(persistent(line.decode("ascii")))
                        if type(stack[-1]) is Opaque:
                            self._note_persistent(stack[-1])
                    else:
                        push(LINES[op](line))
                elif op == 0x6C or op == 0x64:  # LIST, DICT
                    items = stack
                    stack = marks.pop()
                    push = stack.append
                    if op == 0x6C:
                        push(items)
                    else:
                        filled: dict[Any, Any] = {}
                        self._set_items(filled, items)
                        push(filled)
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
                    push(self._made(find(data[i:j].decode(), data[j + 1 : k].decode()), args))
                    i = k + 1
                elif op == 0x6F:  # OBJ
                    cls, *rest = stack
                    stack = marks.pop()
                    push = stack.append
                    push(self._made(cls, tuple(rest)))
                else:
                    raise unknown(op, i, size)
        finally:
            self.end = i

    def _note_persistent(self, value: Opaque) -> None:
        """Name a persistent id that is not of torch.save."""
        if value.module == PERSISTENT:
            self.globals[PERSISTENT, value.name] = True

    def _charge(self, made: int, memo: dict[int, Any], seen: int, marks: list[Any]) -> int:
        """Charge the objects created since the last call; return the number of memo entries charged so far."""
        size = dict.__len__(memo)
        self._budget.objects(made + max(0, size - seen) // 2)
        self._budget.time()
        if len(marks) > _DEEP:
            raise CorruptError(f"its objects are nested deeper than {_DEEP:,} levels")
        return max(size, seen)

    def _shared(self, at: int, memo: dict[int, Any]) -> Item | None:
        """Return the cached item of another pickle that is valid at this byte offset, or None."""
        known = self._known
        item = None if known is None else known.find(self._data, at, memo, self._alone)
        if item is not None:
            self._taken.append(item)
            self._budget.objects(item.cost)
            for name, called in item.globals.items():
                self.globals[name] = called or self.globals.get(name, False)
        return item

    def _alone(self, item: Item, memo: Memo) -> None:
        """Parse an item separately, to get its values and the memo entries that it refers to. Raises Changes if it is
        not a sequence of keys and values."""
        assert self._known is not None
        budget = Budget(self._budget.where, self._budget.size)
        machine = _Machine(item.data + b"N.", self._rebuild, self._persistent, budget)
        stack: list[Any] = []
        machine.run(0, memo, stack, self._known.named)
        if machine.framed or machine.end != len(item.data) + 2 or len(stack) % 2:
            raise Changes
        item.values, item.globals, item.cost = tuple(stack), machine.globals, budget.spent

    def _made(self, what: Any, args: Any, kwargs: Any = None) -> Any:
        """Return the result of a call: rebuilt by the table, or a record of the call."""
        if not isinstance(args, tuple):
            raise CorruptError("call arguments that are not a tuple")
        if isinstance(what, Opaque):
            if what.args is None:
                self.globals[what.module, what.name] = True
                if text := excess(what.module, what.name, args, len(self._data)):
                    self.globals[BOMB, text] = True
                return Opaque(what.module, what.name, args, kwargs)
            made = through_partial(what)
            return made or Opaque(what.module, f"{what.name:.200}(...)", args, kwargs)  # the result of calling a result
        if not callable(what):
            raise CorruptError(f"a call of {type(what).__name__}, which is not callable")
        if 0 < len(args) < _TENSOR:  # functions that copy their arguments have few of them
            for arg in args:
                if isinstance(arg, _COPIED):
                    self._budget.steps(len(arg))
        try:
            made = what(*args) if not kwargs else what(*args, **kwargs)
        except CorruptError:
            raise
        except _DAMAGE:  # invalid arguments, or arguments that the table does not support
            module, name = next((key for key, value in self._rebuild.items() if value is what), ("", "call"))
            if name == "getattr":
                self.globals[module, "getattr(...)"] = True
            if args and name in ("bytes", "bytearray") and (text := large(name, args[0], len(self._data))):
                self.globals[BOMB, text] = True
            return Opaque(module, name, args, kwargs)
        if isinstance(made, Opaque) and made.args is None:  # an attribute of a named thing is a named thing
            self.globals.setdefault((made.module, made.name), False)
        return made

    def _set_items(self, target: Any, items: list[Any]) -> None:
        entries = target.entries if isinstance(target, Opaque) and target.args is not None else target
        if not isinstance(entries, dict):
            raise CorruptError(f"keys are set on a {type(target).__name__}")
        for n in range(0, len(items), 2):
            key = items[n]
            if type(key) is not str:
                self._keys.check(entries, (key,))
            entries[key] = items[n + 1]
