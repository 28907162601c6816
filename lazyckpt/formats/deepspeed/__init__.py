"""DeepSpeed checkpoints: ZeRO-0 to 3, BF16_Optimizer, pipelines, tensor parallelism, experts, universal."""
