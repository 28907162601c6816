"""Keys of DeepSpeed's saved dicts and parts of its file names, under deepspeed's own names.

These are all public constants of deepspeed/checkpoint/constants.py (0.19.8) with their values. The comments say where
deepspeed's writers use each key. "Optimizer file": ``*_optim_states.pt``; "model file": ``*_model_states.pt``;
"universal": a folder that ds_to_universal wrote.
"""

from ..formats.deepspeed import files as names

# -- names of files, as lazyckpt/formats/deepspeed/files.py describes them

# MODEL_FILE_PREFIX + "00" + MODEL_FILE_SUFFIX: the model states of mp rank 0.
MODEL_FILE_PREFIX = names.MODEL_FILE_PREFIX
MODEL_FILE_SUFFIX = names.MODEL_FILE_SUFFIX
# ZERO_FILE_PREFIX + "0_mp_rank_00" + OPTIM_FILE_SUFFIX: the optimizer states of data-parallel rank 0, mp rank 0. 16-bit
# runs use one of the other two prefixes.
ZERO_FILE_PREFIX = names.ZERO_FILE_PREFIX
BF16_ZERO_FILE_PREFIX = names.BF16_ZERO_FILE_PREFIX
FP16_ZERO_FILE_PREFIX = names.FP16_ZERO_FILE_PREFIX
OPTIM_FILE_SUFFIX = names.OPTIM_FILE_SUFFIX
# The prefix of files of pipeline layers and of experts.
LAYER_FILE_PREFIX = names.LAYER_FILE_PREFIX

# -- the parallel degrees of the run that wrote the checkpoint

# Model files, since 0.19: {pp_degree, tp_degree}.
CHECKPOINT_PARALLEL_DIMS = "checkpoint_parallel_dimensions"
CHECKPOINT_PP_DEGREE = "pp_degree"
CHECKPOINT_TP_DEGREE = "tp_degree"

# -- optimizer files

# The dict with all of the optimizer. Under ZeRO-3 it has the torch optimizer's own state dict under the same key.
OPTIMIZER_STATE_DICT = "optimizer_state_dict"
# Master weights. ZeRO-0 in 16 bit: a list per group of tensors in their shapes. ZeRO-3: a flat tensor per sub-group.
FP32_GROUPS = "fp32_groups"
FP32_FLAT_GROUPS = "fp32_flat_groups"
# Master weights of ZeRO-1 and 2: per group the rank's partition of the flat buffer, without padding (with padding if
# BF16_Optimizer wrote it).
SINGLE_PARTITION_OF_FP32_GROUPS = "single_partition_of_fp32_groups"
# ZeRO-1 and 2: the torch optimizer's state dict with one "parameter" per group. In elastic checkpoints a list of the
# groups' states, and the step as a key of its own (if the optimizer keeps one in its param_groups).
BASE_OPTIMIZER_STATE = "base_optimizer_state"
BASE_OPTIMIZER_STATE_STEP = "base_optimizer_state_step"
# The torch optimizer's options per group (lr, betas, ...), in its state dict and in universal optimizer_state.pt.
PARAM_GROUPS = "param_groups"
# Per group: elements of padding at the end of this rank's partition (BF16_Optimizer: of the whole group, on the last
# rank).
GROUP_PADDINGS = "group_paddings"
# Per group and parameter: elements of padding behind the parameter (zero_optimization.parameter_alignment).
PARAM_ALIGNMENT_PADDINGS = "param_alignment_paddings"
# The number of ranks that a group is partitioned over: a list with a number per group (experts: fewer ranks), under
# ZeRO-3 one number.
PARTITION_COUNT = "partition_count"
# 1, 2 or 3; BF16_Optimizer does not write it.
ZERO_STAGE = "zero_stage"
# Gradient clipping (a float; 0.0 for none) and the loss scaler (a deepspeed object) of the run.
CLIP_GRAD = "clip_grad"
LOSS_SCALER = "loss_scaler"
# Per group: parameter name -> (numel, start) of its piece in this rank's partition. Wrong with round_robin_gradients.
PARAM_SLICE_MAPPINGS = "param_slice_mappings"
# Universal: the name of the state (and of its file, fp32.pt) with a parameter's master weights.
FP32_WEIGHT_KEY = "fp32"

