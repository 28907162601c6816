"""What the families of quantized formats look at, and what they return."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ...core.dtypes import DType
from ...core.expr import Kind, operand
from ...core.select import Selection
from ...core.specs import Expr, Input, TensorSpec, kind_of
from ...errors import DataError, Problem
from ...io.pool import run
from ...io.reading import compute
from ...io.tasks import Task
from ...io.tensors import empty
from ...lazy import LazyArray
from ...namespace import Namespace
from .evidence import Evidence, evidence_of

if TYPE_CHECKING:
    import torch

__all__ = ["Family", "Model", "Weight"]

_SMALL = 1 << 20  # largest tensor, in bytes, that is read to find out what others mean


class Weight(NamedTuple):
    """A tensor of the unquantized model.

    Attributes
    ----------
    name
        Its name there, from the root of the checkpoint.
    value
        How it is computed, in the dtype that was asked for.
    consumed
        The stored tensors that it takes the place of, by full names, the codes first: all operands, and whatever else
        the format stores for it (shapes, orders, states). They are not in the dequantized view.
    """

    name: str
    value: Expr | Input
    consumed: tuple[str, ...]


class Family(Protocol):
    """The quantized formats of one writer.

    A module of this package has it as `FAMILY`; `registry.NAMES` lists the modules. It has no state. It decides by
    evidence: what config.json says (``model.evidence``), names, shapes and dtypes. If they contradict each other, or do
    not suffice, it yields a `Problem` ("contradicting-quantization", "undecided-quantization"), and the tensors stay as
    they are stored. Tensors that look quantized and that no family takes have a problem anyway.

    Attributes
    ----------
    name
        The name of the family, for messages.
    methods
        The values of ``quant_method`` in config.json that say that the checkpoint is of this family.
    """

    name: str
    methods: tuple[str, ...]

    def detect(self, model: Model) -> bool:
        """Return whether the checkpoint may have tensors of this family: because config.json says so or, if it names
        no method, because names and dtypes leave nothing else. A family that returns False is not asked for weights."""

    def weights(self, model: Model, dtype: DType) -> Iterator[Weight | Problem]:
        """Yield the weights that the checkpoint has quantized, and what is not known about them.

        What no family consumes stays in the view as it is. A tensor that two families consume stays, too, with a
        problem.

        Parameters
        ----------
        model
            The stored tensors.
        dtype
            The floating-point dtype of the results.
        """


class Model:
    """The tensors of one state of a checkpoint, with what its files say about their quantization.

    Names are full names. A tied name is a name of its own: yield a weight for each; the equal ones are tied again.

    Parameters
    ----------
    view
        The checkpoint, in the state to dequantize.
    config
        The contents of config.json, or of its ``quantization_config``; None looks for the file.

    Attributes
    ----------
    names : dict of str to str
        Full name, in the order of the checkpoint -> the name that owns the tensor.
    evidence : Evidence
        What config.json and the files of its kind say.
    """

    def __init__(self, view: Namespace[Any], config: Mapping[str, Any] | None) -> None:
        self.view = view
        self.specs = view.specs
        self.names: dict[str, str] = {name: name for name in self.specs}
        self.names |= {a: owner for a, owner in view._index.aliases.items() if owner in self.specs}
        self.evidence: Evidence = evidence_of(view, config)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def kind(self, name: str) -> Kind:
        """Return the shape and the dtype of a tensor, without describing it. Raises KeyError."""
        return Kind(*kind_of(self.specs, self.names[name]))

    def spec(self, name: str) -> TensorSpec:
        """Return the spec of a tensor. Raises KeyError."""
        return self.specs[self.names[name]]

    def operand(self, name: str) -> Expr | Input:
        """Return a tensor as an operand of an expression. Raises KeyError."""
        return operand(self.spec(name))

    def ending(self, *endings: str) -> Iterator[str]:
        """Yield what is in front of the endings: ``ending(".weight", ".weight_scale")`` yields the modules that have
        both tensors, in the order of the first."""
        first, *others = endings
        for name in self.names:
            if name.endswith(first):
                stem = name.removesuffix(first)
                if all(stem + other in self.names for other in others):
                    yield stem

    def present(self, names: Collection[str]) -> tuple[str, ...]:
        """Return those of the names that the checkpoint has."""
        return tuple(name for name in names if name in self.names)

    def is_small(self, name: str) -> bool:
        """Return whether `read` reads a tensor. Raises KeyError."""
        return self.spec(name).nbytes <= _SMALL

    def read(self, name: str) -> torch.Tensor:
        """Read a small tensor that says what others mean (a shape, a state). Raises KeyError, and DataError for one
        that is not small."""
        spec = self.spec(name)
        if not self.is_small(name):
            raise DataError(f"{name!r} has {spec.nbytes:,} bytes: too many for what should describe another tensor")
        return LazyArray(self.view._store, spec)[...]

    def read_all(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read many small tensors at once, as `read`: their requests are joined and run in parallel."""
        found: dict[str, torch.Tensor] = {}
        work: list[Iterator[Task]] = []
        for name in dict.fromkeys(names):
            spec = self.spec(name)
            if spec.nbytes > _SMALL:
                raise DataError(f"{name!r} has {spec.nbytes:,} bytes: too many for what should describe another tensor")
            found[name] = empty(spec.shape, spec.dtype.torch)
            work.append(compute.tasks(self.view._store, spec, Selection.all(spec.shape).reads(), found[name]))
        run(chain.from_iterable(work))
        return found
