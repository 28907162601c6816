"""The vocabulary of DeepSpeed's checkpoints: keys of the saved dicts, parts of file names, under deepspeed's own names.

Every public constant of deepspeed/checkpoint/constants.py (0.19.8) with its value. The comments say where in a file a
key stands, as deepspeed's writers put it there. "Optimizer file": ``*_optim_states.pt``; "model file":
``*_model_states.pt``; "universal": a folder that ds_to_universal wrote.
"""

from ..formats.deepspeed import files as names

# -- names of files; how they are put together, and by whom: lazyckpt/formats/deepspeed/names.py

# MODEL_FILE_PREFIX + "00" + MODEL_FILE_SUFFIX: the model states of mp rank 0.
MODEL_FILE_PREFIX = names.MODEL_FILE_PREFIX
MODEL_FILE_SUFFIX = names.MODEL_FILE_SUFFIX
# ZERO_FILE_PREFIX + "0_mp_rank_00" + OPTIM_FILE_SUFFIX: the optimizer states of data-parallel rank 0, mp rank 0; in
# runs of 16 bit the name begins with one of the other two.
ZERO_FILE_PREFIX = names.ZERO_FILE_PREFIX
BF16_ZERO_FILE_PREFIX = names.BF16_ZERO_FILE_PREFIX
FP16_ZERO_FILE_PREFIX = names.FP16_ZERO_FILE_PREFIX
OPTIM_FILE_SUFFIX = names.OPTIM_FILE_SUFFIX
# How the file of a pipeline's layer begins, and that of an expert.
LAYER_FILE_PREFIX = names.LAYER_FILE_PREFIX

# -- the degrees of the run that wrote it

# Model files, since 0.19: {pp_degree, tp_degree}.
CHECKPOINT_PARALLEL_DIMS = "checkpoint_parallel_dimensions"
CHECKPOINT_PP_DEGREE = "pp_degree"
CHECKPOINT_TP_DEGREE = "tp_degree"

# -- optimizer files

# The dict with all of the optimizer; under ZeRO-3 a torch optimizer's own state dict stands in it under the same key.
OPTIMIZER_STATE_DICT = "optimizer_state_dict"
# Master weights. ZeRO-0 in 16 bit: a list per group of tensors in their shapes. ZeRO-3: a flat tensor per sub-group.
FP32_GROUPS = "fp32_groups"
FP32_FLAT_GROUPS = "fp32_flat_groups"
# Master weights of ZeRO-1 and 2: per group the rank's partition of the flat buffer, without padding
# (BF16_Optimizer leaves it in).
SINGLE_PARTITION_OF_FP32_GROUPS = "single_partition_of_fp32_groups"
# ZeRO-1 and 2: the torch optimizer's state dict with one "parameter" per group; with elastic checkpoints a list of the
# groups' states, and beside it the step (if the optimizer keeps one in its param_groups).
BASE_OPTIMIZER_STATE = "base_optimizer_state"
BASE_OPTIMIZER_STATE_STEP = "base_optimizer_state_step"
# The torch optimizer's options per group (lr, betas, ...), in its state dict and in universal optimizer_state.pt.
PARAM_GROUPS = "param_groups"
# Per group: elements of padding at the end of this rank's partition (BF16_Optimizer: of the whole group, on the last
# rank).
GROUP_PADDINGS = "group_paddings"
# Per group and parameter: elements of padding behind the parameter (zero_optimization.parameter_alignment).
PARAM_ALIGNMENT_PADDINGS = "param_alignment_paddings"
# Over how many ranks a group is partitioned: a list per group (experts: over fewer), under ZeRO-3 one number.
PARTITION_COUNT = "partition_count"
# 1, 2 or 3; BF16_Optimizer does not write it.
ZERO_STAGE = "zero_stage"
# Gradient clipping (a float, 0.0: none) and the loss scaler (a deepspeed object), as the run had them.
CLIP_GRAD = "clip_grad"
LOSS_SCALER = "loss_scaler"
# Per group: parameter name -> (numel, start) of its piece in this rank's partition. Wrong with round_robin_gradients.
PARAM_SLICE_MAPPINGS = "param_slice_mappings"
# Universal: the name of the state (and file, fp32.pt) that holds a parameter's master weights.
FP32_WEIGHT_KEY = "fp32"

