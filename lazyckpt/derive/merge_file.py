"""Merge files: mergekit's YAML as the rows of a merged view. Nothing is opened here.

The schema is that of mergekit 0.1.5 (mergekit/config.py), the evaluation that of mergekit/plan.py: ``models`` merges
whole models; ``slices`` puts layers one after the other, each merged from the layers of its sources. What is not in
layers comes from the first slice if it is an embedding, else from the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..core.dtypes import DType, dtype_named
from ..errors import DataError, FormatError, some
from ..namespace import Namespace
from .arithmetic import Missing, Operand, Row, check_missing, unlike_names
from .dequantize.evidence import quantized_among
from .merges import Method, method_of, result_dtype
from .settings import Scopes, by_part, depths, layer_of

_KEYS = {"merge_method", "models", "slices", "base_model", "dtype", "out_dtype", "parameters"}
_REFUSED = {
    "modules": "models of several modules are not supported: merge each module in a file of its own",
    "tokenizer_source": "vocabularies are not matched: the models need the same one, and the base's files are copied",
    "tokenizer": "vocabularies are not matched: the models need the same one, and the base's files are copied",
    "chat_template": "put chat_template.jinja into the result afterwards",
}
_EMBEDDINGS = ("embed", "wte", "wpe", "embd", "shared.weight")  # parts of names that come before the layers


@dataclass(frozen=True)
class Source:
    """Layers of a model, or the whole model.

    Attributes
    ----------
    model
        The path of the model, as in the file.
    layers
        The first layer and the one after the last. None: all.
    parameters
        The parameters of this source.
    """

    model: str
    layers: range | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Slice:
    """Layers of the result: their sources, base and parameters."""

    sources: Sequence[Source]
    base: str | None
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class MergeFile:
    """A merge file.

    Attributes
    ----------
    where
        The path of the file, for errors.
    method
        The name of the method.
    slices
        The slices of the result; a single one for ``models``.
    sliced
        Whether the file has ``slices``, so that layers get new numbers.
    base
        The base model, if there is one for all.
    dtype
        The dtype of the result. None: that of the models.
    parameters
        The parameters of all models and slices.
    """

    where: str
    method: str
    slices: Sequence[Slice]
    sliced: bool
    base: str | None
    dtype: DType | None
    parameters: Mapping[str, Any]

    @property
    def models(self) -> list[str]:
        """The paths of all models, the base first, each once."""
        bases = [self.base, *(one.base for one in self.slices)]
        sources = [source.model for one in self.slices for source in one.sources]
        return list(dict.fromkeys([base for base in bases if base is not None] + sources))

    @property
    def donor(self) -> str:
        """The model whose configuration and tokenizer the result has."""
        return self.base or self.slices[0].sources[0].model


def parse(table: Any, where: str) -> MergeFile:
    """Return a merge file of the object that YAML yields.

    Raises FormatError if it has not the form of a merge file, and DataError for what is not supported.
    """
    if not isinstance(table, Mapping):
        raise FormatError(f"{where} is no merge file: it should be a table with merge_method and models or slices")
    for key, why in _REFUSED.items():
        if table.get(key) is not None:
            raise DataError(f"{where}: {key} is not supported: {why}")
    _only(table, _KEYS | _REFUSED.keys(), where)
    if "merge_method" not in table:
        raise FormatError(f"{where} has no merge_method")
    if bool(table.get("models")) == bool(table.get("slices")):
        raise FormatError(f"{where} should have either models or slices")
    base = None if table.get("base_model") is None else _model(table["base_model"], where)
    name = str(table["merge_method"])
    with _told(where):
        method_of(name)
    if table.get("models"):
        sources = [_source(one, where, sliced=False) for one in _list(table["models"], where, "models")]
        if base is not None and base not in {source.model for source in sources}:
            sources.append(Source(base))
        slices = [Slice(sources, base, {})]
    else:
        slices = [_slice(one, base, where) for one in _list(table["slices"], where, "slices")]
    dtype = table.get("out_dtype") or table.get("dtype")
    with _told(where):
        kind = None if dtype is None else result_dtype(dtype_named(str(dtype).removeprefix("torch.")))
    parameters = _settings(table.get("parameters"), where)
    return MergeFile(where, name, slices, bool(table.get("slices")), base, kind, parameters)


@contextmanager
def _told(where: str) -> Iterator[None]:
    """Put the file in front of errors of its content."""
    try:
        yield
    except DataError as e:
        raise DataError(f"{where}: {e}") from None


def _only(table: Mapping[Any, Any], known: set[str], where: str) -> None:
    unknown = [key for key in table if key not in known]
    if unknown:
        raise FormatError(f"{where}: {unknown[0]!r} is not known there; known are {', '.join(sorted(known))}")


def _list(value: Any, where: str, key: str) -> list[Any]:
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise FormatError(f"{where}: {key} should be a list of tables")
    return value


def _slice(table: Mapping[str, Any], base: str | None, where: str) -> Slice:
    if table.get("residual_weight") is not None:
        raise DataError(f"{where}: residual_weight is not supported")
    _only(table, {"sources", "base_model", "parameters", "residual_weight"}, where)
    sources = [_source(one, where, sliced=True) for one in _list(table.get("sources"), where, "sources")]
    if not sources:
        raise FormatError(f"{where}: a slice has no sources")
    if len({len(source.layers or ()) for source in sources}) > 1:
        raise FormatError(f"{where}: the sources of a slice should have the same number of layers")
    own = base if table.get("base_model") is None else _model(table["base_model"], where)
    return Slice(sources, own, _settings(table.get("parameters"), where))


def _source(table: Mapping[str, Any], where: str, sliced: bool) -> Source:
    _only(table, {"model", "parameters", *(("layer_range",) if sliced else ())}, where)
    if "model" not in table:
        raise FormatError(f"{where}: a source has no model")
    layers = None
    if sliced:
        given = table.get("layer_range")
        if not isinstance(given, list) or len(given) != 2 or not all(type(n) is int and n >= 0 for n in given):
            raise FormatError(f"{where}: layer_range should be [first, end], two numbers, not {given!r:.40}")
        layers = range(*given)
        if not layers:
            raise FormatError(f"{where}: layer_range {given} has no layer: the end is the number after the last one")
    return Source(_model(table["model"], where), layers, _settings(table.get("parameters"), where))


def _model(value: Any, where: str) -> str:
    """Return the path of a model; mergekit's other spelling is a table with path and revision."""
    if isinstance(value, Mapping):
        inner = value.get("model", value)
        if value.get("lora") or not isinstance(inner, Mapping | str):
            raise DataError(f"{where}: a model with a LoRA is not supported: apply the adapter first")
        revision = "" if isinstance(inner, str) else inner.get("revision")
        path = inner if isinstance(inner, str) else inner.get("path", "")
        value = f"{path}@{revision}" if revision else path
    if not isinstance(value, str) or not value:
        raise FormatError(f"{where}: a model is a path, not {value!r:.60}")
    if "+" in value and "://" not in value:
        raise DataError(f"{where}: {value!r} is a model with a LoRA, which is not supported: apply the adapter first")
    return value


