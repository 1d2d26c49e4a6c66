"""Keys of DeepSpeed's configuration that change nothing here, and those that are refused."""

from __future__ import annotations

WITHOUT_EFFECT = {
    "prescale_gradients": "a reduction averages in one step; `communication_data_type` says in which dtype",
    "gradient_predivide_factor": "a reduction averages in one step; `communication_data_type` says in which dtype",
    "zero_allow_untested_optimizer": "any optimizer may be used",
    "zero_force_ds_cpu_optimizer": "any element-wise optimizer of torch can step on the host",
    "zero_optimization.contiguous_gradients": "gradients are shards in separate memory, which does not fragment",
    "zero_optimization.reduce_scatter": "the stage decides: gradients of shards are reduce-scattered",
    "zero_optimization.allgather_partitions": "parameters are always gathered by all-gathers",
    "zero_optimization.round_robin_gradients": "it balances copies to the host, which dsgraph does not make",
    "zero_optimization.stage3_max_live_parameters": "`dsgraph.memory_limit` decides what stays gathered",
    "zero_optimization.stage3_max_reuse_distance": "`dsgraph.memory_limit` decides what stays gathered",
    "zero_optimization.stage3_prefetch_bucket_size": "predicted times decide how early parameters are gathered",
    "zero_optimization.sub_group_size": "the optimizer's step needs no buffers that must be kept small",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "`state_dict` contains shards at every stage",
    "zero_optimization.cpu_offload_use_pin_memory": "set `zero_optimization.offload_optimizer.pin_memory` instead",
    "zero_optimization.ignore_unused_parameters": "unused parameters are always allowed",
    "zero_optimization.legacy_stage1": "there is only one implementation of stage 1",
    "zero_optimization.load_from_fp32_weights": "shards are the master weights",
    "zero_optimization.elastic_checkpoint": "checkpoints load on any number of ranks",
    "zero_optimization.offload_optimizer.buffer_count": "two chunks of state, or of gradients to the host, "
    "are in memory at a time",
    "zero_optimization.offload_optimizer.buffer_size": "a chunk is 32 MiB, or one parameter if larger",
    "zero_optimization.offload_optimizer.fast_init": "nothing is written before the first step",
    "zero_optimization.offload_optimizer.pipeline": "reading, computing and writing always overlap",
    "zero_optimization.offload_optimizer.pipeline_read": "reading, computing and writing always overlap",
    "zero_optimization.offload_optimizer.pipeline_write": "reading, computing and writing always overlap",
    "zero_optimization.offload_param.pin_memory": "buffers of parameters on disk are never pinned",
    "zero_optimization.offload_param.max_in_cpu": "`zero_optimization.offload_param.ratio` sets the offloaded share",
    "disable_allgather": "it selects an algorithm of DeepSpeed",
    "checkpoint.load_universal": "every checkpoint loads at any stage and on any number of ranks",
    "checkpoint.parallel_write": "each rank always writes its own rows",
    "flops_profiler.recompute_fwd_factor": "recomputation is not counted as operations of the model",
    "fp16.auto_cast": "floating-point inputs are always cast",
    "fp16.fp16_master_weights_and_grads": "shards keep the dtype of the model",
    "activation_checkpointing.partition_activations": "only tensor-parallel ranks store the same activations",
    "activation_checkpointing.number_checkpoints": "the graph determines what is saved",
    "activation_checkpointing.synchronize_checkpoint_boundary": "the graph determines all dependencies",
    "activation_checkpointing.profile": "regions are parts of one graph; `wall_clock_breakdown` prints its times",
    "quantize_training.quantizer_kernel": "the compiler fuses the quantization of weights",
    "bf16.immediate_grad_update": "gradients are accumulated in the dtype of the shards",
    "compile.deepcompile": "`dsgraph.compile` says whether the model is compiled, always with passes for ZeRO",
}
"""Keys of DeepSpeed that are accepted and change nothing, each with the reason, which is printed."""

NOT_YET = {
    "zero_optimization.zero_hpz_partition_size": "a secondary partition",
    "zero_optimization.zero_quantized_weights": "quantized communication",
    "zero_optimization.zero_quantized_gradients": "quantized communication",
    "activation_checkpointing.contiguous_memory_optimization": "packing activations into one block of memory",
    "amp": "apex",
    "torch_autocast": "autocast by configuration (torch.autocast around the forward works)",
    "checkpoint.use_node_local_storage": "a checkpoint whose files are stored on a disk of each node",
    "checkpoint.writer": "a choice of writers",
    "wandb": "writing to Weights & Biases",
    "sparse_gradients": "sparse gradients",
    "curriculum_learning": "curricula",
    "data_efficiency": "curricula",
    "elasticity": "elastic training",
    "autotuning": "tuning by trial",
    "compression_training": "compression",
    "eigenvalue": "a section outside `quantize_training` (dsgraph supports it inside, as DeepSpeed documents it)",
    "pipeline": "pipelines",
    "comms_logger": "the log of collectives (`dsgraph collectives` shows them)",
    "aio": "tuning of reads and writes of the disk",
    "compile.offload_activation": "this key (`activation_checkpointing.cpu_checkpointing` moves activations)",
    "compile.offload_opt_states": "this key (`zero_optimization.offload_optimizer` moves the optimizer state)",
    "compile.offload_parameters": "this key (`zero_optimization.offload_param` moves parameters)",
}
"""Keys of DeepSpeed that ask for what is not supported yet."""

OFF = {"zero_optimization.zero_hpz_partition_size": 1}
"""Values, besides false, with which such a key asks for nothing."""


OLD_NAMES: dict[str, tuple[str, tuple[dict[str, str | int], ...]]] = {
    "bfloat16": ("bf16", ()),
    "zero_optimization": ("zero_optimization", ({"stage": 0}, {"stage": 1})),
    "zero_optimization.cpu_offload": ("offload_optimizer", ({"device": "none"}, {"device": "cpu"})),
    "zero_optimization.cpu_offload_param": ("offload_param", ({"device": "none"}, {"device": "cpu"})),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": ("stage3_gather_16bit_weights_on_model_save", ()),
}
"""Keys of earlier DeepSpeed versions: the present name in the section, and the sections for false and true, if any."""
