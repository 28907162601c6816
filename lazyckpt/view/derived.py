"""The methods of a view that make other views of its tensors: renamed, converted, quantized, cut, with other layers."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..core.index import Index
from ..derive.dequantize import dequantized
from ..derive.quantize import quantized
from ..derive.restacking import upcycled, with_experts, with_layers
from ..lookup import Step
from ..reshaping import division, of_rank, shown_of, with_dtype, with_function, with_names
from .reading import Readable

if TYPE_CHECKING:
    import torch
else:
    from ..deferred import torch

View = TypeVar("View", bound=Readable, covariant=True)  # the class of the views that the methods return


class Derivable(Readable, Generic[View]):
    """A view with the methods that return other views. They read nothing."""

    __slots__ = ()

    @abstractmethod
    def _of(self, index: Index, steps: tuple[Step, ...] = ()) -> View:
        """Return a view of another index of the same files, in the same state."""

    # -- other names, another dtype, other ranks

    def rename(self, names: str | Mapping[str, Any], *, reverse: bool = False) -> View:
        """Return a view of the same tensors under other names. Copies and reads nothing.

        Tensors that the other naming splits or joins (q, k and v; gate and up) are split or joined lazily.

        Parameters
        ----------
        names
            "hf" converts megatron-core's names to Hugging Face's, "megatron" converts them back. Of a GGUF file, "hf"
            converts the names and undoes what llama.cpp changed in the values (docs/formats/gguf.md). Other values are
            the name of a table ("llama", "mixtral", "deepseek": docs/how-to/layouts.md has all), a ``model_type`` of
            Hugging Face ("qwen3_moe"), or a table of your own such as ``{"decoder.layers.{l}.mlp.linear_fc2.{p}":
            "model.layers.{l}.mlp.down_proj.{p}"}``; ``{"extends": "llama", ...}`` adds lines to a table.
        reverse
            Read the table from right to left.

        Returns
        -------
        CheckpointView
            A tensor that no line of the table matches, or that cannot be split, keeps its name and has an entry in
            ``problems``.

        Raises
        ------
        FormatError
            There is no such table, there is none for the ``model_type`` in config.json, names without a config.json
            are those of several architectures, or a line of the table is invalid.
        DataError
            The view is a part below a prefix. Rename the whole view, then take the part.
        """
        return self._of(with_names(self, names, reverse))

    def astype(self, dtype: torch.dtype) -> View:
        """Return a view that converts floating-point tensors to another dtype when they are read.

        Integer, bool and complex tensors keep their dtype, and so do the other states: in a training checkpoint the
        weights are converted, the fp32 master weights and the moments are not.

        Parameters
        ----------
        dtype
            A floating-point dtype.

        Returns
        -------
        CheckpointView
            The converted view. Nothing is read.

        Raises
        ------
        DataError
            ``dtype`` is not a floating-point dtype, or torch cannot convert a tensor to it.
        """
        return self._of(with_dtype(self, dtype), self._steps)

    def map(
        self,
        function: Callable[[torch.Tensor], torch.Tensor],
        *,
        dtype: torch.dtype | None = None,
        whole: bool = False,
    ) -> View:
        """Return a view whose tensors are a function of those of this view. Reads nothing.

        Parameters
        ----------
        function
            A function of a CPU tensor that returns one of the same shape. It may change its argument. It is called on
            several threads at a time, for blocks of a tensor: its result for an element has to be the same whichever
            other elements the block has, as that of ``torch.relu`` is, and that of ``x / x.norm()`` is not.
        dtype
            The dtype of the new tensors, to which results are converted; by default that of the tensors of this view.
        whole
            Call the function with whole tensors only. A slice then reads its whole tensor.

        Returns
        -------
        CheckpointView
            The view of the results, with the same names, in the state of this view. It cannot be pickled: what is
            written to disk or sent to other processes names operations of lazyckpt.

        Raises
        ------
        DataError
            When tensors are read: the function returned something else than a tensor of the same shape.

        Examples
        --------
        >>> import torch
        >>> clipped = view.map(lambda x: x.clamp(-1, 1))  # doctest: +SKIP
        >>> clipped.to_safetensors("clipped.safetensors")  # doctest: +SKIP
        """
        return self._of(with_function(self, function, dtype, whole), self._steps)

    def dequantize(
        self, dtype: torch.dtype | None = None, *, config: Mapping[str, Any] | str | os.PathLike[str] | None = None
    ) -> View:
        """Return a view of the unquantized model: the weights that the stored codes and scales mean.

        The weights have the names of the unquantized model; the scales, zero points and states that they are computed
        from are not in the view. Other tensors stay as they are. A slice of a weight reads only its codes and scales.
        What the tensors mean follows from config.json beside the checkpoint, names, shapes and dtypes; nothing is
        guessed: a tensor that these do not decide stays as it is stored, and has an entry in ``problems``.
        docs/reference/expressions.md lists the formats.

        Parameters
        ----------
        dtype
            The dtype of the weights, by default bfloat16. Each weight is computed as its format's own library computes
            it, and rounded to this dtype.
        config
            The contents of config.json (or of its ``quantization_config``), or the path of that file or its folder, if
            it is not beside the checkpoint.

        Returns
        -------
        CheckpointView
            The dequantized view, of the same state. At most some tensors of a few bytes are read.

        Raises
        ------
        DataError
            ``dtype`` is not a floating-point dtype that can be computed with.
        MissingFileError, CorruptError
            There is no file at ``config``, or it is not valid JSON.
        """
        index, steps = dequantized(self, torch.bfloat16 if dtype is None else dtype, config)
        return self._of(index, steps)

    def quantize(self, kind: str, *, skip: Sequence[str] | None = None) -> View:
        """Return a view of the model with its matrices quantized, by rounding to nearest, as tensors that transformers
        loads.

        Codes and scales are computed when they are read, each from the block of the weight that it belongs to. The
        configuration that belongs to them is in ``view.meta["config"]["quantization_config"]``; ``lazyckpt convert
        SRC DEST --quantize KIND`` writes it to config.json.

        Parameters
        ----------
        kind
            - ``"fp8-block"``: float8_e4m3fn with a scale for each 128 x 128 block, as DeepSeek-V3 has it;
            - ``"int8"``: 8 bits with a scale for each row, as compressed-tensors packs them ("pack-quantized");
            - ``"nf4"``: bitsandbytes' 4 bits with a scale for each 64 elements;
            - ``"nf4-double"``: the same with scales of 8 bits (``bnb_4bit_use_double_quant``). They need the mean of
              all scales of a weight, so the first of them reads the whole weight. So does ``dequantize()`` of this
              view, for every weight;
            - ``"mxfp4"``: floats of 4 bits with a power of two for each 32 elements of a row, as compressed-tensors
              packs them ("mxfp4-pack-quantized").
        skip
            Globs of the modules that stay as they are. By default heads, embeddings, norms and routers
            (`lazyckpt.derive.quantize.SKIPPED`).

        Returns
        -------
        CheckpointView
            The quantized view, of the same state. Tensors that are no matrices named ``*.weight`` stay as they are,
            but stacked experts with "fp8-block". GPT-2's transposed layers are quantized by "nf4" and "nf4-double"
            only. ``problems`` lists what could not be quantized.

        Raises
        ------
        DataError
            There is no such kind, the checkpoint is quantized already, or no matrix can be quantized.
        """
        index, steps, _ = quantized(self, kind, skip)
        return self._of(index, steps)

    def shard(
        self,
        *,
        tp: int = 1,
        pp: int = 1,
        dp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        vpp: int = 1,
        layout: str | Sequence[int] | None = None,
        vocab_multiple: int | None = None,
        rank: int | tuple[int, ...] | Mapping[str, int],
        rules: Mapping[str, Any] | None = None,
    ) -> View:
        """Return the part of every state that one rank of another parallel layout holds. Reads nothing.

        Tensors are cut by the same rules that merge the shards of a checkpoint. A slice of a shard reads only its own
        bytes. The shard of a shard is the shard of the product of the degrees. `lazyckpt.unshard` is the inverse.

        Parameters
        ----------
        tp
            Tensor-parallel degree. gate and up are cut separately, attention in whole groups of heads; the rows of a
            vocabulary that do not divide are padded with zeros. More ranks than key-value heads have copies of these;
            megatron-core's fused q, k and v are then cut within the groups, as megatron-core 0.16 does.
        pp
            Pipeline-parallel degree: layers are distributed over stages. Megatron's names number the layers of each
            stage from 0; other names keep their numbers.
        dp
            Data-parallel degree. Above 1 each tensor becomes the rank's flat partition, as ZeRO-3 stores weights and
            moments, of shape (ceil(n / dp),) for n elements.
        ep
            Expert-parallel degree: experts are distributed over ranks.
        etp
            Expert-tensor-parallel degree: how many ranks cut an expert's tensors. By default ``tp``.
        vpp
            Model chunks of each pipeline stage (virtual stages). The pipeline visits chunk 0 of all stages, then chunk
            1. Megatron's names then begin with ``model0.``, ``model1.``, as the keys of its files do.
        layout
            How many layers each stage has, if not all the same: a layout string of megatron-core such as
            ``"Ett|(tt|)*6,tL"``, or a list such as ``[3, 4, 4, 3]``. Several chunks of a stage are listed in the order
            of the pipeline.
        vocab_multiple
            Megatron's ``--make-vocab-size-divisible-by``: the rows of a vocabulary are padded with zeros to a multiple
            of it times ``tp``. Rows that the source has are kept. By default the number in the source's arguments, else
            1.
        rank
            Which rank: a global number (tp varies fastest, then ep, dp, pp), a tuple (tp, pp, dp, ep), or a mapping
            such as ``{"tp": 1}``. Where ``etp`` is not ``tp``, ranks are numbered as in Megatron, and not every tp rank
            meets every ep rank.
        rules
            How tensors are cut for which no rule is known, as in `lazyckpt.open`.

        Returns
        -------
        CheckpointView
            The view of the rank's shard.

        Raises
        ------
        MeshError
            A degree does not divide what it splits, or the layout does not fit the layers.
        FormatError
            No rule is known for a tensor, or ``rules`` is invalid.
        SelectionError
            There is no such rank.
        DataError
            The view is a part below a prefix. Shard the whole view, then take the part.
        """
        return self._of(of_rank(self, division(tp, pp, dp, ep, etp, vpp, layout, vocab_multiple), rank, rules or {}))

    # -- other layers and experts

    def layers(self, *numbers: int | Iterable[int], stack: str | None = None) -> View:
        """Return the model with these of its layers, in this order, numbered anew. Copies and reads nothing.

        ``view.layers(range(24), range(8, 32))`` repeats layers (depth up-scaling), ``view.layers(*range(28), 31)``
        drops some. A layer that is named twice is in the result twice, as tensors of their own. All states follow:
        weights, master weights and moments.

        Parameters
        ----------
        *numbers
            Numbers of layers, or ranges or lists of them.
        stack
            The prefix of the layers, such as "model.layers", if the model has several stacks.

        Returns
        -------
        CheckpointView
            The model. ``meta["config"]``, which `lazyckpt.recipes.to_hf` writes, says the new number of layers, and has
            what it says of each layer for the chosen ones.

        Raises
        ------
        DataError
            There is no such layer or stack; config.json cannot express the order; the view is a part below a prefix.
        """
        return self._of(with_layers(self, shown_of(self, "layers"), numbers, stack))

    def keep_experts(self, experts: Sequence[int] | Mapping[int, Sequence[int]]) -> View:
        """Return a mixture of experts with some of its experts, numbered anew in the given order. Reads nothing.

        The rows of the routers are those of the experts. It knows the names of Mixtral, Qwen, DeepSeek and Megatron,
        and experts that are stacked in one tensor (gpt-oss, transformers 5).

        Parameters
        ----------
        experts
            Numbers of experts, for all layers, or a mapping from the number of a layer to its experts. Every layer has
            to keep the same number; a layer that the mapping lacks keeps all.

        Returns
        -------
        CheckpointView
            The model. ``meta["config"]``, which `lazyckpt.recipes.to_hf` writes, says the new number of experts.

        Raises
        ------
        DataError
            There are no such experts, or layers would differ; fewer experts are left than config.json sends a token to;
            the view is a part below a prefix.
        """
        return self._of(with_experts(self, shown_of(self, "keep_experts"), experts, False))

    def drop_experts(self, experts: Sequence[int] | Mapping[int, Sequence[int]]) -> View:
        """Return a mixture of experts without some of its experts. The opposite of `keep_experts`, with its parameters.

        Parameters
        ----------
        experts
            Numbers of experts, for all layers, or a mapping from the number of a layer to its experts.

        Returns
        -------
        CheckpointView
            The model.

        Raises
        ------
        DataError
            What `keep_experts` raises.
        """
        return self._of(with_experts(self, shown_of(self, "drop_experts"), experts, True))

    def upcycle(
        self, experts: int, *, top_k: int = 2, router: str = "normal", std: float = 0.02, seed: int = 0
    ) -> View:
        """Return a dense model as a mixture of experts, each a copy of its MLP (sparse upcycling). Reads nothing.

        Llama and Mistral become Mixtral, Qwen3 becomes Qwen3-MoE. The weights of a token's experts sum to 1, so the
        mixture computes what the dense model did until it is trained. Only the view's state is in the result: moments
        of the dense model's optimizer do not fit.

        Parameters
        ----------
        experts
            How many.
        top_k
            The experts that each token goes to.
        router
            "normal": normally distributed weights. "zeros": all experts are equal for every token, so that the same
            ones are always taken until something else breaks the tie.
        std, seed
            Of the router's weights.

        Returns
        -------
        CheckpointView
            The mixture. ``meta["config"]``, which `lazyckpt.recipes.to_hf` writes, is that of the new model.

        Raises
        ------
        DataError
            config.json is missing, or of another model; the MLP has biases; the view is a part below a prefix.
        """
        return self._of(upcycled(self, shown_of(self, "upcycle"), experts, top_k, router, std, seed))