# -- model files

# Under ZeRO: per group of the optimizer, parameter name -> shape, in the order of the flat buffer.
PARAM_SHAPES = "param_shapes"
# Names of the module's persistent buffers.
BUFFER_NAMES = "buffer_names"
# ZeRO-2 and 3: frozen parameter -> shape, and frozen parameter -> this rank's piece (ZeRO-2: the whole tensor).
FROZEN_PARAM_SHAPES = "frozen_param_shapes"
FROZEN_PARAM_FRAGMENTS = "frozen_param_fragments"
# Model and optimizer files: the version of deepspeed that wrote them.
DS_VERSION = "ds_version"

# -- universal_checkpoint_info: how tensor-parallel shards form whole parameters (model files, also optimizer files)

# The dict with all keys of this section.
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
# The version of that dict, and the version that deepspeed 0.19.8 writes (0.1: the rules of BLOOM-176B, in code only).
UNIVERSAL_CHECKPOINT_VERSION_KEY = "universal_checkpoint_version"
UNIVERSAL_CHECKPOINT_VERSION_VALUE = 0.4
# Lists of regular expressions that are matched at the start of parameter names. Rows of word embeddings, padded:
VOCABULARY_PARAMETER_PATTERNS = "vocabulary_parameter_patterns"
# replicated on all pipeline stages;
PIPELINE_REPLICATED_PARAMETER_PATTERNS = "pipeline_replicated_parameter_patterns"
# to be averaged over tensor-parallel ranks;
PARAMETER_TO_AVERAGE_PATTERNS = "parameter_to_average_patterns"
# cut along dimension 1;
PARAMETER_WITH_ROW_PARALLELISM_PATTERNS = "parameter_with_row_parallelism_patterns"
# replicated on all tensor-parallel ranks;
TP_REPLICATED_PARAMETER_PATTERNS = "tp_replicated_parameter_patterns"
# two parameters (gate and up) fused along dimension 0, each of them cut;
PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 = "parameter_with_2_sub_params_cat_dim_0"
# unsupported by AutoTP.
AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS = "autotp_unsupported_parameter_patterns"
# Several parameters fused along a dimension: a list of {patterns, shape, partition_dim}; since version 0.4 also the
# width of each parameter on every rank, by pattern.
PARAMETER_WITH_SUB_PARAMS = "parameter_with_sub_params"
SUB_PARAM_SHARD_WIDTHS = "sub_param_shard_widths"
# AutoTP: {version, params: pattern -> the blocks of each rank's shard and their places in the whole parameter}.
AFFINE_MAP = "affine_map"
AFFINE_MAP_VERSION = "version"
AFFINE_MAP_PARAMS = "params"
# Rows of the vocabulary with and without padding.
PADDED_VOCAB_SIZE = "padded_vocab_size"
ORIGINAL_VOCAB_SIZE = "original_vocab_size"
# An attribute of parameters in memory, never a key in a file.
DS_AUTOTP_UC_META = "ds_autotp_universal_checkpoint_meta"

# -- universal: the dict in a parameter's fp32.pt, exp_avg.pt, ...

# The whole tensor.
PARAM = "param"
# True if rows of padding were removed.
VOCAB_TENSOR = "vocab_tensor"
# The dimension along which to cut the tensor again; the number of its fused parameters; a description of them.
CAT_DIM = "cat_dim"
PARAM_N_SUB_PARAMS = "param_n_sub_params"
SUB_PARAM_SHAPE = "sub_param_shape"
# A spelling of SUB_PARAM_SHAPE's key that no writer of 0.19.8 uses.
SUB_PARAMS_SHAPE = "sub_params_shape"
# Whether the parameter is an expert's, and the number of experts of its layer; in universal_checkpoint_info, the
# patterns of experts' names.
EP_IS_EXPERT_PARAM = "is_expert_param"
EP_NUM_EXPERTS = "ep_num_experts"
EXPERT_PARAMETER_PATTERNS = "expert_parameter_patterns"

# -- AutoEP: deepspeed distributes a model's experts over ranks

