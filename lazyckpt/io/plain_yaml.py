"""YAML documents of checkpoints as plain objects, within limits; no tag makes an object of a class.

PyYAML reads the events of a document: by libyaml, where it was built with it, which is five times as fast. They are
put together here, without recursion and without constructing objects of classes. A document is charged for what its
aliases expand to, because whatever shows or writes it later visits every copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import CorruptError, FormatError
from .containers.pickle.records import short
from .limits import LEVELS, Budget
from .storage.base import Store

_MOST = 1 << 20  # bytes of a document; honest ones have less than 100 KB, and without libyaml a MiB takes seconds
_LONGEST = 1 << 12  # characters of a number or a date
_MERGE = "tag:yaml.org,2002:merge"
_TEXT = "tag:yaml.org,2002:str"
_PLAIN = "tag:yaml.org,2002:"


def load_yaml(store: Store, path: str) -> Any:
    """Return the content of a YAML file. An object with a tag of its own is ``{"_tag_": tag, "_value_": plain value}``.

    Raises FormatError if PyYAML is not installed, and CorruptError for what is no YAML or more than a file of its size
    can honestly describe.
    """
    where = f"{store.root}/{path}"
    size = store.stat(path).size
    if size > _MOST:
        raise CorruptError(f"{where}: {size:,} bytes are too many for a configuration: it is damaged or hostile")
    return parse_yaml(bytes(store.read(path, 0, size)) if size else b"", where)


def parse_yaml(data: bytes, where: str, libyaml: bool = True) -> Any:
    """Return the content of a YAML document. Raises what `load_yaml` does. ``libyaml``: whether to use it if it is
    there.

    >>> parse_yaml(b"a: [1, 2.5, yes]", "x.yaml")
    {'a': [1, 2.5, True]}
    """
    try:
        import yaml
    except ImportError as e:
        raise FormatError(f"{where} is YAML, which takes a package: pip install pyyaml ({e})") from None
    kind: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader) if libyaml else yaml.SafeLoader
    loader: Any = None
    try:
        loader = kind(data)
        return _Document(loader, Budget(where, len(data))).value
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as e:
        raise CorruptError(f"{where} is no YAML that can be read ({' '.join(str(e).split())[:200]})") from None
    finally:
        if loader is not None:
            loader.dispose()


class _Node(NamedTuple):
    """A finished node. ``text``: of a scalar, as it is written; ``size``: the nodes in it, with those that aliases
    stand for; ``height``: the levels below it; ``merges``: whether it is a merge key (<<)."""

    value: Any
    text: str | None = None
    size: int = 1
    height: int = 0
    merges: bool = False


@dataclass(slots=True)
class _Open:
    """A list or table whose end has not been read. ``key``: the key whose value comes next; ``texts``: keys so far, as
    they are written."""

    value: list[Any] | dict[Any, Any]
    tag: str
    anchor: str | None
    size: int = 1
    height: int = 0
    key: _Node | None = None
    texts: set[str] = field(default_factory=set)


class _Document:
    """The only document of a stream. Raises CorruptError for nodes in themselves, for merge keys, whose expansion is
    not bounded, and for keys that are there twice; the errors of PyYAML; ValueError."""

    def __init__(self, loader: Any, budget: Budget) -> None:
        import yaml

        self._loader, self._budget, self._yaml = loader, budget, yaml
        self._anchors: dict[str, _Node | None] = {}  # None: of a node that is not finished
        self.value: Any = None
        loader.get_event()  # the start of the stream
        if not loader.check_event(yaml.StreamEndEvent):
            loader.get_event()  # the start of the document
            self.value = self._root()
            loader.get_event()  # its end
            if not loader.check_event(yaml.StreamEndEvent):
                raise ValueError("several documents in place of one")

    def _root(self) -> Any:
        loader, budget, yaml = self._loader, self._budget, self._yaml
        stack: list[_Open] = []
        while True:
            event = loader.get_event()
            budget.time()
            if isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
                self._check_level(len(stack))
                anchor = self._new_anchor(event)
                is_list = isinstance(event, yaml.SequenceStartEvent)
                of = yaml.SequenceNode if is_list else yaml.MappingNode
                stack.append(_Open([] if is_list else {}, self._tag(of, None, event), anchor))
                budget.objects()
                continue
            if isinstance(event, yaml.ScalarEvent):
                self._check_level(len(stack))
                node, anchor = self._scalar(event), self._new_anchor(event)
                budget.objects()
            elif isinstance(event, yaml.AliasEvent):
                node, anchor = self._alias(event, len(stack)), None
                budget.objects(node.size)
            else:  # the end of a list or table
                closed = stack.pop()
                anchor = closed.anchor
                node = _Node(_tagged(closed.tag, closed.value), None, closed.size, closed.height)
            if anchor is not None:
                self._anchors[anchor] = node
            if not stack:
                self._no_merge(node)
                return node.value
            self._put(stack[-1], node)

    def _check_level(self, level: int) -> None:
        if level > LEVELS:
            raise CorruptError(f"{self._budget.where}: it is nested deeper than {LEVELS} levels: hostile")

    def _new_anchor(self, event: Any) -> str | None:
        anchor: str | None = event.anchor
        if anchor is not None:
            if anchor in self._anchors:
                raise ValueError(f"the anchor {short(anchor)} is there twice")
            self._anchors[anchor] = None
        return anchor

    def _alias(self, event: Any, level: int) -> _Node:
        if event.anchor not in self._anchors:
            raise ValueError(f"no value has the anchor of the alias {short(event.anchor)}")
        found = self._anchors[event.anchor]
        if found is None:
            raise CorruptError(f"{self._budget.where}: it contains itself: hostile")
        self._check_level(level + found.height)
        return found

    def _tag(self, of: Any, value: str | None, event: Any) -> str:
        tag: str | None = event.tag
        found: str = self._loader.resolve(of, value, event.implicit) if tag is None or tag == "!" else tag
        return found

    def _scalar(self, event: Any) -> _Node:
        text: str = event.value
        tag = self._tag(self._yaml.ScalarNode, text, event)
        if tag == _TEXT:
            return _Node(text, text)
        if len(text) > _LONGEST:
            raise CorruptError(
                f"{self._budget.where}: a number or date of {len(text):,} characters: damaged or hostile"
            )
        if _is_own(tag):
            return _Node(_tagged(tag, text), text)
        if tag == _MERGE:
            return _Node(text, text, merges=True)
        node = self._yaml.ScalarNode(tag, text, event.start_mark, event.end_mark)
        return _Node(self._loader.construct_object(node), text)

    def _put(self, at: _Open, node: _Node) -> None:
        at.size += node.size
        at.height = max(at.height, node.height + 1)
        if isinstance(at.value, list):
            self._no_merge(node)
            at.value.append(node.value)
        elif at.key is None:
            self._check_key(at, node)
            at.key = node
        else:
            self._no_merge(node)
            at.value[at.key.value] = node.value
            at.key = None

    def _check_key(self, at: _Open, key: _Node) -> None:
        where = self._budget.where
        if key.merges:
            raise CorruptError(f"{where}: it has a merge key (<<), which no writer of checkpoints writes")
        try:
            twice = key.value in at.value or key.text in at.texts
        except TypeError:
            raise CorruptError(f"{where}: the key {short(key.value)} is no text or number: damaged") from None
        if twice:
            raise CorruptError(f"{where}: the key {short(key.text)} is there twice: which one counts is unknown")
        if key.text is not None:
            at.texts.add(key.text)

    def _no_merge(self, node: _Node) -> None:
        if node.merges:
            raise ValueError("a merge key (<<) is no value")


def _is_own(tag: str) -> bool:
    return not tag.startswith(_PLAIN) or tag.startswith(f"{_PLAIN}python/")


def _tagged(tag: str, value: Any) -> Any:
    """Return a value; with its tag, unless YAML itself defines the tag."""
    return {"_tag_": tag.removeprefix(_PLAIN), "_value_": value} if _is_own(tag) else value