# -- model files

# Under ZeRO: per group of the optimizer, parameter name -> shape, in the order of the flat buffer.
PARAM_SHAPES = "param_shapes"
# Names of the module's persistent buffers.
BUFFER_NAMES = "buffer_names"
# ZeRO-2 and 3: frozen parameter -> shape, and -> this rank's piece (ZeRO-2: the whole).
FROZEN_PARAM_SHAPES = "frozen_param_shapes"
FROZEN_PARAM_FRAGMENTS = "frozen_param_fragments"
# Model and optimizer files: the version of deepspeed that wrote them.
DS_VERSION = "ds_version"

# -- universal_checkpoint_info: how tensor-parallel shards form whole parameters (model files, also optimizer files)

# The dict of all that follows here.
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
# The version of that dict, and the one that deepspeed 0.19.8 writes (0.1: the rules of BLOOM-176B, in code only).
UNIVERSAL_CHECKPOINT_VERSION_KEY = "universal_checkpoint_version"
UNIVERSAL_CHECKPOINT_VERSION_VALUE = 0.4
# Lists of regular expressions that are matched at the start of parameter names. Rows of word embeddings, padded:
VOCABULARY_PARAMETER_PATTERNS = "vocabulary_parameter_patterns"
# the same on all pipeline stages;
PIPELINE_REPLICATED_PARAMETER_PATTERNS = "pipeline_replicated_parameter_patterns"
# to be averaged over tensor-parallel ranks;
PARAMETER_TO_AVERAGE_PATTERNS = "parameter_to_average_patterns"
# cut along dimension 1;
PARAMETER_WITH_ROW_PARALLELISM_PATTERNS = "parameter_with_row_parallelism_patterns"
# the same on all tensor-parallel ranks;
TP_REPLICATED_PARAMETER_PATTERNS = "tp_replicated_parameter_patterns"
# two parameters (gate and up) fused along dimension 0, each of them cut;
PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 = "parameter_with_2_sub_params_cat_dim_0"
# AutoTP: for which it cannot tell.
AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS = "autotp_unsupported_parameter_patterns"
# Several parameters fused along a dimension: a list of {patterns, shape, partition_dim}; since version 0.4 with the
# width of each of them on every rank, by pattern.
PARAMETER_WITH_SUB_PARAMS = "parameter_with_sub_params"
SUB_PARAM_SHARD_WIDTHS = "sub_param_shard_widths"
# AutoTP: {version, params: pattern -> the blocks of each rank's shard and where they stand in the whole}.
AFFINE_MAP = "affine_map"
AFFINE_MAP_VERSION = "version"
AFFINE_MAP_PARAMS = "params"
# Rows of the vocabulary with and without padding.
PADDED_VOCAB_SIZE = "padded_vocab_size"
ORIGINAL_VOCAB_SIZE = "original_vocab_size"
# An attribute of parameters in memory, never a key in a file.
DS_AUTOTP_UC_META = "ds_autotp_universal_checkpoint_meta"

# -- universal: the dict in a parameter's fp32.pt, exp_avg.pt, ...

# The tensor itself, whole.
PARAM = "param"
# True where rows of padding were taken off.
VOCAB_TENSOR = "vocab_tensor"
# Along which dimension to cut it again; how many fused parameters it has; a description of them.
CAT_DIM = "cat_dim"
PARAM_N_SUB_PARAMS = "param_n_sub_params"
SUB_PARAM_SHAPE = "sub_param_shape"
# A spelling of the latter that no writer of 0.19.8 uses.
SUB_PARAMS_SHAPE = "sub_params_shape"
# An expert's parameter, and how many experts its layer has; in universal_checkpoint_info, which names are experts'.
EP_IS_EXPERT_PARAM = "is_expert_param"
EP_NUM_EXPERTS = "ep_num_experts"
EXPERT_PARAMETER_PATTERNS = "expert_parameter_patterns"

# -- AutoEP: deepspeed itself spreads a model's experts over ranks