# Model file: a list with a dict per MoE layer (None without AutoEP); and an older name of the key, without a prefix.
AUTOEP_LAYERS_KEY = "ds_autoep_layers"
AUTOEP_LAYERS_KEY_LEGACY = "autoep_layers"
# Keys of such a dict: prefix of the experts' names; number of experts, in all and per rank; number of ranks.
AUTOEP_EXPERT_KEY_PREFIX = "expert_key_prefix"
AUTOEP_NUM_EXPERTS = "num_experts"
AUTOEP_NUM_LOCAL_EXPERTS = "num_local_experts"
AUTOEP_EP_SIZE = "ep_size"
# Required to distinguish the states of experts under ZeRO-1 and 2.
AUTOEP_ZERO12_REQUIRED_FIELDS = (
    AUTOEP_EXPERT_KEY_PREFIX,
    AUTOEP_NUM_EXPERTS,
    AUTOEP_NUM_LOCAL_EXPERTS,
    AUTOEP_EP_SIZE,
)
# The experts of each rank: {version, num_experts, ep_size, ranks: [{rank, experts}]}.
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
# An attribute of parameters in memory, and its keys.
DS_AUTOEP_UC_META = "ds_autoep_uc_meta"
AUTOEP_PARAM_LOGICAL_SHAPE = "logical_shape"
AUTOEP_PARAM_EP_RANK = "ep_rank"
AUTOEP_PARAM_LOCAL_EXPERTS = "local_experts"
# Keys and values in the dict of the layer: under ZeRO-3, expert files hold partitions, not whole experts; and the
# version of that layout.
AUTOEP_ZERO3_EXPERT_STATE_FORMAT_KEY = "checkpoint_format"
AUTOEP_ZERO3_PARTITIONED_EXPERT_STATE_FORMAT = "zero3_partitioned"
AUTOEP_ZERO3_EXPERT_STATE_FORMAT_VERSION_KEY = "checkpoint_format_version"
AUTOEP_ZERO3_EXPERT_STATE_FORMAT_VERSION = 1

# -- AutoEP and AutoTP together

# A dict in model, expert and optimizer files with the ranks that wrote them, and the version of its layout.
FOLDING_METADATA_KEY = "folding"
FOLDING_METADATA_VERSION = 1
# The size and the writer's rank of tensor parallelism, expert parallelism, and tensor parallelism inside experts.
FOLDING_TP_SIZE = "tp_size"
FOLDING_TP_RANK = "tp_rank"
FOLDING_EP_SIZE = "ep_size"
FOLDING_EP_RANK = "ep_rank"
FOLDING_ETP_SIZE = "etp_size"
FOLDING_ETP_RANK = "etp_rank"
# The group that ZeRO partitions over, the writer's rank in the group, and the size of the group.
FOLDING_ZERO_PARTITION_GROUP = "zero_partition_group"
FOLDING_ZERO_PARTITION_RANK = "zero_partition_rank"
FOLDING_ZERO_PARTITION_COUNT = "zero_partition_count"
# How tokens are dispatched to experts, the placement of shared experts, and the kind of parameters in the file (or the
# kind of each parameter, by name).
FOLDING_DISPATCH_STRATEGY = "dispatch_strategy"
FOLDING_SHARED_EXPERT_PLACEMENT = "shared_expert_placement"
FOLDING_FAMILY = "family"
FOLDING_PARAM_FAMILIES = "param_families"

