"""What the files beside the weights say about their quantization.

Files: config.json with ``quantization_config`` (transformers) or ``compression_config`` (older compressed-tensors),
also in the ``text_config`` of a model of several modalities; hf_quant_config.json (modelopt); quantize_config.json
(AutoGPTQ); quant_config.json (AutoAWQ).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import CorruptError, LazyckptError, MissingFileError, Problem, cannot_read, some
from ...formats.huggingface import load_json
from ...formats.shared.announce import listing
from ...io.storage.base import Store
from ...io.storage.joined import stores_of
from ...namespace import Namespace

_MODEL = "config.json"
_OTHERS = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
_KEYS = ("quantization_config", "compression_config")
KEYS = (*_KEYS, "quantization")  # of a config.json; the last one is of MLX
_FOLDERS = ("", "huggingface/")  # verl keeps the configuration in the second


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the files say.

    Attributes
    ----------
    model
        The whole config.json; empty if there is none.
    quantization
        Its quantization_config; empty if it has none.
    others
        The files of quantization tools: name -> contents.
    problems
        What is wrong with these files.
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    quantization: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    @property
    def method(self) -> str:
        """The ``quant_method`` that config.json names, in lower case; empty if it names none."""
        found = self.quantization.get("quant_method", "")
        return found.lower() if isinstance(found, str) else ""

    @property
    def says(self) -> bool:
        """Whether any file says something about quantization."""
        return bool(self.quantization or self.others)


def evidence_of(view: Namespace[Any], config: Mapping[str, Any] | None) -> Evidence:
    """Return what the files beside a checkpoint say, or the given configuration.

    Parameters
    ----------
    view
        The checkpoint.
    config
        The contents of config.json, or of its ``quantization_config``.
    """
    if config is not None:
        inner = quantization_in(config)
        if not inner and ("quant_method" in config or "quant_algo" in config or "config_groups" in config):
            return Evidence({}, config)
        return Evidence(config, inner)
    told = view._index.meta.get("config")
    found = [_beside(store, not isinstance(told, Mapping)) for store in stores_of(view._store)]
    models = [told] if isinstance(told, Mapping) else [one.model for one in found if one.model]
    settings = [quantization_in(model) for model in models]
    others = [one.others for one in found if one.others]  # the folder of a delta has no such files
    problems = dict.fromkeys(problem for one in found for problem in one.problems)
    if any(one != settings[0] for one in settings) or any(one != others[0] for one in others):
        line = (
            f"the files beside {view.root} describe different quantizations, so none of them is taken: "
            "dequantize(config=) says which one is that of the tensors"
        )
        return Evidence(problems=(*problems, Problem("contradicting-quantization", line)))
    return Evidence(
        models[0] if models else {}, settings[0] if settings else {}, others[0] if others else {}, tuple(problems)
    )


def _beside(store: Store, wants_model: bool) -> Evidence:
    """Return what the files of one store say; ``wants_model``: whether config.json is looked for."""
    problems: list[Problem] = []
    others: dict[str, Mapping[str, Any]] = {}
    model: Mapping[str, Any] | None = None
    try:
        there = listing(store)
    except LazyckptError as e:  # a server that lists nothing: only what the reader has found counts
        problems.append(cannot_read(_MODEL, e, ", nor whether there is one"))
        there = {}

    def load(path: str) -> Mapping[str, Any] | None:
        try:
            return load_json(store, path)
        except (CorruptError, MissingFileError) as e:
            problems.append(cannot_read(path, e))
            return None

    for folder in _FOLDERS:
        if folder and folder.rstrip("/") not in there:
            continue
        beside = listing(store, folder.rstrip("/")) if folder else there
        for name in _OTHERS:
            if name in beside and name not in others and (found := load(folder + name)) is not None:
                others[name] = found
        if wants_model and model is None and _MODEL in beside:
            model = load(folder + _MODEL)
    return Evidence(model or {}, {}, others, tuple(problems))


def quantized_among(views: Iterable[Namespace[Any]]) -> str:
    """Return what to say of views whose tensors do not go with others because some of them are quantized; empty if no
    file says that one is."""
    roots = list(dict.fromkeys(view.root for view in views if evidence_of(view, None).quantization))
    if not roots:
        return ""
    verb = "is" if len(roots) == 1 else "are"
    return f"{some(roots, 4)} {verb} quantized: take view.dequantize(), which lazyckpt convert --dequantize writes"


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json less what describes a quantization, also of parts of the model."""
    return {
        key: without_quantization(value) if key.endswith("_config") and isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in KEYS
    }


def quantization_in(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that describes a quantization; empty if there is none."""
    for place in (config, config.get("text_config")):
        if isinstance(place, Mapping):
            for key in _KEYS:
                found = place.get(key)
                if isinstance(found, Mapping) and found:
                    return found
    return {}
