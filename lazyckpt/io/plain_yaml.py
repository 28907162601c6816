"""YAML documents of checkpoints as plain objects, within limits; no tag makes an object of a class.

The parser is PyYAML's own, in Python: it raises an error where the one in C would run out of stack. A document is
charged for what its aliases expand to, because whatever shows or writes it later visits every copy.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..errors import CorruptError, FormatError
from .containers.pickle.records import short
from .limits import LEVELS, Budget
from .storage.base import Store

_MOST = 1 << 20  # bytes of a document; honest ones have less than 100 KB, and a MiB takes seconds to parse
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


def parse_yaml(data: bytes, where: str) -> Any:
    """Return the content of a YAML document. Raises what `load_yaml` does.

    >>> parse_yaml(b"a: [1, 2.5, yes]", "x.yaml")
    {'a': [1, 2.5, True]}
    """
    try:
        import yaml
    except ImportError as e:
        raise FormatError(f"{where} is YAML, which takes a package: pip install pyyaml ({e})") from None
    loader: Any = None
    try:
        loader = yaml.SafeLoader(data)
        root = loader.get_single_node()
        if root is None:
            return None
        _check(root, Budget(where, len(data)))
        return _plain(loader, root)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as e:
        raise CorruptError(f"{where} is no YAML that can be read ({' '.join(str(e).split())[:200]})") from None
    finally:
        if loader is not None:
            loader.dispose()


def _check(root: Any, budget: Budget) -> None:
    """Charge all nodes, each as often as aliases refer to it. Raises CorruptError for nodes in themselves, for merge
    keys, whose expansion is not bounded, and for keys that are there twice."""
    import yaml

    sizes: dict[int, int] = {}  # finished nodes

    def size_of(node: Any, level: int, above: frozenset[int]) -> int:
        if id(node) in sizes:
            return sizes[id(node)]
        if id(node) in above or level > LEVELS:
            raise CorruptError(f"{budget.where}: it contains itself, or is nested deeper than {LEVELS} levels: hostile")
        budget.time()
        inner: list[Any] = []
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if any(key.tag == _MERGE for key, _ in node.value):
                raise CorruptError(f"{budget.where}: it has a merge key (<<), which no writer of checkpoints writes")
            twice = next((key for key, count in Counter(keys).items() if count > 1), None)
            if twice is not None:
                raise CorruptError(
                    f"{budget.where}: the key {short(twice)} is there twice: which one counts is unknown"
                )
            inner = [one for pair in node.value for one in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        elif node.tag != _TEXT and len(node.value) > _LONGEST:
            raise CorruptError(
                f"{budget.where}: a number or date of {len(node.value):,} characters: damaged or hostile"
            )
        total = 1 + sum(size_of(one, level + 1, above | {id(node)}) for one in inner)
        sizes[id(node)] = total
        return total

    budget.objects(size_of(root, 0, frozenset()))


def _plain(loader: Any, node: Any) -> Any:
    import yaml

    own = not node.tag.startswith(_PLAIN) or node.tag.startswith(f"{_PLAIN}python/")
    if isinstance(node, yaml.MappingNode):
        value: Any = {_key(loader, key): _plain(loader, one) for key, one in node.value}
    elif isinstance(node, yaml.SequenceNode):
        value = [_plain(loader, one) for one in node.value]
    elif own:
        value = node.value
    else:
        value = loader.construct_object(node)
    return {"_tag_": node.tag.removeprefix(_PLAIN), "_value_": value} if own else value


def _key(loader: Any, node: Any) -> Any:
    key = _plain(loader, node)
    try:
        hash(key)
    except TypeError:
        raise CorruptError(f"{loader.name}: the key {short(key)} is no text or number: damaged") from None
    return key
