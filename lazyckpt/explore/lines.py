"""Lines of Python that give what a page shows: each opens what was opened, and draws the picture or reads the numbers.

This is the only place that writes them. A line is complete: ``exec`` runs it. If the explorer was given a view that no
call of `lazyckpt.open` returns, the lines speak of it as ``view``, and of a second one as ``other``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from glob import escape
from math import ceil, floor, isfinite
from typing import Any

from ..derive.arithmetic import difference
from ..derive.sources import opening_of
from ..errors import DataError, TensorNotFoundError
from ..inspect.bits import has_bits
from ..inspect.numbers import number_shape, packing
from ..inspect.pixels import row_length
from ..inspect.planes import Plane, Window, plane_of
from ..lazy import LazyArray
from ..lookup import STORED
from .query import Query
from .subject import AUTO, Subject, View

Lines = dict[str, str]

_WHOLE, _PART = 512, 1024  # cells of a whole tensor, and of a part of one
_ROWS, _COLS = 60, 12  # of the table of values
_MEMORY = {
    "dtype": "", "tp": "1", "pp": "1", "dp": "1", "ep": "1", "optimizer": "adamw", "gradients": "float32", "zero": "0",
}  # fmt: skip


def complete(line: str, *modules: str) -> str:
    """Return an expression as a line that imports what it needs."""
    needed = [f"lazyckpt.{one}" for one in modules] or (["lazyckpt"] if "lazyckpt." in line else [])
    needed += ["torch"] if "torch." in line else []
    return f"import {', '.join(needed)}; {line}" if needed else line


def opened(subject: Subject, view: View) -> str:
    """Return the expression of a checkpoint of a subject, or of its run: the call that opens it, or a variable."""
    return opening_of(view) or ("other" if view is subject.other else "view")


def checkpoint(subject: Subject, query: Query) -> str:
    """Return the expression of the checkpoint that a request is about."""
    if subject.run is None:
        return opened(subject, subject.checkpoint(query))
    return f"{opened(subject, subject.view)}.at({subject.step(query)})"


def compared(subject: Subject, query: Query) -> tuple[str, str]:
    """Return the expressions of the two checkpoints, or the two steps of a run, that a request compares."""
    if subject.run is None:
        a, b = (opened(subject, view) for view in subject.pair(query))
        return a, b
    run = opened(subject, subject.view)
    return f"{run}.at({subject.step(query)})", f"{run}.at({subject.other_step(query)})"


def part(subject: Subject, query: Query) -> str:
    """Return the expression of the state that a request is about."""
    return checkpoint(subject, query) + _state(subject.checkpoint(query), query)


def _state(view: View, query: Query) -> str:
    state = query.text("state", "")
    if state in ("", view.state):
        return ""
    return ".stored" if state == STORED else f".states[{state!r}]"


def tensor(subject: Subject, query: Query) -> str:
    """Return the expression of the tensor that a request is about."""
    of, name = query.text("of", ""), query.text("name")
    if of == "update":
        return f"{checkpoint(subject, query)}.updates()[{name!r}]"
    if of == "change":  # of this tensor alone: others may have been added, or have another shape
        same = f".select({escape(name)!r}).astype(torch.float64)"
        old = f"{opened(subject, subject.view)}.at({subject.before(query)}){_state(subject.checkpoint(query), query)}"
        return f"({part(subject, query)}{same} - {old}{same})[{name!r}]"
    return f"{part(subject, query)}[{name!r}]"


def _call(*values: Any, **options: Any) -> str:
    """Return arguments as text, without options that are None."""
    told = [f"{value}" for value in values]
    return ", ".join([*told, *(f"{name}={value!r}" for name, value in options.items() if value is not None)])


# -- the page of a tensor


def _drawn(query: Query, t: LazyArray) -> tuple[Plane, dict[str, Any]]:
    """Return how the page draws a tensor, and the options of Python that say so."""
    ndim = t.ndim
    shape = number_shape(t)
    dims: tuple[int, int] | None = None
    at: dict[int, int] = {}
    if ndim > 2:
        chosen = [int(one) for one in query.text("dims", "").split(",") if _natural(one)]
        if len(chosen) == 2 and chosen[0] != chosen[1] and max(chosen) < ndim:
            dims = chosen[0], chosen[1]
        drawn = dims or (ndim - 2, ndim - 1)
        for pair in query.text("at", "").split(","):
            dim, _, index = pair.partition(":")
            known = _natural(dim) and _natural(index) and int(dim) < ndim and int(dim) not in drawn
            if known and int(index) < shape[int(dim)]:
                at[int(dim)] = int(index)
    return plane_of(t, dims, at, row_length(shape)), {"dims": dims, "at": at or None}


def _wrap(plane: Plane) -> int | None:
    return plane.width if plane.wrap else None


def _natural(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


def _window(query: Query, plane: Plane) -> Window | None:
    """Return the whole elements of what is seen of the picture; None for all."""
    try:
        r0, r1, c0, c1 = (float(one) for one in query.text("view", "").split(","))
        rows = max(0, floor(r0)), min(plane.height, ceil(r1))
        cols = max(0, floor(c0)), min(plane.width, ceil(c1))
    except (ValueError, OverflowError):
        return None
    if rows[0] >= rows[1] or cols[0] >= cols[1] or (rows, cols) == ((0, plane.height), (0, plane.width)):
        return None
    return rows, cols


def _cells(plane: Plane, window: Window | None) -> tuple[int, int] | None:
    """Return the numbers of rows and columns of cells, which have powers of 2 of elements; None for those that
    `heatmap` has by itself."""
    most = _WHOLE if window is None else _PART
    sides = (plane.height, plane.width) if window is None else tuple(end - first for first, end in window)
    cells = []
    for length in sides:
        level = 0
        while -(-length >> level) > most:
            level += 1
        cells.append(max(1, -(-length >> level)))
    own = tuple(max(1, min(length, _WHOLE)) for length in sides)
    return None if tuple(cells) == own else (cells[0], cells[1])


def _limits(query: Query) -> tuple[float, float] | None:
    """Return the ends of the colours on screen; None if the plot is to find them."""
    try:
        low, high = (float(one) for one in query.text("limits", "").split(","))
    except ValueError:
        return None
    return (low, high) if low < high and isfinite(high - low) else None


def heatmap(query: Query, t: LazyArray) -> str:
    """Return the arguments of `TensorPlots.heatmap` that draw what the page of a tensor draws."""
    plane, options = _drawn(query, t)
    window = _window(query, plane)
    how = query.text("how", "mean")
    scale = query.text("scale", "linear")
    limits = _limits(query) if scale != "quantile" else None
    share = 1.0
    if window is not None:
        share = (window[0][1] - window[0][0]) * (window[1][1] - window[1][0]) / max(1, plane.height * plane.width)
    everything = query.text("exact", "") == "yes" or int(share * t.nbytes) <= AUTO
    return _call(
        *([repr(how)] if how in ("min", "max", "absmax") else []),
        cells=_cells(plane, window),
        **options,
        window=window,
        scale=scale if scale in ("symlog", "quantile") else None,
        full=True if limits is None and query.text("range", "") == "full" else None,
        limits=limits,
        exact=None if everything else False,
    )


def _histogram(query: Query, t: LazyArray) -> str:
    everything = query.text("exact", "") == "yes" or t.nbytes <= AUTO
    return _call(
        *(["'powers of 2'"] if query.text("bins", "") == "log" else []),
        log=True if query.text("counts", "") == "log" else None,
        exact=None if everything else False,
    )


def _values(query: Query, t: LazyArray, line: str) -> str | None:
    """Return the line that reads the table of values; None if there is none."""
    plane, options = _drawn(query, t)
    if t.ndim > 2 and len(plane.at) < t.ndim - 2:
        return None
    window = _window(query, plane)
    (r0, _), (c0, _) = window or ((0, 0), (0, 0))
    rows = r0, min(plane.height, r0 + _ROWS)
    cols = c0, min(plane.width, c0 + _COLS)
    turned = plane.row_dim is None or plane.col_dim is None or plane.row_dim > plane.col_dim
    if turned or packing(t.spec.dtype) > 1:
        told = _call(line, rows, cols, **options, wrap=_wrap(plane))
        return complete(f"lazyckpt.show.values.window({told})", "show.values")
    ends = {plane.row_dim: rows, plane.col_dim: cols}
    key = [f"{ends[n][0]}:{ends[n][1]}" if n in ends else str(plane.at[n]) for n in range(t.ndim)]
    return complete(f"{line}[{', '.join(key)}]")


def _matrix(query: Query, t: LazyArray) -> str | None:
    """Return what chooses the matrix that is drawn of a tensor; None if it is not chosen."""
    plane, _ = _drawn(query, t)
    if t.ndim <= 2:
        return ""
    if len(plane.at) < t.ndim - 2:
        return None
    return f".lazy[{', '.join(str(plane.at.get(n, ':')) for n in range(t.ndim))}]"


def _of_tensor(subject: Subject, query: Query) -> Lines:
    t = subject.tensor(query)
    line = tensor(subject, query)
    found = {"tensor": complete(line), "layout": complete(f"{line}.plot.layout()")}
    try:
        shape = number_shape(t)
    except DataError:
        return found
    if 0 in shape:
        return found
    plane, options = _drawn(query, t)
    found["heatmap"] = complete(f"{line}.plot.heatmap({heatmap(query, t)})")
    told = _call(line, 512, 512, **options, wrap=_wrap(plane))
    found["norms"] = complete(f"lazyckpt.inspect.norms.norms({told})", "inspect.norms")
    found["histogram"] = complete(f"{line}.plot.hist({_histogram(query, t)})")
    found["outliers"] = complete(f"lazyckpt.inspect.norms.outliers({line}, 50, 50)", "inspect.norms")
    if has_bits(t.spec.dtype):
        found["bits"] = complete(f"{line}.plot.bits()")
    matrix = _matrix(query, t) if t.ndim >= 2 and t.spec.dtype.is_number else None
    if matrix is not None:
        found["spectrum"] = complete(f"{line}{matrix}.plot.singular_values()")
    values = _values(query, t, line)
    if values is not None:
        found["values"] = values
    if t.ndim == 2:
        row = query.text("row", "0")
        row = row if _natural(row) else "0"
        told = f"lazyckpt.inspect.neighbours.neighbours({line}, {row}, 50)"
        found["neighbours"] = complete(told, "inspect.neighbours")
    return found


# -- the other pages


def _of_tree(subject: Subject, query: Query) -> Lines:
    view = part(subject, query)
    path = query.text("path", "")
    return {"view": complete(view), "group": complete(f"{view}[{path!r}]" if path else view)}


def _of_architecture(subject: Subject, query: Query) -> Lines:
    view = part(subject, query)
    told = _call(
        *(["'parameters'"] if query.text("unit", "") == "elements" else []),
        by="layers" if query.text("by", "") == "layers" else None,
    )
    counted = f"lazyckpt.inspect.architecture.architecture({view})"
    weights = checkpoint(subject, query)
    found = subject.checkpoint(query)
    state = next((one for one in ("weights", "fp32") if one in found.states), "")
    if state and state != found.state:
        weights += f".states[{state!r}]"
    options = {name: query.text(name, usual) for name, usual in _MEMORY.items()}
    given = {name: int(x) if _natural(x) else x for name, x in options.items() if x != _MEMORY[name]}
    return {
        "architecture": complete(f"{view}.plot.architecture({told})"),
        "kinds": complete(f"{counted}.of_kind()", "inspect.architecture"),
        "layers": complete(f"{counted}.blocks()", "inspect.architecture"),
        "memory": complete(f"lazyckpt.inspect.costs.memory_per_rank({_call(weights, **given)})", "inspect.costs"),
    }


def _of_ranks(subject: Subject, query: Query) -> Lines:
    own = query.text("states", "all") != "all"
    view = part(subject, query) if own else checkpoint(subject, query)
    of = query.text("of", "bytes")
    told = _call(*([repr(of)] if of in ("tensors", "files") else []), states="own" if own else None)
    states = f"[{view}]" if own else f"{view}.states.values()"
    found = {
        "ranks": complete(f"{view}.plot.ranks({told})"),
        "files": complete(f"lazyckpt.inspect.ranks.ranks_of({states})", "inspect.ranks"),
    }
    file = query.text("file", "")
    if file:
        found["file"] = complete(f"list(lazyckpt.inspect.ranks.held_by({states}, {file!r}))", "inspect.ranks")
    return found


def _of_optimizer(subject: Subject, query: Query) -> Lines:
    view, quantity = part(subject, query), query.text("of", "rms")
    steps = f"{checkpoint(subject, query)}.updates()"
    zeros = f"((one.name, one.count, one.zeros) for one in {view}.stats() if one.zeros)"
    return {
        "layers": complete(f"{view}.plot.layers({quantity!r})"),
        "table": complete(f"{view}.by_layer({quantity!r})"),
        "zeros": complete(f"sorted({zeros}, key=lambda one: -one[2] / one[1])"),
        "updates": complete(f"{steps}.plot()"),
        "steps": complete(f"{steps}.table()"),
    }


def _of_experts(subject: Subject, query: Query) -> Lines:
    view, layer = part(subject, query), query.text("layer", "0")
    told = _call(view, int(layer) if _natural(layer) else repr(layer))
    return {
        "experts": complete(f"{view}.plot.experts()"),
        "alike": complete(f"{view}.plot.experts('likeness')"),
        "nearest": complete(f"lazyckpt.inspect.expert_likeness.nearest_experts({view})", "inspect.expert_likeness"),
        "norms": complete(f"lazyckpt.inspect.expert_norms.expert_norms({view})", "inspect.expert_norms"),
        "likeness": complete(f"lazyckpt.inspect.expert_likeness.expert_likeness({told})", "inspect.expert_likeness"),
    }


def _of_comparison(subject: Subject, query: Query) -> Lines:
    pair, state = subject.pair(query), query.text("state", "")
    if state not in ("", STORED) and any(state not in view.states for view in pair):
        return {}  # one of the two lacks the state: there are names to show, and nothing to compare
    a, b = (line + _state(view, query) for line, view in zip(compared(subject, query), pair, strict=True))
    found = {
        "differences": complete(f"lazyckpt.diff({a}, {b})"),
        "grid": complete(f"lazyckpt.diff({a}, {b}).plot()"),
        "curves": complete(f"lazyckpt.diff({a}, {b}).plot(lines=True)"),
    }
    if "name" in query:
        name = query.text("name")
        first, second = (view.stored if state == STORED else view.states[state] if state else view for view in pair)
        with suppress(DataError, TensorNotFoundError):  # the page has the error, too
            t = LazyArray(*difference(first, second, name))
            if 0 not in t.shape:
                told = heatmap(query, t)
                found["picture"] = complete(f"{a}.plot.difference({b}, {name!r}{told and f', {told}'})")
    return found


def _of_run(subject: Subject, query: Query) -> Lines:
    if query.text("state", "") == STORED:
        return {}  # of a run only the views of its steps have it
    run = opened(subject, subject.view) + _state(subject.checkpoint(query), query)
    quantity, kinds = query.text("quantity", "norm"), query.text("kind", "") or query.text("q", "")
    told = _call(*([repr(quantity)] if quantity != "norm" or kinds else []), *([repr(kinds)] if kinds else []))
    return {
        "dynamics": complete(f"{run}.plot.dynamics({told})"),
        "table": complete(f"{run}.by_layer({quantity!r})"),
    }


PAGES: Mapping[str, Callable[[Subject, Query], Lines]] = {
    "tensor": _of_tensor,
    "tree": _of_tree,
    "architecture": _of_architecture,
    "ranks": _of_ranks,
    "optimizer": _of_optimizer,
    "experts": _of_experts,
    "compare": _of_comparison,
    "run": _of_run,
}
"""Page -> the function that writes its lines."""