__all__ = [
    "AFFINE_MAP",
    "AFFINE_MAP_PARAMS",
    "AFFINE_MAP_VERSION",
    "AUTOEP_AFFINE_MAPS",
    "AUTOEP_EP_SIZE",
    "AUTOEP_EXPERT_KEY_PREFIX",
    "AUTOEP_EXPERT_PLACEMENT",
    "AUTOEP_LAYERS_KEY",
    "AUTOEP_LAYERS_KEY_LEGACY",
    "AUTOEP_NUM_EXPERTS",
    "AUTOEP_NUM_LOCAL_EXPERTS",
    "AUTOEP_PARAM_EP_RANK",
    "AUTOEP_PARAM_LOCAL_EXPERTS",
    "AUTOEP_PARAM_LOGICAL_SHAPE",
    "AUTOEP_PLACEMENT_EP_SIZE",
    "AUTOEP_PLACEMENT_EXPERTS",
    "AUTOEP_PLACEMENT_NUM_EXPERTS",
    "AUTOEP_PLACEMENT_RANK",
    "AUTOEP_PLACEMENT_RANKS",
    "AUTOEP_PLACEMENT_VERSION",
    "AUTOEP_PLACEMENT_VERSION_KEY",
    "AUTOEP_ZERO3_EXPERT_STATE_FORMAT_KEY",
    "AUTOEP_ZERO3_EXPERT_STATE_FORMAT_VERSION",
    "AUTOEP_ZERO3_EXPERT_STATE_FORMAT_VERSION_KEY",
    "AUTOEP_ZERO3_PARTITIONED_EXPERT_STATE_FORMAT",
    "AUTOEP_ZERO12_REQUIRED_FIELDS",
    "AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS",
    "BASE_OPTIMIZER_STATE",
    "BASE_OPTIMIZER_STATE_STEP",
    "BF16_ZERO_FILE_PREFIX",
    "BUFFER_NAMES",
    "CAT_DIM",
    "CHECKPOINT_PARALLEL_DIMS",
    "CHECKPOINT_PP_DEGREE",
    "CHECKPOINT_TP_DEGREE",
    "CLIP_GRAD",
    "DS_AUTOEP_UC_META",
    "DS_AUTOTP_UC_META",
    "DS_VERSION",
    "EP_IS_EXPERT_PARAM",
    "EP_NUM_EXPERTS",
    "EXPERT_PARAMETER_PATTERNS",
    "FOLDING_DISPATCH_STRATEGY",
    "FOLDING_EP_RANK",
    "FOLDING_EP_SIZE",
    "FOLDING_ETP_RANK",
    "FOLDING_ETP_SIZE",
    "FOLDING_FAMILY",
    "FOLDING_METADATA_KEY",
    "FOLDING_METADATA_VERSION",
    "FOLDING_PARAM_FAMILIES",
    "FOLDING_SHARED_EXPERT_PLACEMENT",
    "FOLDING_TP_RANK",
    "FOLDING_TP_SIZE",
    "FOLDING_ZERO_PARTITION_COUNT",
    "FOLDING_ZERO_PARTITION_GROUP",
    "FOLDING_ZERO_PARTITION_RANK",
    "FP16_ZERO_FILE_PREFIX",
    "FP32_FLAT_GROUPS",
    "FP32_GROUPS",
    "FP32_WEIGHT_KEY",
    "FROZEN_PARAM_FRAGMENTS",
    "FROZEN_PARAM_SHAPES",
    "GROUP_PADDINGS",
    "LAYER_FILE_PREFIX",
    "LOSS_SCALER",
    "MODEL_FILE_PREFIX",
    "MODEL_FILE_SUFFIX",
    "OPTIMIZER_STATE_DICT",
    "OPTIM_FILE_SUFFIX",
    "ORIGINAL_VOCAB_SIZE",
    "PADDED_VOCAB_SIZE",
    "PARAM",
    "PARAMETER_TO_AVERAGE_PATTERNS",
    "PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0",
    "PARAMETER_WITH_ROW_PARALLELISM_PATTERNS",
    "PARAMETER_WITH_SUB_PARAMS",
    "PARAM_ALIGNMENT_PADDINGS",
    "PARAM_GROUPS",
    "PARAM_N_SUB_PARAMS",
    "PARAM_SHAPES",
    "PARAM_SLICE_MAPPINGS",
    "PARTITION_COUNT",
    "PIPELINE_REPLICATED_PARAMETER_PATTERNS",
    "SINGLE_PARTITION_OF_FP32_GROUPS",
    "SUB_PARAMS_SHAPE",
    "SUB_PARAM_SHAPE",
    "SUB_PARAM_SHARD_WIDTHS",
    "TP_REPLICATED_PARAMETER_PATTERNS",
    "UNIVERSAL_CHECKPOINT_INFO",
    "UNIVERSAL_CHECKPOINT_VERSION_KEY",
    "UNIVERSAL_CHECKPOINT_VERSION_VALUE",
    "VOCABULARY_PARAMETER_PATTERNS",
    "VOCAB_TENSOR",
    "ZERO_FILE_PREFIX",
    "ZERO_STAGE",
]
