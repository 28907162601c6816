"""`lazyckpt.mean` and `lazyckpt.merge`: views that are computed from several checkpoints, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from .core.index import Index
from .derive.arithmetic import average
from .derive.merges import merged
from .derive.sources import all_views
from .io.storage.base import Store
from .view import CheckpointView, view_of


def mean(
    views: Iterable[CheckpointView],
    weights: Sequence[float] | None = None,
    *,
    missing: Literal["error", "skip", "keep"] = "error",
) -> CheckpointView:
    """Return the mean of the tensors of the same names, as a lazy view. Reads nothing.

    The views may have any formats, dtypes and layouts. Reading holds a piece of one view at a time, so the memory does
    not depend on their number. Sums are in float32 (float64 if a tensor is float64), in the order of the views; the
    result has the dtype that torch promotes those of the tensors to.

    Parameters
    ----------
    views
        The views, each in the state that it shows.
    weights
        A number for each view; they are divided by their sum. By default all views count the same.
    missing
        What to do with names that a view lacks and with tensors whose shapes differ: "error"; "skip": leave them out;
        "keep": take the tensor of the first view that has the name.

    Returns
    -------
    CheckpointView
        The view of the means. Names that all views tie stay tied. Tensors that are not of floating-point numbers are
        kept if they are equal in all views; reading one that is not raises DataError.

    Raises
    ------
    DataError
        A name or shape is missing and ``missing`` is "error"; there are no views, or not a weight for each; a tensor is
        of 8-bit floats, whose scales are other tensors.
    """
    return _view(*average(all_views(views, "lazyckpt.mean"), weights, missing))


def merge(
    models: Iterable[CheckpointView],
    *,
    method: str = "linear",
    weights: Any = None,
    base: CheckpointView | None = None,
    dtype: Any = None,
    missing: Literal["error", "skip", "keep"] = "error",
    **parameters: Any,
) -> CheckpointView:
    """Return the merge of several models, as a lazy view. Reads nothing.

    The methods are those of mergekit, with its parameters and defaults; docs/how-to/merge.md lists them. All
    compute in float32 (float64 if a tensor is float64) and round the result once.

    Merge whole models: of shards, every method but "linear" and "task_arithmetic" gives other numbers, because its
    norms, thresholds and random masks are those of each shard. ``merge(...).shard(...)`` cuts the merge of the whole
    models, and an operand that is spread over ranks is joined by `open` or `unshard`.

    Parameters
    ----------
    models
        The models. If ``base`` is one of them, it counts as the base only.
    method
        "linear", "slerp", "nuslerp", "multislerp", "karcher", "task_arithmetic", "ties", "dare_ties", "dare_linear",
        "breadcrumbs", "breadcrumbs_ties" or "model_stock".
    weights
        A number, or a list with a setting for each model (without the base): see ``parameters``. By default 1 for each,
        which "linear" divides by the number of models.
    base
        The base of task vectors, which most methods need. For "slerp" the model that t=0 gives, by default the first.
    dtype
        The dtype of the floating-point tensors of the result. By default the one that torch promotes those of the
        models to.
    missing
        The same as for `lazyckpt.mean`; "keep" takes the base's tensor first.
    **parameters
        Parameters of the method, such as ``t=0.3``, ``density=0.5``, ``lambda_=1.2``, ``seed=7``. A setting is a
        number; or a list of numbers, a gradient from the first layer to the last; or a mapping from globs of names to
        either. The first glob that matches a name applies. A parameter of each model (``weights``, ``density``,
        ``gamma``) is a number or mapping for all, or a list with a setting for each.

    Returns
    -------
    CheckpointView
        The view of the merged model.

    Raises
    ------
    DataError
        What `mean` raises; there is no such method or parameter, a parameter has no value for a name, or the method
        takes another number of models.

    Examples
    --------

    >>> lazyckpt.merge([a, b], method="ties", base=base, weights=[0.5, 0.7], density=0.4)  # doctest: +SKIP
    >>> lazyckpt.merge([a, b], method="slerp", t={"*.mlp.*": [0, 0.5, 1], "*": 0.5})  # doctest: +SKIP
    """
    listed = all_views(models, "lazyckpt.merge")
    all_views([] if base is None else [base], "lazyckpt.merge")
    return _view(*merged(listed, method, weights, base, dtype, missing, parameters))


def _view(store: Store, index: Index) -> CheckpointView:
    return view_of(store, index, next(iter(index.states)), ())
