"""The last step of an optimizer, computed from the states that it stores: which rule, and with which numbers.

An update is what the last step added to a weight. Let d be the direction of the step (core/ops/updating.py), w the
weight as it is stored, after the step, lr the learning rate and wd a decoupled weight decay. Optimizers compute
``w = w_before * (1 - lr * wd) - lr * d``, so the update is ``w - w_before = -(lr / (1 - lr * wd)) * (d + wd * w)``.
Without a learning rate the update is that of a small one, in units of it: ``-(d + wd * w)``.

The states after a step determine d for Adam and AdamW, for SGD with momentum, for Muon without Nesterov's rule, and for
transformers' Adafactor with ``beta1``. For Lion, SGD and Muon with Nesterov's rule the direction also depends on the
gradient. Without it, d is the direction for a gradient that stays the same from step to step, which is in the moment
alone; such an update is not `exact`. Adafactor without a first moment needs the gradient.

Nothing is assumed of what a checkpoint does not record: such parameters are left out, and a problem says what to pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.expr import as_expr, computed, make, of_one_store, operand
from ..core.index import Index
from ..core.names import matcher
from ..core.specs import Expr, Input, TensorSpec
from ..errors import DataError, Problem, some
from ..io.storage.base import Store
from ..namespace import Namespace
from .groups import recorded
from .sources import Sources

if TYPE_CHECKING:
    import torch
else:
    from ..deferred import torch

OPTIMIZERS = ("adamw", "adam", "lion", "sgd", "adafactor", "muon")
OPTIONS = (
    "lr", "betas", "eps", "weight_decay", "step", "bias_correction", "momentum", "nesterov", "beta1", "clip_threshold",
    "relative_step", "scale_parameter", "warmup_init", "beta2_decay", "d", "ns_coefficients", "ns_steps",
    "adjust_lr_fn",
)  # fmt: skip
_WEIGHTS = ("fp32", "weights")  # the first one that has a parameter is what the optimizer changes
# Options of optimizers whose states have the names of Adam's: LAMB, 1-bit Adam, LARS, Adafactor, NAdam, Prodigy.
_NOT_ADAM = (
    "max_coeff",
    "freeze_step",
    "grad_averaging",
    "trust_coefficient",
    "clip_threshold",
    "momentum_decay",
    "d_coef",
)


@dataclass(frozen=True, slots=True)
class Step:
    """How the last step of a parameter is computed: ``-(scale * direction + decay * weight)``."""

    optimizer: str
    """One of `OPTIMIZERS`."""
    lr: float | None
    """The learning rate; None if it is not known, or is part of the direction."""
    rate: str
    """Where the learning rate is from: "recorded", "scheduled" (recorded after the scheduler has set that of the next
    step), "given", "relative" (Adafactor's own), "unknown"."""
    exact: bool
    """Whether the states determine the direction."""
    scale: float
    """What the direction is multiplied by."""
    decay: float
    """What the weight is multiplied by."""
    bounded: bool
    """Whether elements of the direction are at most about 1, as Adam's and Lion's."""
    direction: TensorSpec
    """The direction."""
    weight: TensorSpec
    """The weight after the step."""
    update: TensorSpec
    """The update."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The last steps of the parameters of a view, by full name, and what cannot be computed."""

    store: Store
    steps: Mapping[str, Step]
    index: Index
    """Of a view of the updates."""


class _UndecidedError(Exception):
    """What is missing to compute a step, as a phrase that follows the names of the parameters."""


def steps_of(
    view: Namespace[Any],
    optimizer: str | Mapping[str, str] | None,
    gradients: Namespace[Any] | None,
    options: Mapping[str, Any],
    only: str | None = None,
) -> Steps:
    """Return how the last steps of a view's parameters are computed. Reads nothing.

    Parameters
    ----------
    view
        The view.
    optimizer
        One of `OPTIMIZERS`, for all parameters or by glob; None takes what the checkpoint records.
    gradients
        The gradients of the last step by the names of the parameters, if they are known.
    options
        Values of some of `OPTIONS`, for all parameters or by glob. They replace those of the checkpoint.
    only
        The full name of the one parameter that is wanted; None: all of the view.

    Raises
    ------
    DataError
        An option has no such name, or there are no optimizer states.
    """
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise DataError(f"updates have no option {unknown[0]!r}; there are: {', '.join(OPTIONS)}")
    for one in optimizer.values() if isinstance(optimizer, Mapping) else (optimizer,):
        if one is not None and one not in OPTIMIZERS:
            raise DataError(f"optimizer={one!r} is none of {', '.join(OPTIMIZERS)}")
    sources = Sources([view] if gradients is None else [view, gradients])
    states = view._index.states
    held = [states.get(state, {}) for state in reversed(_WEIGHTS)]
    if only is not None:
        held = [{only: specs[only]} for specs in held if only in specs]
    weights = {name: spec for specs in held for name, spec in specs.items()}
    moments = {state: specs for state, specs in states.items() if state not in _WEIGHTS}
    shown = set(view._shown_of({name: name for name in weights}).values())
    names = [name for name in weights if name in shown and any(name in specs for specs in moments.values())]
    if not names:
        hint = "those that it has are of other names: view.problems may say why"
        if not any(moments.values()):
            hint = "give a checkpoint with the moments that training resumes from"
        raise DataError(f"{view.root} has no optimizer states of these tensors; {hint}")
    known = recorded(view.meta, states)
    scheduled = _scheduled(view.meta)
    found: dict[str, Step] = {}
    missing: dict[str, list[str]] = {}
    ruled: list[str] = []
    for name in names:
        own = {state: operand(specs[name]) for state, specs in moments.items() if name in specs}
        gradient = None if gradients is None or gradients._spec(name) is None else sources.operand(1, name)
        options_of, differing, by_rule = known.of(name, weights[name].stored_as or "", len(weights[name].shape))
        given = {key: value for key, value in ((k, _chosen(v, name)) for k, v in options.items()) if value is not None}
        weight = (
            operand(weights[name]) if gradients is None else as_expr(operand(weights[name]))
        )  # of one of two stores
        rule = _Rule(name, weight, own, gradient, options_of, differing, given, known.step)
        try:
            found[name] = rule.step(_chosen(optimizer, name), scheduled)
            if by_rule and "weight_decay" not in given:
                ruled.append(name)
        except (_UndecidedError, DataError) as e:
            missing.setdefault(str(e), []).append(name)
    problems = [
        Problem("undecided-update", f"{some(lost, 3)}: {why}", lost[0] if len(lost) == 1 else None)
        for why, lost in missing.items()
    ]
    problems += _notes(found)
    if ruled:
        text = (
            "weight decay is taken to be on all but biases and 1-d parameters, as megatron-core has it: weight_decay="
        )
        problems.append(Problem("assumed-update", f"{some(ruled, 3)}: {text} tells it"))
    index = sources.index({name: step.update for name, step in found.items()}, "updates", problems=problems)
    return Steps(sources.store, found, index)


def _notes(found: Mapping[str, Step]) -> list[Problem]:
    """Return problems that say what the updates assume."""
    notes = []
    late = [name for name, step in found.items() if step.rate == "scheduled"]
    if late:
        text = (
            "the recorded learning rate is what a scheduler has set for the next step; lr= gives that of the last step"
        )
        notes.append(Problem("assumed-update", f"{some(late, 3)}: {text}"))
    free = [name for name, step in found.items() if step.rate == "unknown"]
    if free:
        text = "no learning rate is recorded: updates are in units of it; lr= gives it"
        notes.append(Problem("assumed-update", f"{some(free, 3)}: {text}"))
    still = [name for name, step in found.items() if not step.exact]
    if still:
        text = "the step also depends on the gradient: the update is that for a gradient that does not change"
        notes.append(Problem("assumed-update", f"{some(still, 3)}: {text}"))
    return notes


class _Rule:
    """All that is known of one parameter."""

    def __init__(
        self,
        name: str,
        weight: Expr | Input,
        states: Mapping[str, Expr | Input],
        gradient: Expr | Input | None,
        options: Mapping[str, Any],
        differing: Mapping[str, list[Any]],
        given: Mapping[str, Any],
        step: float | None,
    ) -> None:
        self.name, self.weight, self.states, self.gradient = name, weight, states, gradient
        self.options, self.differing, self.given, self.done = options, differing, given, step

    def step(self, optimizer: str | None, scheduled: bool) -> Step:
        kind = optimizer or self.kind()
        direction, exact = self._direction(kind)
        lr, rate = self._rate(scheduled)
        decay = float(self.option("weight_decay")) if kind in ("adamw", "lion", "muon", "adafactor") else 0.0
        if kind == "adafactor":
            scale, decay, rate = self._relative(direction, lr, decay, rate)
        else:
            scale, decay = _with_rate(lr, decay)
        operands = (direction, self.weight) if decay else (direction,)
        weights = (-scale, -decay) if decay else (-scale,)
        update = make("linear", *operands, weights=weights, dtype=direction.dtype)
        return Step(
            kind,
            lr,
            rate,
            exact,
            scale,
            decay,
            kind in ("adam", "adamw", "lion"),
            computed(self.name, direction),
            of_one_store(self.name, self.weight),
            computed(self.name, update, rule=f"last step of {kind}"),
        )

    def _direction(self, kind: str) -> tuple[Expr, bool]:
        """Return the direction, and whether it is exact."""
        rules = {
            "adamw": self._adam, "adam": self._adam, "lion": self._lion, "sgd": self._sgd, "muon": self._muon,
            "adafactor": self._adafactor,
        }  # fmt: skip
        return rules[kind]()

    def _relative(self, direction: Expr, lr: float | None, decay: float, rate: str) -> tuple[float, float, str]:
        """Return the factors of Adafactor's direction and of the weight, and where the learning rate is from."""
        inside = direction.op == "same" or direction.params.get("rate") is not None  # the rate is in the direction
        if not decay:
            return (1.0, 0.0, "relative") if inside else (1.0 if lr is None else lr, 0.0, rate)
        if lr is None or (not self._torch and (self.option("relative_step") or self.option("scale_parameter"))):
            raise _UndecidedError("its weight decay is relative to a rate that is not recorded: say weight_decay=0")
        scale, decay = _with_rate(lr, decay)
        return (1 + decay if inside else scale), decay, "relative" if inside else rate

    @property
    def _torch(self) -> bool:
        """Whether Adafactor is torch's."""
        return "beta2_decay" in self.options or bool({"row_var", "variance"} & set(self.states))

    # -- which optimizer

    def kind(self) -> str:
        """Return the optimizer that the states and options are of."""
        have, options = set(self.states), self.options
        if {"exp_avg", "exp_avg_sq"} <= have and have <= {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"}:
            if not {"amsgrad", "bias_correction"} & set(options) or set(_NOT_ADAM) & set(options):
                raise _UndecidedError("nothing tells whether these are the moments of Adam: say optimizer=")
            if "decoupled_weight_decay" in options:
                return "adamw" if options["decoupled_weight_decay"] else "adam"
            if self.option("weight_decay") == 0:
                return "adamw"  # the same as Adam
            raise _UndecidedError(
                "nothing tells whether weight decay is part of the gradient: say optimizer='adamw' or 'adam'"
            )
        if have == {"exp_avg"} and "betas" in options and not {"eps", "amsgrad", "bias_correction"} & set(options):
            return "lion"
        if have == {"momentum_buffer"} and "ns_steps" in options:
            return "muon"
        if have == {"momentum_buffer"} and {"nesterov", "dampening"} <= set(options):
            return "sgd"
        if "clip_threshold" in options or "beta2_decay" in options:
            return "adafactor"
        raise _UndecidedError(f"nothing tells which optimizer has the states {', '.join(sorted(have))}: say optimizer=")

    # -- its numbers

    def option(self, name: str, default: Any = None) -> Any:
        """Return an option: the one that is given, or the recorded one. Raises _UndecidedError if neither is there."""
        if name in self.given:
            return self.given[name]
        if name in self.differing:
            values = ", ".join(dict.fromkeys(map(repr, self.differing[name])))
            raise _UndecidedError(
                f"the groups have {name} {values}, and nothing tells which parameters are in which: say {name}=, "
                "also by glob"
            )
        value = self.options.get(name, default)
        if value is None or not isinstance(value, bool | int | float | str | tuple | list):
            raise _UndecidedError(f"{name} is not recorded as a number: say {name}=")
        return value

    def _maybe(self, name: str) -> Any:
        """Return an option, None if it is not known."""
        if name in self.given:
            return self.given[name]
        value = self.options.get(name)
        return value if isinstance(value, bool | int | float | str | tuple | list) else None

    def _rate(self, scheduled: bool) -> tuple[float | None, str]:
        if "lr" in self.given:
            return float(self.given["lr"]), "given"
        if "lr" in self.differing:
            self.option("lr")
        lr = self._maybe("lr")
        if lr is None:
            return None, "unknown"
        return float(lr), "scheduled" if scheduled or "initial_lr" in self.options else "recorded"

    def state(self, name: str) -> Expr | Input:
        if name not in self.states:
            raise _UndecidedError(f"there is no state {name}, which this optimizer has")
        return self.states[name]

    def _steps(self) -> tuple[tuple[Expr | Input, ...], float | None]:
        """Return the number of steps, as an operand or as a number."""
        if "step" in self.given:
            return (), float(self.given["step"])
        if "step" in self.states:
            return (self.states["step"],), None
        step = self.options.get("step")
        step = self.done if step is None and "step" not in self.differing else step
        if not isinstance(step, int | float):
            raise _UndecidedError("the number of the optimizer's steps is not recorded: say step=")
        return (), float(step)

    # -- the directions, and whether they are exact

    def _adam(self) -> tuple[Expr, bool]:
        second = "max_exp_avg_sq" if "max_exp_avg_sq" in self.states or self._maybe("amsgrad") else "exp_avg_sq"
        corrected = bool(self.option("bias_correction", True))
        done, step = self._steps() if corrected else ((), None)
        made = make(
            "update.adam",
            self.state("exp_avg"),
            self.state(second),
            *done,
            betas=tuple(map(float, self.option("betas"))),
            eps=float(self.option("eps")),
            bias_correction=corrected,
            step=step,
        )
        return made, True

    def _lion(self) -> tuple[Expr, bool]:
        betas = None if self.gradient is None else tuple(map(float, self.option("betas")))
        return make("update.lion", self.state("exp_avg"), *self._gradient(), betas=betas), self.gradient is not None

    def _sgd(self) -> tuple[Expr, bool]:
        mixed = bool(self.option("nesterov"))
        momentum = float(self.option("momentum")) if mixed else None
        gradient = self._gradient() if mixed else ()
        return make("update.sgd", self.state("momentum_buffer"), *gradient, momentum=momentum), not mixed or bool(
            gradient
        )

    def _muon(self) -> tuple[Expr, bool]:
        mixed = bool(self.option("nesterov"))
        gradient = self._gradient() if mixed else ()
        buffer = self.state("momentum_buffer")
        if len(buffer.shape) != 2:
            raise _UndecidedError("Muon's parameters are matrices")
        rows, columns = buffer.shape
        how = self.options.get("adjust_lr_fn") if "adjust_lr_fn" not in self.given else self.given["adjust_lr_fn"]
        ratio = 1.0
        if how is None or how == "original":
            ratio = math.sqrt(max(1, rows / max(1, columns)))
        elif how == "match_rms_adamw":
            ratio = 0.2 * math.sqrt(max(rows, columns))
        made = make(
            "update.muon",
            buffer,
            *gradient,
            coefficients=tuple(map(float, self.option("ns_coefficients"))),
            steps=int(self.option("ns_steps")),
            eps=float(self.option("eps")),
            ratio=ratio,
            momentum=float(self.option("momentum")) if mixed else None,
        )
        return made, not mixed or bool(gradient)

    def _adafactor(self) -> tuple[Expr, bool]:
        if "exp_avg" in self.states:  # it has the learning rate in it
            return make("same", self.states["exp_avg"]), True
        if self.gradient is None:
            raise _UndecidedError("Adafactor keeps no first moment: its step needs the gradients (gradients=)")
        if self._torch:
            return self._torch_adafactor(self.gradient), False  # relative to the weights before the step
        return self._transformers_adafactor(self.gradient)

    def _torch_adafactor(self, gradient: Expr | Input) -> Expr:
        eps = self.option("eps")
        least = torch.finfo(self.weight.dtype.torch).eps if eps[0] is None else eps[0]
        done, step = self._steps()
        roles, operands = self._variance("variance", "row_var", "col_var")
        return make(
            "update.adafactor",
            gradient,
            *operands,
            self.weight,
            *done,
            roles=("gradient", *roles, "weight", *(("step",) if done else ())),
            least=float(least),
            clip=float(self.option("d")),
            floor=float(eps[1]),
            rate=float(self.option("lr")),
            step=step,
        )

    def _transformers_adafactor(self, gradient: Expr | Input) -> tuple[Expr, bool]:
        roles, operands = self._variance("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col")
        params: dict[str, Any] = {"least": 0.0, "clip": float(self.option("clip_threshold"))}
        if self.option("scale_parameter"):
            roles, operands = (*roles, "weight"), (*operands, self.state("RMS"))
            params["floor"] = float(self.option("eps")[1])
        if self.option("relative_step"):
            found, params["step"] = self._steps()
            roles, operands = (*roles, *(("step",) if found else ())), (*operands, *found)
            params |= {"rate": 1e-2, "growth": 1e-6 if self.option("warmup_init") else None}
        return make("update.adafactor", gradient, *operands, roles=("gradient", *roles), **params), True

    def _variance(self, whole: str, rows: str, columns: str) -> tuple[tuple[str, ...], tuple[Expr | Input, ...]]:
        if whole in self.states:
            return ("variance",), (self.states[whole],)
        return ("rows", "columns"), (self.state(rows), self.state(columns))

    def _gradient(self) -> tuple[Expr | Input, ...]:
        return () if self.gradient is None else (self.gradient,)


def _with_rate(lr: float | None, decay: float) -> tuple[float, float]:
    """Return the factors of the direction and of the weight after the step, for a decoupled weight decay."""
    if lr is None:
        return 1.0, decay
    shrink = 1 - lr * decay
    if shrink <= 0:
        raise _UndecidedError(f"a learning rate of {lr:g} with a weight decay of {decay:g} removes the weights")
    return lr / shrink, lr * decay / shrink


def _chosen(given: Any, name: str) -> Any:
    """Return the value for a parameter: that of the first glob that matches, if it is given by glob."""
    if not isinstance(given, Mapping):
        return given
    tests: list[tuple[Callable[[str], bool], Any]] = [(matcher(glob), value) for glob, value in given.items()]
    return next((value for test, value in tests if test(name)), None)


def _scheduled(meta: Mapping[str, Any]) -> bool:
    """Return whether the checkpoint has the state of a scheduler of learning rates, which steps after the optimizer."""
    return any("sched" in str(key) and bool(value) for key, value in meta.items())