def _settings(table: Any, where: str) -> dict[str, Any]:
    if table is None:
        return {}
    if not isinstance(table, Mapping):
        raise FormatError(f"{where}: parameters should be a table")
    return {str(key): by_part(value, where) for key, value in table.items()}


def rows(file: MergeFile, views: Mapping[str, Namespace[Any]], missing: Missing = "error") -> Iterator[Row]:
    """Yield the tensors of the result.

    Parameters
    ----------
    file
        The merge file.
    views
        The model's path -> its view. The operands' numbers follow the order of this mapping.
    missing
        As for `combined`; "keep" takes the tensor of the model that the configuration is of, or of the first that has
        it. Only without ``slices``.

    Raises
    ------
    DataError
        The method takes another number of models; a parameter has no value; a name or a shape is missing in a model.
    """
    check_missing(missing)
    method = method_of(file.method)
    numbers = {model: n for n, model in enumerate(views)}
    for one in file.slices:
        models = [source.model for source in one.sources]
        based = method.base != "no" and one.base in models
        with _told(file.where):
            method.check(file.method, len(models) - based, based)
    if file.sliced:
        if missing != "error":
            raise DataError(f"{file.where}: missing={missing!r} is for models, not for slices of them: leave it out")
        yield from _sliced(file, method, views, numbers)
        return
    (only,) = file.slices
    first = views[file.donor]
    depth = depths(first)
    every = dict.fromkeys(name for model in (file.donor, *views) for name in views[model])
    unlike = {} if missing == "error" else unlike_names(list(views.values()))
    _same_names(file, only, views, [(name, [name] * len(only.sources)) for name in every if name not in unlike])
    for name in every:
        if name in unlike:
            if missing == "keep":
                owner = next(model for model in (file.donor, *views) if views[model]._spec(name) is not None)
                yield Row(name, [(numbers[owner], name)], None)
            continue
        yield _row(file, method, only, numbers, name, [name] * len(only.sources), depth(name))


