"""What ``by_layer`` of views and runs returns: a quantity by kind of parameter and layer, as data, table and plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.units import human_bytes, plural
from ..errors import DataError, and_more
from ..inspect.architecture import layer_and_kind
from ..inspect.course import Course, course
from ..inspect.layers import QUANTITIES, SHARES, Layers, by_layer
from ..inspect.stats import stats_of_all
from ..lazy import LazyArray
from ..markup import cell, page, safe, table, tag
from .layer_plots import layer_curves, layer_map
from .run_plots import multiples
from .style import import_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 16  # layers that a table shows, evenly spaced
_ROWS = 60  # kinds that a table shows


class LayerTable:
    """A quantity of all tensors of a view, by kind of parameter and layer. `CheckpointView.by_layer` returns it.

    Iterating yields a dict for each kind and layer, so that ``pandas.DataFrame(table)`` works. Notebooks show a table
    that is coloured as `plot` is.

    Parameters
    ----------
    found
        The values.
    notes
        What they are of, as short texts.
    """

    def __init__(self, found: Layers, notes: tuple[str, ...] = ()) -> None:
        self.found = found
        self.notes = notes

    @property
    def quantity(self) -> str:
        """The name of the quantity."""
        return self.found.quantity

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of parameters: names with "*" for numbers."""
        return self.found.kinds

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the layers."""
        return self.found.layers

    @property
    def values(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The values, as float64 of shape (kinds, layers); NaN where there is no tensor. Kinds that are in no layer
        have no values here, but are among the rows."""
        return self.found.values

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.found.to_dicts())

    def __len__(self) -> int:
        return len(self.found.to_dicts())

    def __repr__(self) -> str:
        found = self.found
        low, high = _ends(found.values)
        counts = f"{plural(len(found.kinds), 'kind')} in {plural(len(found.layers), 'layer')}"
        lines = [f"{QUANTITIES[found.quantity]} of {counts}"]
        width = max((len(label) for label in found.labels), default=0)
        for n, (kind, label) in enumerate(zip(found.kinds, found.labels, strict=True)):
            one = found.alone.get(kind)
            text = f"{one:.4g}" if one is not None else f"{low[n]:.4g} to {high[n]:.4g}"
            lines.append(f"  {label:<{width}}  {text}")
        return "\n".join(lines)

    def plot(self, *, lines: bool = False, ax: Axes | None = None) -> Axes:
        """Plot the values as `ViewPlots.layers` does.

        Parameters
        ----------
        lines
            Draw a line for each kind in place of the heat map.
        ax
            Axes to draw into; None creates a figure.

        Raises
        ------
        DataError
            There are no values, or matplotlib is not installed.
        """
        import_matplotlib()
        if not self.found.kinds:
            raise DataError("there are no tensors in this view: there is nothing to draw")
        name = QUANTITIES[self.quantity]
        draw = layer_curves if lines else layer_map
        return draw(self.found, ax, f"{name[0].upper()}{name[1:]} by layer and kind", self.notes)

    def _repr_html_(self) -> str:
        found = self.found
        step = -(-len(found.layers) // _COLUMNS) or 1
        shown = list(range(0, len(found.layers), step))
        colours = _tints(found)
        rows = []
        for n, (kind, label) in enumerate(zip(found.kinds[:_ROWS], found.labels, strict=False)):
            line = [cell(tag("code", safe(label)), "l")]
            if kind in found.alone:
                line.append(cell(_text(found.alone[kind], found.marks.get((kind, None), "")), "heat", len(shown) or 1))
            else:
                for k in shown:
                    mark = found.marks.get((kind, found.layers[k]), "")
                    line.append(cell(_text(float(found.values[n, k]), mark), f"heat {colours(n, k)}".strip()))
            rows.append(line)
        notes = [QUANTITIES[found.quantity], *self.notes]
        if step > 1:
            notes.append(f"every {step}th of {len(found.layers):,} layers")
        head = tag("div", f"{tag('b', 'by layer and kind')} · {safe(' · '.join(notes), 300)}", "head")
        more = tag("div", and_more(len(found.kinds) - _ROWS), "note") if len(found.kinds) > _ROWS else ""
        titles = [("layer", "l"), *((str(found.layers[k]), "heat") for k in shown)]
        return page([head, table(titles if shown else [("kind", "l"), ("", "")], rows), more])


def _ends(values: Any) -> tuple[list[float], list[float]]:
    """Return the smallest and the largest number of each row."""
    good = np.isfinite(values)
    low = np.min(np.where(good, values, math.inf), axis=1, initial=math.inf)
    high = np.max(np.where(good, values, -math.inf), axis=1, initial=-math.inf)
    return low.tolist(), high.tolist()


def _text(value: float, mark: str) -> str:
    text = "" if math.isnan(value) else f"{value:.3g}"
    return text + (tag("span", mark, "mark") if mark else "")


def _tints(found: Layers) -> Any:
    """Return a function from kind and layer to the class of a cell: orange above its kind's median, blue below."""
    if found.quantity in SHARES:
        most = np.nanmax(np.abs(found.values), initial=0.0) or 1.0
        parts = found.values / most
    else:
        own = found.relative()
        parts = own.values / own.limit

    def css(n: int, k: int) -> str:
        x = float(np.clip(parts[n, k], -1, 1)) if math.isfinite(parts[n, k]) else 0.0
        level = round(_LEVELS * abs(x))
        return f"{'h' if x > 0 else 'c'}{level}" if level else ""

    return css


_LEVELS = 4  # tints of cells on each side of the median


class RunTable:
    """A quantity of all tensors of a run over its steps, by kind of parameter and layer. `RunView.by_layer` returns it.

    Iterating yields a dict for each kind, layer and step, so that ``pandas.DataFrame(table)`` works.

    Parameters
    ----------
    found
        The values.
    """

    def __init__(self, found: Course) -> None:
        self.found = found

    @property
    def quantity(self) -> str:
        """The name of the quantity."""
        return self.found.quantity

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that have values."""
        return self.found.steps

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of parameters: names with "*" for numbers."""
        return self.found.kinds

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the layers."""
        return self.found.layers

    @property
    def values(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The values, as float64 of shape (kinds, layers, steps); NaN where there is none. Kinds that are in no layer
        have no values here, but are among the rows."""
        return self.found.values

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.found.rows()

    def __len__(self) -> int:
        return sum(1 for _ in self.found.rows())

    def __repr__(self) -> str:
        found = self.found
        span = f"{found.steps[0]:,} to {found.steps[-1]:,}" if found.steps else "none"
        kinds, layers = plural(len(found.kinds), "kind"), plural(len(found.layers), "layer")
        return f"{found.label}: {kinds} in {layers} at {plural(len(found.steps), 'step')}, {span}"

    def plot(self) -> Figure:
        """Plot a panel for each kind of parameter, with a line for each layer over the steps.

        Raises
        ------
        DataError
            There are no values, or matplotlib is not installed.
        """
        import_matplotlib()
        found = self.found
        if not found.kinds:
            raise DataError("there are no tensors in this run, or only one step: there is nothing to draw")
        span = f"steps {found.steps[0]:,} to {found.steps[-1]:,}"
        return multiples(found, f"{found.label[0].upper()}{found.label[1:]}, {span}")


def of_view(view: Any, quantity: str, **options: Any) -> LayerTable:
    """Return a quantity of a view. See `CheckpointView.by_layer`."""
    by_layer((), quantity)  # refuses an unknown quantity before anything is read
    rows = stats_of_all(view.once()[0], **options)
    found = by_layer(((view.full_name(one.name), one) for one in rows), quantity)
    return LayerTable(found, (f"{plural(len(view), 'tensor')}, {human_bytes(view.nbytes)}", f"state {view.state}"))


def of_run(run: Any, quantity: str, kinds: str = "", **options: Any) -> RunTable:
    """Return a quantity of a run, of one kind or of those that have a text in their names. See `RunView.by_layer`."""
    return RunTable(course(_each_step(run, _wanted(run, kinds)), quantity, **options))


def _wanted(run: Any, kinds: str) -> Callable[[str], bool]:
    """Return whether a tensor's kind is drawn, by its full name."""
    if not kinds:
        return lambda name: True
    every = {layer_and_kind(name)[1] for step in run.steps for name in run.at(step).full_names.values()}
    if kinds in every:
        return lambda name: layer_and_kind(name)[1] == kinds
    return lambda name: kinds in layer_and_kind(name)[1]


def _each_step(run: Any, wanted: Callable[[str], bool]) -> Iterator[tuple[int, Mapping[str, LazyArray]]]:
    """Yield the steps of a run and their tensors by full name, each tensor once."""
    for step in run.steps:
        view = run.at(step)
        named = ((view.full_name(name), t) for name, t in view.once()[0].items())
        yield step, {name: t for name, t in named if wanted(name)}