# Model file: a list with a dict per MoE layer (None without AutoEP); the key's name before it got its prefix.
AUTOEP_LAYERS_KEY = "ds_autoep_layers"
AUTOEP_LAYERS_KEY_LEGACY = "autoep_layers"
# Keys of such a dict: how the names of the experts begin; how many there are, in all and on a rank; on how many ranks.
AUTOEP_EXPERT_KEY_PREFIX = "expert_key_prefix"
AUTOEP_NUM_EXPERTS = "num_experts"
AUTOEP_NUM_LOCAL_EXPERTS = "num_local_experts"
AUTOEP_EP_SIZE = "ep_size"
# Without these ZeRO-1 and 2 states of experts cannot be told apart.
AUTOEP_ZERO12_REQUIRED_FIELDS = (
    AUTOEP_EXPERT_KEY_PREFIX,
    AUTOEP_NUM_EXPERTS,
    AUTOEP_NUM_LOCAL_EXPERTS,
    AUTOEP_EP_SIZE,
)
# Which rank has which experts: {version, num_experts, ep_size, ranks: [{rank, experts}]}.
AUTOEP_EXPERT_PLACEMENT = "expert_placement"
AUTOEP_PLACEMENT_VERSION_KEY = "version"
AUTOEP_PLACEMENT_VERSION = 1
AUTOEP_PLACEMENT_NUM_EXPERTS = "num_experts"
AUTOEP_PLACEMENT_EP_SIZE = "ep_size"
AUTOEP_PLACEMENT_RANKS = "ranks"
AUTOEP_PLACEMENT_RANK = "rank"
AUTOEP_PLACEMENT_EXPERTS = "experts"
# {version, params: name -> the affine map of an expert parameter over the ranks that share it}.
AUTOEP_AFFINE_MAPS = "affine_maps"
# An attribute of parameters in memory, and what it holds.
DS_AUTOEP_UC_META = "ds_autoep_uc_meta"
AUTOEP_PARAM_LOGICAL_SHAPE = "logical_shape"
AUTOEP_PARAM_EP_RANK = "ep_rank"
AUTOEP_PARAM_LOCAL_EXPERTS = "local_experts"
# Expert files under ZeRO-3: that they hold partitions, not whole experts (and the version of
# that layout); in the dict of the layer.
AUTOEP_ZERO3_EXPERT_STATE_FORMAT_KEY = "checkpoint_format"
AUTOEP_ZERO3_PARTITIONED_EXPERT_STATE_FORMAT = "zero3_partitioned"
AUTOEP_ZERO3_EXPERT_STATE_FORMAT_VERSION_KEY = "checkpoint_format_version"
AUTOEP_ZERO3_EXPERT_STATE_FORMAT_VERSION = 1

# -- AutoEP and AutoTP together

# A dict in model, expert and optimizer files: which ranks wrote them. And the version of its layout.
FOLDING_METADATA_KEY = "folding"
FOLDING_METADATA_VERSION = 1
# Sizes and the writer's rank: of tensor parallelism, of expert parallelism, of tensor parallelism inside experts.
FOLDING_TP_SIZE = "tp_size"
FOLDING_TP_RANK = "tp_rank"
FOLDING_EP_SIZE = "ep_size"
FOLDING_EP_RANK = "ep_rank"
FOLDING_ETP_SIZE = "etp_size"
FOLDING_ETP_RANK = "etp_rank"
# The group that ZeRO partitions over, the writer's rank in it, its size.
FOLDING_ZERO_PARTITION_GROUP = "zero_partition_group"
FOLDING_ZERO_PARTITION_RANK = "zero_partition_rank"
FOLDING_ZERO_PARTITION_COUNT = "zero_partition_count"
# How tokens reach their experts, where shared experts live, and what kind of parameters the file holds (or
# which, by name).
FOLDING_DISPATCH_STRATEGY = "dispatch_strategy"
FOLDING_SHARED_EXPERT_PLACEMENT = "shared_expert_placement"
FOLDING_FAMILY = "family"
FOLDING_PARAM_FAMILIES = "param_families"

__all__ = sorted(name for name in list(globals()) if name.isupper())