def _sliced(
    file: MergeFile, method: Method, views: Mapping[str, Namespace[Any]], numbers: Mapping[str, int]
) -> Iterator[Row]:
    first = views[file.donor]
    layers: dict[int, list[str]] = {}
    prefixes: dict[str, None] = {}
    for name in first:
        layer = layer_of(name)
        if layer is not None:
            prefixes[layer[0]] = None
            layers.setdefault(layer[1], []).append(name)
    if len(prefixes) != 1:
        raise DataError(
            f"{file.where}: slices need a model with one stack of layers; {file.donor} has {some(prefixes) or 'none'}"
        )
    (prefix,) = prefixes
    for name in first:
        if layer_of(name) is None:
            one = file.slices[0 if any(part in name for part in _EMBEDDINGS) else -1]
            _same_names(file, one, views, [(name, [name] * len(one.sources))])
            yield _row(file, method, one, numbers, name, [name] * len(one.sources), 0.0)
    count = 0
    for one in file.slices:
        length = len(one.sources[0].layers or ())
        for k in range(length):
            at = [(source.layers or range(0))[k] for source in one.sources]
            kinds = [views[source.model] for source in one.sources]
            lead, tails = f"{prefix}." if prefix else "", list[str]()
            for view, n in zip(kinds, at, strict=True):
                start = f"{lead}{n}."
                tails += [name.removeprefix(start) for name in view if name.startswith(start)]
            if not tails:
                raise DataError(f"{file.where}: {one.sources[0].model} has no layer {at[0]}")
            found = [(f"{lead}{count}.{tail}", [f"{lead}{n}.{tail}" for n in at]) for tail in dict.fromkeys(tails)]
            _same_names(file, one, views, found)
            for name, names in found:
                yield _row(file, method, one, numbers, name, names, k / (length - 1) if length > 1 else 1.0)
            count += 1


def _same_names(
    file: MergeFile, one: Slice, views: Mapping[str, Namespace[Any]], found: Sequence[tuple[str, Sequence[str]]]
) -> None:
    """Raise DataError if a model lacks names, or shapes differ."""
    lacks: dict[str, list[str]] = {}
    shapes: list[str] = []
    for name, names in found:
        kinds: dict[tuple[int, ...], None] = {}
        for source, inner in zip(one.sources, names, strict=True):
            spec = views[source.model]._spec(inner)
            if spec is None:
                lacks.setdefault(source.model, []).append(inner)
            else:
                kinds[spec.shape] = None
        if len(kinds) > 1:
            shapes.append(f"{name!r} is {' and '.join('x'.join(map(str, shape)) for shape in kinds)}")
    parts = [f"{model} lacks {some(map(repr, names), 4)}" for model, names in lacks.items()]
    parts += [f"shapes differ: {some(shapes, 4)}"] if shapes else []
    if parts:
        coded = quantized_among(views[model] for model in dict.fromkeys(source.model for source in one.sources))
        advice = coded or (
            "Models of different vocabularies are not merged; missing='skip' leaves these tensors out. "
            "For other names: lazyckpt.open(path).rename(...), then lazyckpt.merge"
        )
        raise DataError(f"{file.where}: the models have other names or shapes: {'; '.join(parts)}. {advice}")


def _row(
    file: MergeFile,
    method: Method,
    one: Slice,
    numbers: Mapping[str, int],
    name: str,
    names: Sequence[str],
    t: float,
) -> Row:
    """Return a tensor of the result; ``names``: its name in each source."""
    order = list(zip(one.sources, names, strict=True))
    base = None
    if method.base != "no":
        base = next((entry for entry in order if entry[0].model == one.base), None)
        order = [entry for entry in order if entry is not base]
    shared = [one.parameters, file.parameters]
    scopes = Scopes(shared, [[source.parameters, *shared] for source, _ in order])
    with _told(file.where):
        values = method.values(name, [inner for _, inner in order], t, scopes)
    operands = [(numbers[source.model], inner) for source, inner in ([] if base is None else [base]) + order]

    def formula(name: str, found: Sequence[Operand]) -> Operand:
        start, rest = (None, found) if base is None else (found[0], found[1:])
        with _told(file.where):
            return method.build(name, start, rest, values)

    return Row(name, operands, formula)
