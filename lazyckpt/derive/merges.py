"""The methods that merge models, as expressions. Their parameters and defaults are those of mergekit 0.1.5."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Any

from ..core.dtypes import DType, dtype_of
from ..core.expr import make
from ..core.index import Index
from ..core.units import plural
from ..errors import DataError
from ..io.storage.base import Store
from ..namespace import Namespace
from .arithmetic import Missing, Operand, combined, linear
from .settings import Scopes, by_glob, depths, number, share, whole_number, yes_or_no

REQUIRED = object()  # a parameter without a default
# From the tensor's name, the base (None without one), the operands without it, and the values of all parameters.
Build = Callable[[str, Operand | None, Sequence[Operand], Mapping[str, Any]], Operand]


@dataclass(frozen=True)
class Parameter:
    """A parameter of a method: its type, its default, and whether each model has a value of its own."""

    convert: Callable[[Any], Any]
    default: Any = REQUIRED
    each: bool = False


@dataclass(frozen=True)
class Method:
    """A method that merges models.

    Attributes
    ----------
    build
        Return the expression of a tensor.
    base
        Whether there is a base: "no", "yes", or "maybe".
    least, most
        How many models there are beside the base.
    parameters
        Name -> parameter.
    """

    build: Build
    base: str
    least: int = 1
    most: int = 1 << 30
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    def check(self, name: str, count: int, has_base: bool) -> None:
        """Raise DataError if the method takes another number of models."""
        if self.base == "yes" and not has_base:
            raise DataError(f"{name} needs a base model: base= or base_model")
        if self.base == "no" and has_base:
            raise DataError(f"{name} has no base model: give it as one of the models, or leave it out")
        if not self.least <= count <= self.most:
            wanted = "at least " * (self.least < self.most) + plural(self.least, "model")
            raise DataError(f"{name} merges {wanted} beside the base, not {count}")

    def values(self, name: str, names: Sequence[str], t: float, scopes: Scopes) -> dict[str, Any]:
        """Return the parameters of a tensor. Raises DataError if one has no value.

        Parameters
        ----------
        name
            The name of the result.
        names
            The name of the tensor in each model (without the base).
        t
            Where its layer is among the layers.
        scopes
            The settings.
        """
        found: dict[str, Any] = {}
        for key, one in self.parameters.items():
            values = (
                scopes.values(names, key, t, one.convert) if one.each else [scopes.value(name, key, t, one.convert)]
            )
            if None in values and one.default is REQUIRED:
                raise DataError(f"the parameter {key!r} has no value for {name!r}: give one for all names")
            values = [one.default if value is None else value for value in values]
            found[key] = tuple(values) if one.each else values[0]
        return found


def _linear(name: str, base: Operand | None, operands: Sequence[Operand], values: Mapping[str, Any]) -> Operand:
    weights = values["weight"]
    total = fsum(weights) if values["normalize"] else 1.0
    if not total:
        raise DataError(f"linear: the weights of {name!r} sum to 0: change them, or say normalize=False")
    return linear(operands, [weight / total for weight in weights])


def _slerp(name: str, base: Operand | None, operands: Sequence[Operand], values: Mapping[str, Any]) -> Operand:
    assert base is not None  # `Method.check`
    return make("merge.slerp", base, operands[0], t=values["t"], eps=1e-8)


def _passthrough(name: str, base: Operand | None, operands: Sequence[Operand], values: Mapping[str, Any]) -> Operand:
    (scale,) = values["scale"]
    return operands[0] if scale is None else linear(operands, [scale])


def _spherical(op: str, *keys: str) -> Build:
    def build(name: str, base: Operand | None, operands: Sequence[Operand], values: Mapping[str, Any]) -> Operand:
        if len(operands) == 1:
            return operands[0]
        params = {"weights" if key == "weight" else key: values[key] for key in keys}
        if base is not None:
            return make(op, base, *operands, based=True, **params)
        return make(op, *operands, **params)

    return build


def _nuslerp(name: str, base: Operand | None, operands: Sequence[Operand], values: Mapping[str, Any]) -> Operand:
    if values["nuslerp_row_wise"] or not values["nuslerp_flatten"]:
        raise DataError("nuslerp is supported for whole tensors only: leave out nuslerp_row_wise and nuslerp_flatten")
    return _spherical("merge.nuslerp", "weight")(name, base, operands, values)


def _multislerp(name: str, base: Operand | None, operands: Sequence[Operand], values: Mapping[str, Any]) -> Operand:
    if len(operands) > 1 and values["normalize_weights"] and not fsum(values["weight"]):
        raise DataError(f"multislerp: the weights of {name!r} sum to 0: change them, or say normalize_weights=False")
    return _spherical("merge.multislerp", "weight", "normalize_weights", "eps")(name, base, operands, values)


def _model_stock(name: str, base: Operand | None, operands: Sequence[Operand], values: Mapping[str, Any]) -> Operand:
    assert base is not None  # `Method.check`
    if values["filter_wise"]:
        raise DataError("model_stock is supported for whole tensors only: leave out filter_wise")
    return make("merge.model_stock", base, *operands)


def _task_vectors(
    sparsify: str | None, consensus: str | None, *, normalize: bool = False, rescale: bool = False
) -> Method:
    def build(name: str, base: Operand | None, operands: Sequence[Operand], values: Mapping[str, Any]) -> Operand:
        assert base is not None  # `Method.check`
        given = values.get("consensus", consensus)
        if given not in (None, "sum", "count"):
            raise DataError(f"consensus={given!r}: it is 'sum' or 'count'")
        params = {
            "weights": values["weight"], "sparsify": sparsify, "consensus": given, "normalize": values["normalize"],
            "rescale": values["rescale"], "scale": values["lambda"],
        }  # fmt: skip
        if sparsify:
            params["densities"] = values["density"]
        if sparsify == "outliers":
            params["gammas"] = values["gamma"]
        if sparsify == "random":
            params |= {"seed": values["seed"], "name": name}
        return make("merge.task_vectors", base, *operands, **params)

    parameters = {
        "weight": Parameter(number, each=True),
        "normalize": Parameter(yes_or_no, normalize),
        "rescale": Parameter(yes_or_no, rescale),
        "lambda": Parameter(number, 1.0),
        "int8_mask": Parameter(yes_or_no, False),  # mergekit's way to save memory: the same result
        "density": Parameter(share, 1.0, each=True),
    }
    if sparsify == "outliers":
        parameters["gamma"] = Parameter(share, 0.01, each=True)
    if sparsify == "random":
        parameters["seed"] = Parameter(whole_number, 0)
    if consensus:
        parameters["consensus"] = Parameter(str, consensus)
    return Method(build, "yes", parameters=parameters)


_WEIGHT = Parameter(number, each=True)

METHODS: Mapping[str, Method] = {
    "linear": Method(_linear, "no", parameters={"weight": _WEIGHT, "normalize": Parameter(yes_or_no, True)}),
    "passthrough": Method(_passthrough, "no", 1, 1, {"scale": Parameter(number, None, each=True)}),
    "slerp": Method(_slerp, "yes", 1, 1, {"t": Parameter(number)}),
    "nuslerp": Method(
        _nuslerp, "maybe", 2, 2,
        {
            "weight": _WEIGHT,
            "nuslerp_row_wise": Parameter(yes_or_no, False),
            "nuslerp_flatten": Parameter(yes_or_no, True),
        },
    ),
    "multislerp": Method(
        _multislerp, "maybe",
        parameters={
            "weight": _WEIGHT,
            "normalize_weights": Parameter(yes_or_no, True),
            "eps": Parameter(number, 1e-8),
        },
    ),
    "karcher": Method(
        _spherical("merge.karcher", "max_iter", "tol"), "no",
        parameters={"max_iter": Parameter(whole_number, 10), "tol": Parameter(number, 1e-5)},
    ),
    "model_stock": Method(_model_stock, "yes", 2, parameters={"filter_wise": Parameter(yes_or_no, False)}),
    "task_arithmetic": _task_vectors(None, None),
    "ties": _task_vectors("magnitude", "sum", normalize=True),
    "dare_ties": _task_vectors("random", "sum", rescale=True),
    "dare_linear": _task_vectors("random", None, rescale=True),
    "breadcrumbs": _task_vectors("outliers", None),
    "breadcrumbs_ties": _task_vectors("outliers", "sum"),
}  # fmt: skip

_NOT_SUPPORTED = ("della", "della_linear", "sce", "ram", "ramplus_tl", "nearswap", "arcee_fusion")


def method_of(name: str) -> Method:
    """Return the method of a name. Raises DataError."""
    found = METHODS.get(name)
    if found is None:
        if name in _NOT_SUPPORTED:
            raise DataError(f"mergekit's method {name!r} is not supported; supported are: {', '.join(METHODS)}")
        raise DataError(f"there is no method {name!r}; there are: {', '.join(METHODS)}")
    return found


def result_dtype(dtype: DType) -> DType:
    """Return the dtype of the result of a merge. Raises DataError if it is not floating-point."""
    if not dtype.is_floating_point:
        raise DataError(f"dtype={dtype}: the result of a merge is floating-point, such as torch.bfloat16")
    return dtype


def merged(
    models: Sequence[Namespace[Any]],
    method: str,
    weights: Any,
    base: Namespace[Any] | None,
    dtype: Any,
    missing: Missing,
    parameters: Mapping[str, Any],
) -> tuple[Store, Index]:
    """Return the merge of models: see `lazyckpt.merge`."""
    found = method_of(method)
    others = [model for model in models if model is not base]
    if base is None and method == "slerp" and len(models) == 2:
        base, *others = models
    if not others:
        raise DataError(f"{method}: there are no models to merge")
    found.check(method, len(others), base is not None)
    scopes = _scopes(method, found, len(others), weights, parameters)
    views = others if base is None else [base, *others]
    depth = depths(name for view in views for name in view)

    def formula(name: str, operands: Sequence[Operand]) -> Operand:
        start, rest = (None, operands) if base is None else (operands[0], operands[1:])
        return found.build(name, start, rest, found.values(name, [name] * len(rest), depth(name), scopes))

    kind = None if dtype is None else result_dtype(dtype_of(dtype))
    return combined(views, formula, what=f"the merge by {method}", format="merged", missing=missing, dtype=kind)


def _scopes(method: str, found: Method, count: int, weights: Any, parameters: Mapping[str, Any]) -> Scopes:
    """Return the settings that `lazyckpt.merge` is given."""
    given = {"lambda" if key == "lambda_" else key: value for key, value in parameters.items() if value is not None}
    if "weight" in found.parameters:
        given["weight"] = 1.0 if weights is None else weights
    elif weights is not None:
        raise DataError(f"{method} has no weights; it has: {', '.join(found.parameters)}")
    unknown = given.keys() - found.parameters.keys()
    if unknown:
        names = ", ".join("lambda_" if key == "lambda" else key for key in found.parameters)
        raise DataError(f"{method} has no parameter {min(unknown)!r}; it has: {names.replace('weight', 'weights', 1)}")
    each: list[dict[str, Any]] = [{} for _ in range(count)]
    shared: dict[str, Any] = {}
    for key, value in given.items():
        if not found.parameters[key].each:
            shared[key] = by_glob(value)
            continue
        values = list(value) if isinstance(value, list | tuple) else [value] * count
        if len(values) != count:
            called = "weights" if key == "weight" else key
            raise DataError(f"{called} has {len(values)} entries for {count} models: one for each, without the base")
        for table, one in zip(each, values, strict=True):
            table[key] = by_glob(one)
    return Scopes([shared], [[table] for table in each])
