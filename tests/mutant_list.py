"""The mutants of `tests.mutants`: each breaks the product in one line, as a slip of the hand would."""

from __future__ import annotations

from dataclasses import dataclass

_KERNELS = "tests/inductor_ext/kernels"
_ZERO, _OVERLAP, _ANALYSIS = "tests/passes/zero", "tests/passes/overlap", "tests/passes/analysis"
_STEP, _STEP_TESTS = "dsgraph/partitioning/step", "tests/partitioning/step"
_PARALLEL = "tests/engine/techniques/test_parallel_techniques.py"


@dataclass(frozen=True)
class Mutant:
    """One change of one line.

    Attributes:
        name: What is broken.
        file: Where, relative to the repository.
        kind: What sort of slip it is.
        within: The function, class, attribute or constant that it changes: `Class.method`.
        before: What it replaces there, which stands in it once. Line breaks and spaces may differ.
        after: What it puts in its place.
        killers: Test files that should notice; they are tried first.
    """

    name: str
    file: str
    kind: str
    within: str
    before: str
    after: str
    killers: tuple[str, ...]


KERNELS = (
    Mutant(
        *("rms-norm-mean", "inductor_ext/kernels/rms_norm.py", "wrong scale"),
        *("backward_reference", ".mean(", ".sum("),
        killers=(f"{_KERNELS}/test_rms_norm.py",),
    ),
    Mutant(
        *("rms-norm-rounding", "inductor_ext/kernels/rms_norm.py", "missing cast"),
        *("reference", "(wide * rstd).to(norm_dtype)", "wide * rstd"),
        killers=(f"{_KERNELS}/test_rms_norm.py",),
    ),
    Mutant(
        *("rms-norm-triton-mean", "inductor_ext/kernels/rms_norm.py", "wrong scale"),
        *("forward_kernel", "/ columns +", "/ BLOCK +"),
        killers=(f"{_KERNELS}/test_add_rms_norm.py",),
    ),
    Mutant(
        *("layer-norm-centre", "inductor_ext/kernels/layer_norm.py", "missing term"),
        *("backward_reference", "u.mean(-1, keepdim=True) -", ""),
        killers=(f"{_KERNELS}/test_layer_norm.py",),
    ),
    Mutant(
        *("rope-turns-back", "inductor_ext/kernels/rope.py", "wrong sign"),
        *("_rotated", "] - x2", "] + x2"),
        killers=(f"{_KERNELS}/test_rope.py",),
    ),
    Mutant(
        *("rope-backward-halves", "inductor_ext/kernels/rope.py", "swapped order"),
        *("backward_reference", "s2, -s1", "s1, -s2"),
        killers=(f"{_KERNELS}/test_rope.py",),
    ),
    Mutant(
        *("swiglu-slope", "inductor_ext/kernels/swiglu.py", "wrong sign"),
        *("backward_reference", "1 + a", "1 - a"),
        killers=(f"{_KERNELS}/test_every_kernel.py", f"{_KERNELS}/test_swiglu.py"),
    ),
    Mutant(
        *("skinny-scale", "inductor_ext/kernels/decoding/skinny_linear.py", "missing term"),
        *("traceable", "if scale is None else y * scale", ""),
        killers=(f"{_KERNELS}/decoding/test_skinny_linear.py",),
    ),
    Mutant(
        *("skinny-triton-tail", "inductor_ext/kernels/decoding/skinny_linear.py", "off by one"),
        *("product_kernel", "k, BLOCK_K", "k - BLOCK_K + 1, BLOCK_K"),
        killers=(f"{_KERNELS}/decoding/test_skinny_linear.py",),
    ),
    Mutant(
        *("decode-attention-filled", "inductor_ext/kernels/decoding/decode_attention.py", "off by one"),
        *("_filled", "1, mask.shape[-1] + 1", "mask.shape[-1]"),
        killers=(f"{_KERNELS}/decoding/test_decode_attention.py",),
    ),
    Mutant(
        *("decode-attention-triton-heads", "inductor_ext/kernels/decoding/decode_attention.py", "wrong index"),
        *("attention_kernel", "keys_stride0 + (head //", "keys_stride0 + (head %"),
        killers=(f"{_KERNELS}/decoding/test_decode_attention.py",),
    ),
    Mutant(
        *("skinny-cpp-tail", "inductor_ext/kernels/decoding/skinny_source.py", "off by one"),
        *("SOURCE", "i < k", "i + LANES <= k"),
        killers=(f"{_KERNELS}/decoding/test_skinny_linear.py",),
    ),
    Mutant(
        *("skinny-cpp-halves", "inductor_ext/kernels/decoding/skinny_source.py", "wrong index"),
        *("SOURCE", "* high[", "* low["),
        killers=(f"{_KERNELS}/decoding/test_skinny_groups.py",),
    ),
    Mutant(
        *("decode-attention-cpp-filled", "inductor_ext/kernels/decoding/decode_attention_cpp.py", "missing check"),
        *("_SOURCE", "!mask[(filled - 1) * mask_stride]", "false"),
        killers=(f"{_KERNELS}/decoding/test_decode_attention.py",),
    ),
    Mutant(
        *("softmax-dropout-scale", "inductor_ext/kernels/softmax_dropout.py", "wrong scale"),
        *("_scale", "/ (1 - p)", "- p"),
        killers=(f"{_KERNELS}/test_softmax_dropout.py",),
    ),
    Mutant(
        *("softmax-dropout-triton-sum", "inductor_ext/kernels/softmax_dropout.py", "missing term"),
        *("backward_kernel", "(u - tl.sum(u * z, 0))", "u"),
        killers=(f"{_KERNELS}/test_softmax_dropout.py",),
    ),
    Mutant(
        *("cross-entropy-ignored-rows", "inductor_ext/kernels/cross_entropy_rows.py", "missing mask"),
        *("_few_rows", ").masked_fill_(ignored, 0)", ")"),
        killers=(f"{_KERNELS}/test_cross_entropy_rows.py",),
    ),
    Mutant(
        *("cross-entropy-last-chunk", "inductor_ext/kernels/linear_cross_entropy_chunks.py", "off by one"),
        *("row_chunks", ", count)", ", count - 1)"),
        killers=(f"{_KERNELS}/test_linear_cross_entropy.py",),
    ),
)

SUBSTITUTION = (
    Mutant(
        *("kernel-over-a-write", "passes/kernels/capture_graph.py", "missing check"),
        *("_disturbs", "any(not storages.isdisjoint(_storages(item)) for item in written)", "not written and storages"),
        killers=("tests/passes/kernels/test_substitute_kernels.py",),
    ),
    Mutant(
        *("kernel-over-grad-mode", "passes/kernels/capture_graph.py", "missing check"),
        *("_disturbs", "is set_grad_enabled:", "is None:"),
        killers=("tests/passes/kernels/test_substitute_kernels.py",),
    ),
)

SPARSE = (
    Mutant(
        *("sparse-shared-keys-forgotten", "inductor_ext/sparse/block_attention.py", "unsummed gradient"),
        *("backward", "some.queries.start * k.shape[1] % q.shape[1] == 0", "True"),
        killers=("tests/inductor_ext/sparse/test_block_sparse_attention.py",),
    ),
    Mutant(
        *("sparse-last-block-whole", "inductor_ext/sparse/layouts.py", "missing mask"),
        *("Layout._finished", "kept[:, self.block - over :] = False", "pass"),
        killers=("tests/inductor_ext/sparse/test_block_sparse_attention.py",),
    ),
    Mutant(
        *("cross-attention-by-its-length", "passes/kernels/sparsify_attention.py", "missing check"),
        *("_why_not", "why_not_self(found.q, found.k, found.v) if reason is None else", ""),
        killers=("tests/passes/kernels/test_attention_sources.py",),
    ),
    Mutant(
        *("sparsify-forgets-the-mask", "passes/kernels/sparsify_attention.py", "missing mask"),
        *("_mask", "if not terms", "if True"),
        killers=("tests/passes/kernels/test_sparsify_attention.py",),
    ),
)

ZERO = (
    Mutant(
        *("merge-over-grad-mode", "passes/zero/merge_gathers.py", "missing check"),
        *("_merge", "), grad_mode", ")"),
        killers=(f"{_ZERO}/test_merge_gathers.py",),
    ),
    Mutant(
        *("compress-what-is-read-whole", "passes/zero/compress_gathers.py", "missing check"),
        *(
            "_lower_dtype",
            "dtypes.pop() if len(dtypes) == 1 else None",
            "next((one for one in dtypes if one is not None), None)",
        ),
        killers=(f"{_ZERO}/test_compress_gathers.py",),
    ),
    Mutant(
        *("small-bucket-slices", "passes/zero/bucket_small_reductions.py", "off by one shard"),
        *("_reduce_together", "parts, number)", "parts, max(0, number - 1))"),
        killers=(f"{_ZERO}/test_bucket_small_reductions.py",),
    ),
    Mutant(
        *("unit-with-another-value", "passes/verify/verifier.py", "missing check"),
        *("check_interface", "set(after.units)", "set[str]()"),
        killers=("tests/partitioning/step/test_wrong_orders.py",),
    ),
    Mutant(
        *("merge-across-writes", "passes/memory/scratch.py", "stale value"),
        *("merge_equal_nodes", "writes, node.target", "0, node.target"),
        killers=("tests/passes/memory/test_scratch.py",),
    ),
    Mutant(
        *("small-bucket-bound", "passes/zero/bucket_small_reductions.py", "missing bound"),
        *("BucketSmallReductions._fill", "> self.", "> 2 * self."),
        killers=(f"{_ZERO}/test_bucket_small_reductions.py",),
    ),
    Mutant(
        *("keep-first-gather", "passes/zero/keep_last_gather.py", "swapped order"),
        *("KeepLastGather.run", "_keep(gathers[-1], ctx)", "_keep(gathers[0], ctx)"),
        killers=(f"{_ZERO}/test_keep_last_gather.py",),
    ),
    Mutant(
        *("keep-a-whole-model", "passes/zero/keep_last_gather.py", "missing bound"),
        *("_of_last_unit", "kept if sizes.pop(last[0]) <= max(sizes.values(), default=0) else kept[-1:]", "kept"),
        killers=(f"{_ZERO}/test_keep_last_gather.py",),
    ),
    Mutant(
        *("keep-for-a-backward-far-away", "passes/zero/keep_last_gather.py", "missing check"),
        *("_of_last_unit", "or last != list(backwards)[:1]", ""),
        killers=(f"{_ZERO}/test_keep_last_gather.py",),
    ),
    Mutant(
        *("await-after-first-use", "passes/zero/await_copies.py", "dropped wait"),
        *("_wait_at_first_use", "(min(", "(max("),
        killers=(f"{_ZERO}/test_await_copies.py", "tests/distributed/test_copies.py"),
    ),
)

OVERLAP = (
    Mutant(
        *("bucket-over-its-bound", "passes/overlap/buckets.py", "missing bound"),
        *("_may_join", "in together), _least_bytes", "in bucket), _least_bytes"),
        killers=(f"{_OVERLAP}/test_bucket_gathers.py", f"{_OVERLAP}/test_bucket_reductions.py"),
    ),
    Mutant(
        *("bucket-grows-without-memory", "passes/overlap/buckets.py", "missing check"),
        *("_least_bytes", "0 if ctx.budget.to_keep == 0 else", ""),
        killers=(f"{_OVERLAP}/test_bucket_gathers.py",),
    ),
    Mutant(
        *("bucket-of-unlike-members", "passes/overlap/buckets.py", "missing check"),
        *("_may_join", "member.alike != bucket[0].alike or", ""),
        killers=(f"{_OVERLAP}/test_bucket_gathers.py", f"{_OVERLAP}/test_bucket_reductions.py"),
    ),
    Mutant(
        *("delay-over-a-barrier", "passes/overlap/delay_reduction_waits.py", "missing check"),
        *("_move_ahead", "barrier_between(nodes[0], place) or place", "place or barrier_between(nodes[0], place)"),
        killers=(f"{_OVERLAP}/test_delay_reduction_waits.py",),
    ),
    Mutant(
        *("delay-without-bound", "passes/overlap/delay_reduction_waits.py", "missing bound"),
        *("DelayReductionWaits._places", "total > most", "total > 2 * most"),
        killers=(f"{_OVERLAP}/test_delay_reduction_waits.py",),
    ),
    Mutant(
        *("prefetch-over-a-barrier", "passes/overlap/prefetch_gathers.py", "missing check"),
        *("_start_after", "or barrier_between(place, nodes[-1]) is not None", ""),
        killers=(f"{_OVERLAP}/test_prefetch_gathers.py",),
    ),
    Mutant(
        *("prefetch-without-bound", "passes/overlap/prefetch_gathers.py", "missing bound"),
        *("_Room.at_or_after", "number + 1", "number"),
        killers=(f"{_OVERLAP}/test_prefetch_gathers.py",),
    ),
)

SHARDING = (
    Mutant(
        *("materialize-own-seed", "dsgraph/partitioning/initialization/materialize.py", "ranks differ"),
        *("_same_random_numbers", "broadcast_from_first(shared, mesh)", "pass"),
        killers=("tests/partitioning/initialization/test_materialize.py",),
    ),
    Mutant(
        *("chunks-of-other-rank", "dsgraph/partitioning/rows.py", "off by one shard"),
        *("_own_rows", "slice(rank * most, (rank + 1) * most)", "slice((rank - 1) * most, rank * most)"),
        killers=("tests/partitioning/test_partition.py", "tests/distributed/test_stages.py"),
    ),
    Mutant(
        *("inputs-stay-wide", "dsgraph/partitioning/forward_inputs.py", "missing cast"),
        *("_cast", "cast((args, kwargs), dtype)", "args, kwargs"),
        killers=("tests/partitioning/test_forward_inputs.py::test_inputs_are_cast_as_by_fsdp2",),
    ),
    Mutant(
        *("frozen-sums-are-lost", "dsgraph/partitioning/accumulation/accumulated_gradients.py", "unsummed gradient"),
        *("reduce_accumulated", "or entry.was_trained", ""),
        killers=("tests/distributed/test_accumulate.py::test_requires_grad_is_switched_between_micro_batches",),
    ),
    Mutant(
        *("closed-file-stays", "dsgraph/offload/slots.py", "missing step"),
        *("_let_go", "folder.remove()", ""),
        killers=("tests/engine/optimizers/test_offloading.py::test_engines_leave_no_files_and_threads",),
    ),
    Mutant(
        *("hints-over-digits", "dsgraph/utils/nearest.py", "missing check"),
        *("near", "if _digits(name) == _digits(found)", ""),
        killers=("tests/utils/test_nearest.py::test_a_hint_is_right_or_absent",),
    ),
    Mutant(
        *("own-errors-are-wrapped", "dsgraph/compiler/backend.py", "missing check"),
        *("_is_own", 'type(error).__module__.split(".")[0] == "dsgraph"', "False"),
        killers=("tests/compiler/test_options.py::test_wrong_options_stop_torch_compile",),
    ),
    Mutant(
        *("half-a-partition-stays", "dsgraph/partitioning/restore.py", "missing step"),
        *("_SavedModule.restore", "module._parameters.update(self._parameters)", "pass"),
        killers=("tests/partitioning/test_partition.py::test_a_failure_at_the_last_module_leaves_the_model_as_it_was",),
    ),
    Mutant(
        *("partition-own-values", "dsgraph/partitioning/partition.py", "ranks differ"),
        *("_shard", "broadcast_from_first(full, mesh if spec.held is not None else part.parameter_mesh)", ""),
        killers=("tests/distributed/test_stages.py",),
    ),
    Mutant(
        *("agreement-with-itself", "dsgraph/ranks/agreement.py", "missing check"),
        *("Agreement._judge", "[known[0]", "[rank"),
        killers=("tests/distributed/test_agreement.py",),
    ),
    Mutant(
        *("eager-ranks-part-unseen", "dsgraph/ranks/eager_agreement.py", "missing check"),
        *("EagerAgreement._compare.come", "notes.own.differs_at(note)", "note.intent != note.intent"),
        killers=("tests/distributed/test_eager_agreement.py",),
    ),
    Mutant(
        *("shards-gathered-unseen", "dsgraph/partitioning/state.py", "missing check"),
        *("PartitionState.distributed", "self.reads.watched(placements)", "placements"),
        killers=("tests/distributed/test_eager_agreement.py::test_what_torch_does_on_shards_on_one_rank_is_told",),
    ),
    Mutant(
        *("checkpoints-of-one-rank", "dsgraph/ranks/eager_agreement.py", "missing check"),
        *("compare_checkpoint", "agreement.models and", "not agreement.models and"),
        killers=("tests/distributed/test_eager_agreement.py::test_what_torch_does_on_shards_on_one_rank_is_told",),
    ),
    Mutant(
        *("chosen-rows-compared", "passes/core/collective_order.py", "wrong branch"),
        *("shape_on_all_ranks", "found.rows_vary", "not found.rows_vary"),
        killers=("tests/passes/core/test_collective_order.py",),
    ),
    Mutant(
        *("runs-compared-without-names", "dsgraph/ranks/rank_notes.py", "missing check"),
        *("Intent.of_graph", "_digest(parameters)", '""'),
        killers=("tests/distributed/test_compiled_runs.py",),
    ),
    Mutant(
        *("optimizer-steps-alone", "dsgraph/partitioning/guards.py", "missing check"),
        *("guard.before_step", 'living.operations.agree(f"steps {type(optimizer).__name__}")', "pass"),
        killers=("tests/distributed/test_compiled_runs.py",),
    ),
    Mutant(
        *("norms-uncompared", "dsgraph/partitioning/rules.py", "missing check"),
        *("_norms", "if agreement.", "if not agreement."),
        killers=("tests/distributed/test_compiled_runs.py::test_a_rank_that_clips_gradients_while_another_goes_on",),
    ),
    Mutant(
        *("forward-after-a-step-runs-ahead", "dsgraph/ranks/eager_agreement.py", "missing check"),
        *("EagerAgreement.confirm", "_BETWEEN if between", "_FORWARD if between"),
        killers=("tests/distributed/test_compiled_runs.py::test_a_rank_that_evaluates_after_a_step",),
    ),
    Mutant(
        *("placeholder-takes-writes", "dsgraph/partitioning/accumulation/gradient_placeholder.py", "missing check"),
        *("_Unreduced.__torch_dispatch__", "schema_of(func).is_mutable and str(func) not in _ZEROING", "False"),
        killers=("tests/distributed/test_hooks.py",),
    ),
    Mutant(
        *("heads-of-one-rank-alone", "dsgraph/partitioning/accumulation/accumulated_gradients.py", "missing step"),
        *("reduce_accumulated", "if is_used", "if own is not None"),
        killers=("tests/distributed/test_compiled_runs.py::test_ranks_train_different_heads_at_stages_0_and_1",),
    ),
    Mutant(
        *("backward-runs-uncompared", "dsgraph/compiler/runs.py", "missing check"),
        *("compare_runs.before_backward", "if agreement.", "if not agreement."),
        killers=("tests/distributed/test_compiled_runs.py",),
    ),
    Mutant(
        *("reduce-dtype-of-the-master", "passes/ir/parameters.py", "missing cast"),
        *("ParameterSpec.dtypes", "self.reduce_dtype or", ""),
        killers=("tests/passes/ir/test_parameters.py",),
    ),
    Mutant(
        *("gradient-sent-nowhere", f"{_STEP}/step_run.py", "unsummed gradient"),
        *("StepRun._reduce", "if rest:", "if False:"),
        killers=("tests/distributed/test_stages.py", "tests/distributed/test_modules.py"),
    ),
)

COLLECTIVES = (
    Mutant(
        *("average-over-a-part", "inductor_ext/collectives/algorithms.py", "wrong scale"),
        *("averaged", "*outer)", "*outer[1:])"),
        killers=("tests/distributed/test_stages.py",),
    ),
    Mutant(
        *("gradient-of-one-rank", "inductor_ext/collectives/algorithms.py", "unsummed gradient"),
        *("_add_up", ".sum(0, dtype=received.dtype)", "[0]"),
        killers=("tests/distributed/test_stages.py",),
    ),
    Mutant(
        *("reduction-uncast", "inductor_ext/collectives/algorithms.py", "missing cast"),
        *("start_reducing", ".to(reduce_dtype)", ""),
        killers=("tests/distributed/test_mixed_precision.py", "tests/passes/zero/test_insert_zero_collectives.py"),
    ),
    Mutant(
        *("chunks-of-one-row-more", "inductor_ext/collectives/algorithms.py", "off by one shard"),
        *("chunk_rows", "-(-rows // world)", "rows // world + 1"),
        killers=("tests/distributed/test_stages.py", "tests/passes/zero/test_insert_zero_collectives.py"),
    ),
    Mutant(
        *("padding-stays", "inductor_ext/collectives/algorithms.py", "off by one shard"),
        *("take_rows", "[:rows", "[-rows:"),
        killers=("tests/distributed/test_stages.py", "tests/passes/zero/test_insert_zero_collectives.py"),
    ),
    Mutant(
        *("all-reduce-at-half-price", "passes/ir/collectives.py", "wrong scale"),
        *("TABLE", "2 * (n - 1),\n        steps", "n - 1,\n        steps"),
        killers=("tests/passes/analysis/test_cost.py", "tests/passes/ir"),
    ),
    Mutant(
        *("messages-read-early", "inductor_ext/collectives/messages.py", "dropped wait"),
        *("start_messages", "register_work(tensor.result, work)", ""),
        killers=("tests/inductor_ext/collectives",),
    ),
)

STEP = (
    Mutant(
        *("write-without-a-trace-unseen", "dsgraph/partitioning/gathered_copies.py", "stale gathered copy"),
        *("GatheredCopies._written_without_trace", "not were_written(fresh)", "fresh"),
        killers=("tests/distributed/test_copies.py",),
    ),
    Mutant(
        *("suspect-copy-is-trusted", "dsgraph/partitioning/gathered_copies.py", "stale gathered copy"),
        *("GatheredCopies._needs_gather", " or (freshness is Freshness.SUSPECT and is_read)", ""),
        killers=("tests/distributed/test_modules.py",),
    ),
    Mutant(
        *("stale-after-a-write", "dsgraph/partitioning/parameter.py", "stale gathered copy"),
        *("ParameterState.observe", "self.version != self.noted_version", "self.noted_version is None"),
        killers=("tests/distributed/test_copies.py",),
    ),
    Mutant(
        *("eager-read-without-wait", "dsgraph/partitioning/gathered_copies.py", "dropped wait"),
        *("GatheredCopies.arrived", "if self.", "if not self."),
        killers=("tests/distributed/test_copies.py",),
    ),
    Mutant(
        *("last-micro-batch-alone", "dsgraph/partitioning/accumulation/accumulated_gradients.py", "unsummed gradient"),
        *("add_local_gradient", ".add_(", ".copy_("),
        killers=("tests/distributed/test_accumulate.py",),
    ),
    Mutant(
        *(
            "inner-backward-ends-the-step",
            "dsgraph/partitioning/accumulation/accumulated_gradients.py",
            "missing check",
        ),
        *("_reduce_at_end_of_backward", "if outer is None", "if True"),
        killers=("tests/distributed/test_several_backwards.py",),
    ),
    Mutant(
        *("leaf-dies-with-the-step", "dsgraph/partitioning/accumulation/accumulated_gradients.py", "unsummed gradient"),
        *("_take_sum", "return total", "entry.leaf is None or entry.leaf.requires_grad_(False)\n    return total"),
        killers=("tests/distributed/test_several_backwards.py",),
    ),
    Mutant(
        *("asked-gradient-is-summed", "dsgraph/partitioning/accumulation/read_leaves.py", "missing check"),
        *("_Leaves.backward", "elif is_asked_for(nodes[count + number])", "elif False"),
        killers=("tests/distributed/test_several_backwards.py",),
    ),
    Mutant(
        *("hooks-left-on-meta", "dsgraph/partitioning/initialization/materialize.py", "missing step"),
        *("_keep_rows", "keep_hooks(meta)", ""),
        killers=("tests/partitioning/initialization/test_materialize.py",),
    ),
    Mutant(
        *("ignored-norm-of-one-rank", "dsgraph/partitioning/rules.py", "unsummed norm"),
        *("_norms", 'if hasattr(value, "dsgraph_own") else value', "if False else value"),
        killers=("tests/distributed/test_ignored_params.py",),
    ),
    Mutant(
        *("own-values-untold", "dsgraph/partitioning/replicated.py", "missing check"),
        *("warn_of_own_values", "not seeds_differ", "False"),
        killers=("tests/distributed/test_ignored_params.py",),
    ),
    Mutant(
        *("gradient-of-a-new-tensor", "dsgraph/partitioning/eager/full_tensor.py", "missing check"),
        *("_run", "and None in result", "and False"),
        killers=("tests/partitioning/test_partition.py",),
    ),
    Mutant(
        *("norm-of-one-stage", "dsgraph/parallel/pipeline/tied_gradients.py", "missing check"),
        *("StageGradient.__torch_function__", '"norm" in func.__name__', "False"),
        killers=(
            "tests/distributed/test_parallelize.py::test_torchs_norms_are_refused_where_they_would_be_those_of_one_rank",
        ),
    ),
    Mutant(
        *("hooks-of-late-gradients", "dsgraph/partitioning/accumulation/reduce_accumulated.py", "missing step"),
        *(
            "deliver",
            "_Deliver.apply(reduced, *params).backward()",
            "out = _Deliver.apply(reduced, *params)\n"
            "        for param, grad in zip(params, torch.autograd.grad(out, params), strict=True):\n"
            "            param.grad = grad if param.grad is None else param.grad + grad",
        ),
        killers=("tests/distributed/test_hooks.py",),
    ),
    Mutant(
        *("sums-outlive-zero-grad", "dsgraph/partitioning/accumulation/watched_graphs.py", "missing check"),
        *("_watch_node.before_backward", "drop_if_zeroed(entry)", ""),
        killers=("tests/distributed/test_hooks.py",),
    ),
    Mutant(
        *("zeros-are-not-seen", "dsgraph/partitioning/accumulation/gradient_placeholder.py", "missing check"),
        *("GradientPlaceholder.look", "GradState.ZEROS", "GradState.UNTOUCHED"),
        killers=("tests/distributed/test_hooks.py",),
    ),
    Mutant(
        *("scalar-state-stays-plain", "dsgraph/partitioning/guards.py", "missing step"),
        *("guard.before_step", "_complete_scalar_states(optimizer, living)", ""),
        killers=("tests/distributed/test_saving.py",),
    ),
    Mutant(
        *("half-a-model-is-pickled", "dsgraph/partitioning/state_dict/saved_rows.py", "missing check"),
        *("rows_of_rank", "== (rank, world)", "is not None"),
        killers=("tests/distributed/test_saving.py",),
    ),
    Mutant(
        *("branch-gathers-inside", "dsgraph/compat/dynamo.py", "missing step"),
        *("leave_control_flow", "if outer is not None:\n        output.tracers.append(outer)", "outer = None"),
        killers=("tests/distributed/test_control_flow.py",),
    ),
    Mutant(
        *("checkpoint-sees-waits", "dsgraph/partitioning/seam.py", "missing step"),
        *("_read_unseen", "outside_selective_checkpoints()", "torch.enable_grad()"),
        killers=("tests/distributed/test_control_flow.py",),
    ),
    Mutant(
        *("ranks-end-apart", "dsgraph/partitioning/state_dict/pretrained.py", "missing step"),
        *("_generating.generate_on_all_ranks", "] = True", "] = False"),
        killers=("tests/distributed/test_generate.py",),
    ),
    Mutant(
        *("sum-in-low-precision", "dsgraph/partitioning/accumulation/accumulated_gradients.py", "missing cast"),
        *("add_local_gradient", ".to(entry.param.dtype)", ""),
        killers=("tests/distributed/test_accumulate.py", "tests/distributed/test_mixed_precision.py"),
    ),
    Mutant(
        *("sum-added-by-two-graphs", "dsgraph/partitioning/accumulation/watched_graphs.py", "summed twice"),
        *("_watch_node.after_backward", "empty_sum(total)\n                entry.is_summed = False", "pass"),
        killers=("tests/distributed/test_last_micro_batch.py",),
    ),
    Mutant(
        *("sum-lost-to-another-gradient", "dsgraph/partitioning/accumulation/watched_graphs.py", "missing check"),
        *("_watch_node.before_backward", "is_summed and not", "is_summed and False and not"),
        killers=("tests/distributed/test_last_micro_batch.py",),
    ),
    Mutant(
        *("idle-rank-leaves", "dsgraph/partitioning/accumulation/accumulated_gradients.py", "missing check"),
        *("_before_update", "if stepped and state.phase is StepPhase.LAST:\n        reduce_accumulated(state)", "pass"),
        killers=("tests/distributed/test_idle_rank.py",),
    ),
    Mutant(
        *("gathers-old-rows", "dsgraph/partitioning/gathered_copies.py", "stale gathered copy"),
        *("start_gathers", "copy_(entry.rows", "add_(0"),
        killers=("tests/distributed/test_modules.py",),
    ),
)

OFFLOAD = (
    Mutant(
        *("masters-of-each-step", "dsgraph/optim/host_optimizer.py", "missing step"),
        *("HostOptimizer._keeps_master", "param.dtype in _LOW", "False"),
        killers=("tests/optim/test_host_optimizer.py",),
    ),
    Mutant(
        *("master-over-what-was-written", "dsgraph/optim/host_optimizer.py", "missing check"),
        *("HostOptimizer._leaf", "known.versions != versions_of(param)", "False"),
        killers=("tests/optim/test_host_optimizer.py",),
    ),
    Mutant(
        *("late-update-is-lost", "dsgraph/optim/delayed.py", "missing step"),
        *("DelayedHostOptimizer._apply", "own_part(param).detach().copy_(known.value)", ""),
        killers=("tests/optim/test_host_optimizer.py",),
    ),
    Mutant(
        *("plain-optimizer-steps-on-offloaded", "dsgraph/partitioning/guards.py", "missing check"),
        *("_problem", 'tier and getattr(optimizer, "tier", None) != tier', "False"),
        killers=("tests/distributed/test_offload_optimizer.py",),
    ),
    Mutant(
        *("host-without-masters", "dsgraph/offload/offload_sizes.py", "missing term"),
        *("Sizes.below", "+ masters +", "+"),
        killers=("tests/optim/test_plan_offload.py",),
    ),
    Mutant(
        *("disk-after-the-network", "dsgraph/tools/cli/inspect/timeline.py", "swapped order"),
        *("_link", "node.transfer.tier if node.transfer is not None", '"" if node.transfer'),
        killers=("tests/tools/cli/test_transfers.py",),
    ),
    Mutant(
        *("plan-without-buffers", "dsgraph/offload/offload_sizes.py", "missing term"),
        *("Sizes.memory", "+ self.buffers(split)", ""),
        killers=("tests/optim/test_plan_offload.py",),
    ),
    Mutant(
        *("one-chunk-in-a-step", "dsgraph/offload/chunk_sizes.py", "off by one"),
        *("_most", "+ 2]", "+ 1]"),
        killers=("tests/offload/test_predicted_memory.py",),
    ),
    Mutant(
        *("prediction-by-bytes", "dsgraph/compiler/capture.py", "missing step"),
        *("state_tier", "state_share(state)", "state.arguments.offload.optimizer_ratio"),
        killers=("tests/offload/test_predicted_memory.py",),
    ),
    Mutant(
        *("read-ahead-as-ever", "dsgraph/compiler/build_pipeline.py", "missing check"),
        *("_streaming", 'if options.read_ahead_bytes is None else {"ahead_bytes": options.read_ahead_bytes}', ""),
        killers=("tests/compiler/test_build_pipeline.py",),
    ),
    Mutant(
        *("state-on-disk-counts-in-memory", "passes/analysis/states.py", "missing term"),
        *("state_bytes", "- state_bytes_below(info, tensors)", ""),
        killers=("tests/passes/analysis/test_budget.py",),
    ),
    Mutant(
        *("reads-ahead-take-no-memory", "passes/analysis/transfer_buffers.py", "missing term"),
        *("_uses", "+= _bytes(moved_tensor(node))", "+= 0"),
        killers=("tests/passes/analysis/test_transfer_buffers.py",),
    ),
    Mutant(
        *("share-and-one-more", "dsgraph/offload/slots.py", "off by one"),
        *("first_of", "start < ratio", "start <= ratio"),
        killers=("tests/distributed/test_parameters_on_disk.py",),
    ),
    Mutant(
        *("state-of-first-step-alone", "dsgraph/optim/stored_state.py", "missing step"),
        *("StoredState._put", "view.copy_(value)", "pass"),
        killers=("tests/optim/test_disk_optimizer.py",),
    ),
    Mutant(
        *("chunks-in-one-place", "dsgraph/offload/slots.py", "off by one"),
        *("SlotFile._write", "_offsets[slot", "_offsets[0"),
        killers=("tests/optim/test_disk_optimizer.py",),
    ),
    Mutant(
        *("stored-gradient-of-the-last-micro-batch", "dsgraph/offload/stored_rows.py", "missing step"),
        *("StoredRows.add_gradient", "view.add_(view_in(earlier, grad))", "pass"),
        killers=("tests/distributed/test_parameters_on_disk.py",),
    ),
    Mutant(
        *("update-of-stored-rows-is-lost", "dsgraph/offload/read_rows.py", "missing step"),
        *("ReadRows.write", "write_buffer(self._rows.result()", "write_rows(self._stored.rows"),
        killers=("tests/distributed/test_parameters_on_disk.py",),
    ),
    Mutant(
        *("update-ahead-of-the-second-gradient", "dsgraph/offload/stored_rows.py", "missing check"),
        *("StoredRows.add_gradient", "and self._reads == 1", ""),
        killers=("tests/optim/test_beside_backward.py",),
    ),
    Mutant(
        *("changed-gradient-goes-unseen", "dsgraph/offload/stored_rows.py", "missing check"),
        *("StoredRows.holds_gradient_as_stored", "and version_of(grad) == self._given", ""),
        killers=("tests/optim/test_beside_backward.py",),
    ),
    Mutant(
        *("checksum-of-nothing", "dsgraph/offload/slots.py", "missing check"),
        *("SlotFile._read", "crc32(buffer.view())", "self._sums[slot]"),
        killers=("tests/optim/test_disk_optimizer.py",),
    ),
    Mutant(
        *("state-set-over-that-of-others", "dsgraph/optim/stored_state.py", "missing step"),
        *("StoredState.__setitem__", "read(number).result(", "take(number"),
        killers=("tests/optim/test_disk_optimizer.py",),
    ),
    Mutant(
        *("saved-pages-are-kept", "dsgraph/checkpoint/disk_planners.py", "missing step"),
        *("SavePlannerFromDisk.resolve_data", "last.madvise(mmap.MADV_DONTNEED)", "pass"),
        killers=("tests/engine/optimizers/test_offloading.py",),
    ),
    Mutant(
        *("loaded-over-its-neighbours", "dsgraph/offload/slots.py", "missing step"),
        *("SlotFile.write_part", "begin or buffer.size != data.nbytes", "False"),
        killers=("tests/checkpoint/test_disk_planners.py",),
    ),
    Mutant(
        *("half-a-checkpoint-is-trained-with", "dsgraph/checkpoint/disk_planners.py", "missing check"),
        *("loading_to_disk", "rows.held_for = _HALF", "pass"),
        killers=("tests/engine/optimizers/test_offloading.py",),
    ),
    Mutant(
        *("update-at-the-first-gradient", "dsgraph/optim/beside_backward.py", "missing check"),
        *("BesideBackward._arrived", "number]:", "number] < 0:"),
        killers=("tests/optim/test_beside_backward.py",),
    ),
    Mutant(
        *("step-beside-every-micro-batch", "dsgraph/engine/optimizers/step_moment.py", "missing check"),
        *("stepping", "not is_last or", ""),
        killers=("tests/engine/optimizers/test_offloading.py",),
    ),
    Mutant(
        *("gradient-stored-ahead-of-the-read", "passes/memory/stream_parameters.py", "missing step"),
        *("StreamBackwardParameters.run", "read.append(store)", "pass"),
        killers=("tests/passes/memory/test_stream_parameters.py",),
    ),
    Mutant(
        *("every-parameter-read-at-the-start", "passes/memory/stream_parameters.py", "wrong bound"),
        *("_first_together", "0 and sum", "0 and 0 * sum"),
        killers=("tests/passes/memory/test_stream_parameters.py",),
    ),
)

BLOCKS = (
    Mutant(
        *("block-with-a-cache-is-apart", "dsgraph/partitioning/blocks/repeated_blocks.py", "missing check"),
        *("is_plain", "all(is_plain(item) for item in value)", "True"),
        killers=("tests/distributed/test_blocks.py",),
    ),
    Mutant(
        *("recomputed-flops", "dsgraph/compiler/module_flops.py", "missing check"),
        *("_Counting._add", "not torch.is_grad_enabled()", "True"),
        killers=("tests/compiler/test_module_flops.py",),
    ),
    Mutant(
        *("plan-of-other-layers", "dsgraph/partitioning/step/step_plan.py", "missing check"),
        *("StepPlans.choose", "if plan.record.kind == self.kind", ""),
        killers=("tests/engine/techniques/test_layer_drop.py",),
    ),
    Mutant(
        *("chosen-codegen-ignored", "dsgraph/compiler/around_blocks.py", "missing check"),
        *("options_of_graph", '"codegen" in options.model_fields_set or ', ""),
        killers=("tests/compiler/test_around_blocks.py",),
    ),
    Mutant(
        *("blocks-of-other-shapes-share", "dsgraph/partitioning/blocks/unit.py", "missing check"),
        *("_blocks_around", " if structure_of(inner) == own", ""),
        killers=("tests/partitioning/blocks/test_unit.py",),
    ),
    Mutant(
        *("step-without-the-block-ahead", "passes/analysis/block_memory.py", "missing term"),
        *("PlanMemory.forward", "self._ahead and at >= 0", "False"),
        killers=("tests/passes/analysis/test_block_memory.py",),
    ),
    Mutant(
        *("copied-nodes-share-memory", "passes/ir/recording.py", "missing check"),
        *("_like", "or compat.storage_id(value) in map(compat.storage_id, inputs)", ""),
        killers=("tests/passes/ir/test_recording.py",),
    ),
    Mutant(
        *("recordings-ignore-options", "passes/ir/recording.py", "missing check"),
        *("Recordings.write", "value.device, options)", "value.device)"),
        killers=("tests/passes/ir/test_recording.py",),
    ),
    Mutant(
        *("tags-are-no-version", "passes/analysis/analyses.py", "missing check"),
        *("_version", "*node.meta.values()", 'node.meta.get("val")'),
        killers=("tests/passes/analysis/test_analyses.py", "tests/passes/runner/test_runner.py"),
    ),
    Mutant(
        *("copies-of-blocks-are-data", "passes/analysis/step_memory.py", "missing check"),
        *("_Step._hand_over", ", pair.block_inputs", ""),
        killers=("tests/tools/reporting/test_units.py",),
    ),
    Mutant(
        *("block-runs-the-newest-graph", "dsgraph/tools/dumping/units.py", "missing check"),
        *("_compiles_for", "if block in equal", "if False"),
        killers=("tests/tools/dumping/test_units.py",),
    ),
    Mutant(
        *("light-blocks-run-as-they-are", "dsgraph/compiler/frames.py", "missing check"),
        *("_are_around_blocks", "if any(map(is_block, modules)):", "if False:"),
        killers=("tests/compiler/test_around_blocks.py",),
    ),
    Mutant(
        *("one-graph-runs-as-it-is", "dsgraph/compiler/frames.py", "missing check"),
        *("_are_around_blocks", "not any(classes & _classes_of(node) for node in gm.graph.nodes)", "True"),
        killers=("tests/compiler/test_around_blocks.py",),
    ),
    Mutant(
        *("light-graphs-that-gather", "dsgraph/compiler/around_blocks.py", "ranks differ"),
        *("options_of_graph", "and split_dims(value)", "and False"),
        killers=("tests/compiler/test_around_blocks.py",),
    ),
    Mutant(
        *("heavy-graphs-run-as-they-are", "dsgraph/compiler/around_blocks.py", "missing check"),
        *("options_of_graph", "if _is_light(gm, inputs) else options", ""),
        killers=("tests/compiler/test_around_blocks.py",),
    ),
    Mutant(
        *("threads-start-as-python-ends", "dsgraph/checkpoint/checkpoint_files.py", "missing check"),
        *("_checksums", "threading.current_thread() is not threading.main_thread()", "False"),
        killers=("tests/checkpoint/test_checkpoint_files.py",),
    ),
    Mutant(
        *("units-run-ahead-of-reductions", "passes/zero/keep_last_gather.py", "wrong order"),
        *("_hoist", " or is_unit(node)", ""),
        killers=("tests/partitioning/step/test_step_memory.py",),
    ),
    Mutant(
        *("gradients-of-a-unit-in-two-forms", "passes/zero/choose_collective_algorithms.py", "missing check"),
        *("_forms", "unit is not None and count > 1", "False"),
        killers=("tests/passes/zero/test_choose_collective_algorithms.py",),
    ),
    Mutant(
        *("limits-of-blocks-are-not-planned", "dsgraph/compiler/codegen.py", "missing check"),
        *("Compilation._compile_inductor", " and not self._facts.keeps_limit", ""),
        killers=("tests/distributed/test_block_limits.py::test_a_limit_is_planned_with_inductor",),
    ),
    Mutant(
        *("blocks-share-one-limit", "dsgraph/partitioning/blocks/block_frames.py", "wrong bound"),
        *("_allowing_more_recompiles", "recompile_limit() + number", "recompile_limit()"),
        killers=("tests/distributed/test_blocks.py",),
    ),
)

STEP_GRAPH = (
    Mutant(
        *("hooked-gradient-is-handed-over", f"{_STEP}/reductions.py", "missing check"),
        *("only_adds", "has_hooks(node.variable) if", "False if"),
        killers=(f"{_STEP_TESTS}/test_reductions.py",),
    ),
    Mutant(
        *("wanted-gradient-is-handed-over", f"{_STEP}/reductions.py", "missing check"),
        *("only_adds", " and accumulates(node)", ""),
        killers=(f"{_STEP_TESTS}/test_reductions.py",),
    ),
    Mutant(
        *("gradient-of-a-unit-replaces-the-sum", f"{_STEP}/reductions.py", "missing term"),
        *("add_gradient", "param.grad is None", "True"),
        killers=(f"{_STEP_TESTS}/test_reductions.py",),
    ),
    Mutant(
        *("frozen-parameter-gets-a-gradient", f"{_STEP}/reductions.py", "missing check"),
        *("add_gradient", "if not param.requires_grad", "if False"),
        killers=(f"{_STEP_TESTS}/test_reductions.py",),
    ),
    Mutant(
        *("replicated-gradients-are-summed", f"{_STEP}/reductions.py", "wrong scale"),
        *("_start_replicated", " / math.prod(each.size for each in ranks)", ""),
        killers=(f"{_STEP_TESTS}/test_reductions.py",),
    ),
    Mutant(
        *("gradients-of-one-rank-share-memory", f"{_STEP}/reductions.py", "missing check"),
        *("_own", "finish().clone()", "finish()"),
        killers=(f"{_STEP_TESTS}/test_reductions.py",),
    ),
    Mutant(
        *("stand-in-leaves-unseen", "dsgraph/partitioning/seam.py", "missing check"),
        *("_stand_in", ".view_as(stand_in)", ""),
        killers=(f"{_STEP_TESTS}/test_step_run.py",),
    ),
    Mutant(
        *("full-parameter-is-saved", f"{_STEP}/full_parameters.py", "leak"),
        *("SavedParameters.pack", "self.shared.get(tensor.untyped_storage().data_ptr())", "None"),
        killers=(f"{_STEP_TESTS}/test_step_memory.py",),
    ),
    Mutant(
        *("update-before-the-backward-unseen", f"{_STEP}/full_parameters.py", "missing check"),
        *("SavedParameters.unpack", "saved.version != saved.entry.version", "False"),
        killers=(f"{_STEP_TESTS}/test_step_run.py",),
    ),
    Mutant(
        *("fused-update-before-the-backward-unseen", "dsgraph/partitioning/parameter.py", "missing check"),
        *("ParameterState.version", ", self.updates", ""),
        killers=(f"{_STEP_TESTS}/test_step_run.py",),
    ),
    Mutant(
        *("plan-chosen-without-what-followed", f"{_STEP}/step_plan.py", "missing check"),
        *("StepPlans.choose", " if plan.number == expected", ""),
        killers=(f"{_STEP_TESTS}/test_step_plan.py",),
    ),
    Mutant(
        *("plan-chosen-without-what-is-held", f"{_STEP}/step_plan.py", "missing check"),
        *("StepPlans.choose", "and plan.record.held == set(held)", ""),
        killers=(f"{_STEP_TESTS}/test_step_plan.py",),
    ),
    Mutant(
        *("plans-without-bound", f"{_STEP}/step_plan.py", "missing bound"),
        *("StepPlans.plan_of", "*self.known[1 - MOST_PLANS :]", "*self.known"),
        killers=(f"{_STEP_TESTS}/test_step_plan.py",),
    ),
    Mutant(
        *("plan-is-followed-blindly", f"{_STEP}/step_plan.py", "missing check"),
        *("Forward.expects", "self.plan.record.calls[self.number].key == key", "True"),
        killers=(f"{_STEP_TESTS}/test_step_run.py",),
    ),
    Mutant(
        *("forward-is-not-run-out", f"{_STEP}/step_run.py", "missing step"),
        *("StepRun._leave_forward", "run.run_out({})", "pass"),
        killers=(f"{_STEP_TESTS}/test_step_memory.py",),
    ),
    Mutant(
        *("backward-is-not-run-out", f"{_STEP}/step_run.py", "missing step"),
        *("StepRun._leave_backward", "run.run_out(given or {})", "pass"),
        killers=(f"{_STEP_TESTS}/test_step_memory.py",),
    ),
    Mutant(
        *("zeros-are-delivered", f"{_STEP}/step_run.py", "missing check"),
        *("StepRun._deliver", "entry in self._given", "True"),
        killers=(f"{_STEP_TESTS}/test_step_memory.py",),
    ),
    Mutant(
        *("gradients-of-a-failed-backward-come-late", f"{_STEP}/step_run.py", "missing step"),
        *("StepRun._finish_backward", "self._given.clear()", "pass"),
        killers=(f"{_STEP_TESTS}/test_step_memory.py",),
    ),
    Mutant(
        *("held-copy-outlives-an-update", f"{_STEP}/step_run.py", "stale gathered copy"),
        *("StepRun._enter", "version != entry.version", "False"),
        killers=(f"{_STEP_TESTS}/test_step_memory.py",),
    ),
    Mutant(
        *("uncompiled-steps-hold-many-gradients", "dsgraph/compiler/build_pipeline.py", "higher peak memory"),
        *("uncompiled_pipeline", "8 * 2**20", "64 * 2**20"),
        killers=(f"{_STEP_TESTS}/test_step_plan.py",),
    ),
    Mutant(
        *("units-of-inductor-are-not-measured", "dsgraph/compiler/codegen.py", "missing report"),
        *("Compilation._compile_inductor", "if taken and self._runner", "if self._runner"),
        killers=("tests/tools/reporting/test_units.py",),
    ),
    Mutant(
        *("sending-takes-no-core", "passes/analysis/predicted_times.py", "missing term"),
        *("predict", "costs.delay_seconds(node)", "0.0"),
        killers=("tests/passes/overlap/test_bucket_gathers.py",),
    ),
    Mutant(
        *("sending-takes-no-core-in-timelines", "dsgraph/tools/cli/inspect/timeline.py", "missing term"),
        *("simulate", "node.collective.delay if node.collective else 0.0", "0.0"),
        killers=("tests/tools/cli/test_reading.py::test_a_collective_delays_what_computes_beside_it",),
    ),
    Mutant(
        *("uncompiled-code-takes-no-time", f"{_STEP}/step_record.py", "missing term"),
        *("StepRecord.begin", "unit is UNCOMPILED", "False"),
        killers=(f"{_STEP_TESTS}/test_step_graph.py",),
    ),
    Mutant(
        *("hooked-parameter-is-planned", "dsgraph/compiler/step_plans.py", "ranks differ"),
        *("_without_differences", "if entry.name in watched", "if False"),
        killers=("tests/distributed/test_blocks.py::test_a_hook_on_one_rank_changes_no_order",),
    ),
    Mutant(
        *("signature-without-the-backward", f"{_STEP}/step_record.py", "missing check"),
        *("StepRecord.signature", "tuple(self.backward)", "()"),
        killers=(f"{_STEP_TESTS}/test_step_record.py",),
    ),
    Mutant(
        *("values-made-by-nobody", f"{_STEP}/step_record.py", "missing term"),
        *("StepRecord.end", "(number, index)", "(-1, index)"),
        killers=(f"{_STEP_TESTS}/test_step_record.py",),
    ),
    Mutant(
        *("shared-parameter-loses-a-gradient", f"{_STEP}/step_graph.py", "unsummed gradient"),
        *("_Builder._backward", "grads += [", "grads = ["),
        killers=(f"{_STEP_TESTS}/test_step_graph.py",),
    ),
    Mutant(
        *("held-copy-is-gathered-again", f"{_STEP}/step_graph.py", "missing term"),
        *("_Builder._marker", "self._copies.get(entry)", "None"),
        killers=(f"{_STEP_TESTS}/test_step_graph.py",),
    ),
    Mutant(
        *("unit-waits-for-the-next-gather", f"{_STEP}/step_program.py", "dropped stop"),
        *("lower", "if _awaits_gather(node)", "if False"),
        killers=(f"{_STEP_TESTS}/test_step_program.py",),
    ),
    Mutant(
        *("reduced-gradients-stay", f"{_STEP}/step_program.py", "leak"),
        *("take", "gradients[number - 1] = None", "pass"),
        killers=(f"{_STEP_TESTS}/test_step_program.py",),
    ),
    Mutant(
        *("gradients-are-given-to-every-unit", f"{_STEP}/step_program.py", "summed twice"),
        *("Run.run_out", "gradients = {}", "pass"),
        killers=(f"{_STEP_TESTS}/test_step_program.py",),
    ),
    Mutant(
        *("plan-gathers-in-inference-mode", f"{_STEP}/step_program.py", "missing check"),
        *("Run._go_on", "torch.inference_mode(False), ", ""),
        killers=(f"{_STEP_TESTS}/test_step_program.py",),
    ),
)

COMPILER = (
    Mutant(
        *("region-counted-once-more", "passes/ir/inline_regions.py", "missing step"),
        *("inline_regions", "names += _drop_uncalled(module)", ""),
        killers=("tests/passes/ir/test_inline_regions.py",),
    ),
    Mutant(
        *("recorded-sizes-are-not-nodes", "passes/ir/recording.py", "missing step"),
        *("Recording._argument", "self._sizes.node(value) if isinstance(value, torch.SymInt) else value", "value"),
        killers=("tests/passes/parallel/test_lower_slices.py",),
    ),
    Mutant(
        *("sliced-loss-in-16-bits", "inductor_ext/collectives/vocabulary.py", "missing step"),
        *("sliced_cross_entropy", "own = own.to(wide)", ""),
        killers=("tests/distributed/test_tensor_parallel.py",),
    ),
    Mutant(
        *("branch-lowered-as-a-graph", "passes/runner/partitioner.py", "missing check"),
        *("InferenceLowering.__call__", "is_branch or", ""),
        killers=("tests/distributed/test_control_flow.py",),
    ),
    Mutant(
        *("sum-added-where-the-shard-is-read", "dsgraph/compiler/captured_sums.py", "missing check"),
        *("_readers", "):\n            return []", "):\n            continue"),
        killers=("tests/distributed/test_last_micro_batch.py",),
    ),
    Mutant(
        *("gpu-by-a-part-of-its-name", "passes/analysis/hardware.py", "missing check"),
        *("product_of", "re.escape(name)", "re.escape(name[:3])"),
        killers=(f"{_ANALYSIS}/test_cost.py",),
    ),
    Mutant(
        *("loaded-states-share-memory", "dsgraph/partitioning/guards.py", "missing copy"),
        *("_watch_states", "value.clone()", "value"),
        killers=("tests/distributed/test_saving.py::test_the_state_of_a_parameter_without_dimensions_is_loaded",),
    ),
    Mutant(
        *("kept-dtypes-cast", "dsgraph/partitioning/partition.py", "missing check"),
        *("_apply", "kept.get(id(param), cast)", "cast"),
        killers=("tests/distributed/test_mixed_precision.py",),
    ),
    Mutant(
        *("layers-dropped-by-each-rank", "dsgraph/partitioning/state_dict/pretrained.py", "missing step"),
        *("methods_for", 'methods["_is_fsdp_managed_module"] = True', "pass"),
        killers=("tests/distributed/test_transformers.py::test_models_that_drop_layers_run_all_of_them",),
    ),
    Mutant(
        *("tied-again-to-a-copy", "dsgraph/partitioning/eager/full_parameter.py", "missing step"),
        *("keep_shard", "return param.source.shards", "return None"),
        killers=("tests/distributed/test_surgery.py::test_token_embeddings_are_resized",),
    ),
    Mutant(
        *("comments-are-keys", "dsgraph/engine/config/read_config.py", "missing check"),
        *("_renewed", 'if not str(key).startswith("_")', "if True"),
        killers=("tests/engine/config/test_read_config.py",),
    ),
    Mutant(
        *("trees-measured-as-rings", "dsgraph/compiler/costs/agreed.py", "wrong scale"),
        *("KnownCosts._links", "measured.ranks, trees=table.trees", "measured.ranks"),
        killers=("tests/compiler/costs/test_agreed.py",),
    ),
    Mutant(
        *("spare-without-activations", "dsgraph/compiler/memory_limit/spare_memory.py", "missing term"),
        *("spare_bytes", "saved.total +", ""),
        killers=("tests/compiler/memory_limit/test_spare_memory.py",),
    ),
    Mutant(
        *("sum-written-twice", "passes/ir/accumulated_grads.py", "summed twice"),
        *("write_accumulated_grads", "total not in", "total is not"),
        killers=("tests/passes/ir/test_accumulated_grads.py",),
    ),
    Mutant(
        *("budget-forgets-takers", "passes/analysis/budget.py", "missing term"),
        *("MemoryBudget.left_to_keep", "- self.taken(MemoryPart.GATHERED_COPIES)", ""),
        killers=("tests/passes/analysis", "tests/passes/zero/test_selective_gather.py"),
    ),
    Mutant(
        *("knapsack-over-its-room", "passes/analysis/knapsack.py", "missing bound"),
        *("_fill", "<= left", "<= room"),
        killers=("tests/passes/analysis/test_knapsack.py",),
    ),
    Mutant(
        *("plan-turned-round", "passes/ir/save_plan.py", "swapped order"),
        *("decide", "_POLICIES[choice]", "CheckpointPolicy.MUST_SAVE"),
        killers=("tests/passes/ir", "tests/passes/zero/test_insert_zero_collectives.py"),
    ),
    Mutant(
        *("equal-markers-gather-twice", "passes/zero/insert_zero_collectives.py", "missing step"),
        *("InsertZeroCollectives.run", "node if is_returned(node) else _what_is_gathered(node)", "node"),
        killers=("tests/passes/zero/test_insert_zero_collectives.py",),
    ),
    Mutant(
        *("returned-gathers-are-one-tensor", "passes/zero/insert_zero_collectives.py", "missing check"),
        *(
            "InsertZeroCollectives.run",
            "node if is_returned(node) else _what_is_gathered(node)",
            "_what_is_gathered(node)",
        ),
        killers=("tests/passes/zero/test_insert_zero_collectives.py",),
    ),
    Mutant(
        *("pair-of-unlike-values", "passes/verify/pair.py", "missing check"),
        *("PairVerifier._check_crossing", ", now)", ", was)"),
        killers=("tests/passes/core/test_graph_pair.py",),
    ),
    Mutant(
        *("pair-values-swapped", "passes/verify/pair.py", "missing check"),
        *("PairVerifier._check_crossing", "!= theirs", "is None"),
        killers=("tests/passes/core/test_graph_pair.py",),
    ),
)

VERIFIER = (
    Mutant(
        *("verifier-of-waits", "passes/verify/collectives.py", "missing check"),
        *("_wrong_waits", "!= 1 or len(result.users) !=", ">"),
        killers=("tests/passes/verify/test_verifier.py",),
    ),
    Mutant(
        *("verifier-of-barriers", "passes/verify/memory.py", "missing check"),
        *("_check_barriers", "is not None", "is None and before.ordered is None"),
        killers=("tests/passes/verify/test_verifier.py",),
    ),
    Mutant(
        *("verifier-of-writes", "passes/verify/memory.py", "missing check"),
        *("_check_input_writes", ") ==", ") >="),
        killers=("tests/passes/verify/test_verifier.py",),
    ),
)

ENGINE = (
    Mutant(
        *("key-in-a-refused-layout", "dsgraph/engine/config/conditions.py", "missing check"),
        *("check_keys", "and not entry.stages", "and False"),
        killers=("tests/engine/config/test_conditions.py",),
    ),
    Mutant(
        *("condition-of-one-value", "dsgraph/engine/config/conditions.py", "wrong condition"),
        *("_problem", "needs.only not in (None, value)", "False"),
        killers=("tests/engine/config/test_conditions.py",),
    ),
    Mutant(
        *("note-is-an-error", "dsgraph/engine/config/conditions.py", "wrong condition"),
        *("check_keys", "problem and not needs.note", "problem"),
        killers=("tests/engine/config/test_conditions.py",),
    ),
    Mutant(
        *("value-of-key-not-converted", "dsgraph/engine/config/options_of_config.py", "missing step"),
        *("_set_by_keys", "entry.value(value, settings)", "value"),
        killers=("tests/engine/config/test_options_of_config.py",),
    ),
    Mutant(
        *("auto-where-the-file-is-silent", "dsgraph/engine/config/auto_values.py", "wrong condition"),
        *("_auto_values", "auto, False", "auto, True"),
        killers=("tests/engine/config/test_auto_values.py",),
    ),
    Mutant(
        *("errors-not-propagated", "dsgraph/inference/quantization/calibrated_rounding.py", "missing term"),
        *("_blocks", "weight[:, end:] -= left.errors @ factor[start:end, end:]", ""),
        killers=("tests/inference/quantization/test_calibrated_rounding.py",),
    ),
    Mutant(
        *("period-does-not-double", "dsgraph/engine/techniques/quantize_training.py", "wrong scale"),
        *("QuantizedTraining._lose_a_bit", "= 2 *", "= 1 *"),
        killers=("tests/engine/techniques/test_quantize_training.py::test_training_is_that_of_one_process",),
    ),
    Mutant(
        *("clamp-that-inductor-decomposes", "inductor_ext/quant/fake_quantize.py", "missing step"),
        *("reference", "torch.minimum(torch.maximum(numbers, lowest)", "numbers.clamp(lowest"),
        killers=("tests/passes/zero/test_lower_fake_weights.py",),
    ),
    Mutant(
        *("eigenvalue-of-one-side", "dsgraph/engine/techniques/eigenvalues.py", "wrong scale"),
        *("largest_eigenvalue", "(2 * step)", "step"),
        killers=("tests/engine/techniques/test_quantize_training.py::test_the_eigenvalue_of_a_known_hessian",),
    ),
    Mutant(
        *("rounded-weight-is-kept", "passes/zero/lower_fake_weights.py", "missing step"),
        *("LowerFakeWeights.run", "recompute_with_users(made)", ""),
        killers=("tests/passes/zero/test_lower_fake_weights.py::test_the_op_is_written_out_and_computed_again",),
    ),
    Mutant(
        *("signs-upside-down", "inductor_ext/quant/signs.py", "swapped order"),
        *("tables", "byte >>", "byte <<"),
        killers=("tests/inductor_ext/quant/test_signs.py",),
    ),
    Mutant(
        *("errors-not-fed-back", "inductor_ext/collectives/compressed_reduction.py", "missing term"),
        *("_momentum_on_cpu", "block.add_(worker_error[start:end])", ""),
        killers=("tests/inductor_ext/collectives/test_compressed_reduction.py",),
    ),
    Mutant(
        *("owner-forgets-its-error", "inductor_ext/collectives/compressed_reduction.py", "missing term"),
        *("_average_on_cpu", "block.add_(owner_error[start:end])", ""),
        killers=("tests/inductor_ext/collectives/test_compressed_reduction.py",),
    ),
    Mutant(
        *("errors-not-fed-back-in-cpp", "inductor_ext/quant/signs_cpp.py", "missing term"),
        *("_SOURCE", "(kept + taken) + load(e + i, some)", "kept + taken"),
        killers=("tests/inductor_ext/collectives/test_compressed_reduction.py",),
    ),
    Mutant(
        *("squares-of-the-first-block-in-cpp", "inductor_ext/quant/signs_cpp.py", "missing term"),
        *("_SOURCE", "for (double each : sums) sum += each", "sum = sums[0]"),
        killers=("tests/inductor_ext/collectives/test_compressed_reduction.py",),
    ),
    Mutant(
        *("lamb-compares-biased-variances", "dsgraph/optim/one_bit.py", "wrong scale"),
        *("OneBitLamb._update", '(bias / float(state["bias"])) *', ""),
        killers=("tests/optim/test_one_bit.py::test_equals_the_papers_equations",),
    ),
    Mutant(
        *("momentum-takes-in-one-of-two-gradients", "passes/zero/compress_reductions.py", "missing term"),
        *("_one_each", "emit(last, aten.add.Tensor, cast(last, total, dtype), cast(last, grad, dtype))", "grad"),
        killers=("tests/passes/zero/test_compress_reductions.py",),
    ),
    Mutant(
        *("skipped-step-keeps-new-errors", "dsgraph/optim/compressed_optimizer.py", "missing step"),
        *("CompressingOptimizer.zero_grad", ".drop(", ".take_over("),
        killers=("tests/optim/test_one_bit.py::test_a_skipped_step_leaves_momentum_and_errors",),
    ),
    Mutant(
        *("variance-frozen-with-its-bias", "dsgraph/optim/one_bit.py", "wrong scale"),
        *("OneBitAdam.freeze", '1 - group["betas"][1] ** int(state["step"])', "1.0"),
        killers=("tests/optim/test_one_bit.py::test_equals_the_papers_equations",),
    ),
    Mutant(
        *("norm-of-the-warm-up-goes-on", "dsgraph/engine/optimizer_step.py", "missing step"),
        *("OptimizerStep._prepare", "if state.is_unscaled else None", ""),
        killers=("tests/optim/test_one_bit.py::test_after_the_warm_up_there_is_no_norm_of_gradients",),
    ),
    Mutant(
        *("second-gradient-into-a-momentum", "dsgraph/partitioning/transforms/compression.py", "missing check"),
        *("Compression.note_arrival", "> 1:", "> 9:"),
        killers=("tests/optim/test_one_bit.py::test_a_momentum_takes_in_one_gradient_a_step",),
    ),
    Mutant(
        *("layers-dropped-alike-at-any-depth", "dsgraph/engine/techniques/layer_drop.py", "wrong scale"),
        *("ProgressiveLayerDrop._draw", "1 - block.depth * (1 - self._theta)", "self._theta"),
        killers=("tests/engine/techniques/test_layer_drop.py::test_training_is_that_of_the_papers_equations",),
    ),
    Mutant(
        *("kept-layers-unscaled", "dsgraph/engine/techniques/layer_drop.py", "wrong scale"),
        *("_Block._forward", "1 / self.keep", "1"),
        killers=("tests/engine/techniques/test_layer_drop.py::test_training_is_that_of_the_papers_equations",),
    ),
    Mutant(
        *("layers-share-compiled-code", "dsgraph/engine/techniques/layer_drop.py", "missing step"),
        *("_as_frame", '.replace(co_name=f"run {name}")', ""),
        killers=(
            "tests/engine/techniques/test_layer_drop.py::test_each_block_is_compiled_once_and_what_is_left_out_has_no_gradient",
        ),
    ),
    Mutant(
        *("engine-clips-by-shards", "dsgraph/optim/gradient_norm.py", "unsummed norm"),
        *("LocalGradients.norm", "sum_over(squares[1], [Ranks.of(group)])", "squares[1]"),
        killers=("tests/engine/test_engine.py",),
    ),
    Mutant(
        *("engine-counts-replicated-twice", "dsgraph/optim/gradient_norm.py", "wrong scale"),
        *("LocalGradients.norm", "squares[0] +", "2 * squares[0] +"),
        killers=("tests/engine/test_engine.py",),
    ),
    Mutant(
        *("loop-gets-no-gradients-back", "dsgraph/engine/optimizer_step.py", "missing check"),
        *("OptimizerStep.run", "state.boundary is None", "True"),
        killers=("tests/engine/integrations/test_accelerator.py",),
    ),
    Mutant(
        *("loop-unscales-twice", "dsgraph/engine/training_state.py", "wrong scale"),
        *("TrainingState.unscale", "1.0 if self.is_unscaled else", ""),
        killers=("tests/engine/integrations/test_accelerator.py",),
    ),
    Mutant(
        *("engine-sums-micro-batches", "dsgraph/engine/micro_batches.py", "wrong scale"),
        *("MicroBatches.backward", "state.resolved.batch.micro_batches", "1"),
        killers=("tests/engine/test_engine.py",),
    ),
    Mutant(
        *("engine-keeps-the-scale", "dsgraph/optim/gradient_norm.py", "wrong scale"),
        *("LocalGradients.unscale_and_clip", "1 / scale", "1.0"),
        killers=("tests/engine/test_engine.py",),
    ),
    Mutant(
        *("schedule-steps-when-skipped", "dsgraph/engine/optimizer_step.py", "missing check"),
        *("OptimizerStep.run", "is_finite and state.lr_scheduler", "state.lr_scheduler"),
        killers=("tests/engine/test_engine.py",),
    ),
    Mutant(
        *("lamb-by-shards", "dsgraph/optim/lamb.py", "unsummed norm"),
        *("norms_of", "dist.all_reduce(together, group=group)", ""),
        killers=("tests/engine/test_engine.py",),
    ),
    Mutant(
        *("owner-takes-its-rows-alone", "dsgraph/optim/full_matrix.py", "off-by-one shard"),
        *("_rows", "rank * each : rank * each +", ":"),
        killers=("tests/optim/test_full_matrix.py",),
    ),
    Mutant(
        *("loader-forgets-its-place", "dsgraph/engine/data.py", "off-by-one shard"),
        *("EpochOrder.__iter__", "[self.drawn :]", ""),
        killers=("tests/engine/test_data.py",),
    ),
    Mutant(
        *("host-name-by-its-beginning", "dsgraph/launch/hosts.py", "missing check"),
        *("check_name", ".fullmatch(", ".match("),
        killers=("tests/launch/test_hosts.py",),
    ),
    Mutant(
        *("ssh-takes-a-shell-line", "dsgraph/launch/commands.py", "missing check"),
        *("_by_ssh", "= shlex.", '= " ".'),
        killers=("tests/launch/test_hosts.py",),
    ),
    Mutant(
        *("flops-of-the-wrong-way", "dsgraph/compiler/module_flops.py", "swapped order"),
        *("_Counting._add", ".backward[", ".forward["),
        killers=("tests/engine/monitoring/test_step_logger.py",),
    ),
    Mutant(
        *("shows-the-last-loss", "dsgraph/engine/monitoring/step_logger.py", "unsummed gradient"),
        *("StepLogger.take_loss", "if begins or self._loss is None else self._loss + share", ""),
        killers=("tests/engine/monitoring/test_step_logger.py",),
    ),
    Mutant(
        *("one-cycle-without-stairs", "dsgraph/engine/schedules/one_cycle.py", "missing rounding"),
        *("OneCycle._share", "math.floor(way * stairs / size) / stairs if stairs else", ""),
        killers=("tests/engine/schedules/test_by_name.py",),
    ),
    Mutant(
        *("import-without-padding", "dsgraph/checkpoint/deepspeed_files.py", "off-by-one shard"),
        *("_read_groups", "size + padding", "size"),
        killers=("tests/checkpoint/test_convert.py",),
    ),
    Mutant(
        *("number-of-own-rows", "dsgraph/partitioning/rules.py", "unsummed norm"),
        *("_number", "replicated_value(value)", "local"),
        killers=("tests/partitioning/test_replicated.py",),
    ),
    Mutant(
        *("replaced-data-passes", "dsgraph/partitioning/eager/replaced_data.py", "missing check"),
        *("refuse_replaced_data", "now[0] != seen[0] and now[1] == seen[1]", "False"),
        killers=("tests/partitioning/test_replicated.py",),
    ),
    Mutant(
        *("replicated-compared-once", "dsgraph/partitioning/replicated.py", "missing check"),
        *("confirm_replicated", "or entry.is_written", ""),
        killers=("tests/partitioning/test_replicated.py",),
    ),
    Mutant(
        *("checkpoint-trusts-files", "dsgraph/checkpoint/checkpoint_files.py", "missing check"),
        *("read_about", "or _checksum(path / name) != checksum", ""),
        killers=("tests/checkpoint/test_save.py",),
    ),
    Mutant(
        *("checkpoint-trusts-what-it-says", "dsgraph/checkpoint/checkpoint_files.py", "missing check"),
        *("_without_checksum", 'and int(head["sum"], 16) == zlib.crc32(content[head.end() :])', ""),
        killers=("tests/checkpoint/test_checkpoint_files.py",),
    ),
    Mutant(
        *("killed-checkpoint-stays-hidden", "dsgraph/checkpoint/checkpoint_folder.py", "missing step"),
        *("_put_back", 'path.rename(folder / found["tag"])', "pass"),
        killers=("tests/checkpoint/test_checkpoint_folder.py",),
    ),
    Mutant(
        *("two-jobs-one-checkpoint", "dsgraph/checkpoint/checkpoint_folder.py", "missing check"),
        *("_try_lock", "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass"),
        killers=("tests/checkpoint/test_checkpoint_folder.py",),
    ),
    Mutant(
        *("keys-become-text", "dsgraph/utils/typed_json.py", "missing check"),
        *("_encode", "and all(type(key) is str for key in value)", ""),
        killers=("tests/utils/test_typed_json.py", "tests/engine/test_saving.py"),
    ),
    Mutant(
        *("resumes-within-a-step", "dsgraph/engine/training_state.py", "missing step"),
        *("TrainingState.go_on_from", "self.counts.steps * self.resolved.batch.micro_batches", "self.counts.micro"),
        killers=("tests/engine/test_saving.py",),
    ),
    Mutant(
        *("tags-may-differ", "dsgraph/checkpoint/same_call.py", "missing check"),
        *("one_tag", 'validation == "Fail"', "False"),
        killers=("tests/checkpoint/test_same_call.py",),
    ),
    Mutant(
        *("saves-alone", "dsgraph/checkpoint/same_call.py", "missing check"),
        *("one_tag", 'agreement.exchange(f"that they {doing}", json.dumps(mine))', "{0: json.dumps(mine)}"),
        killers=("tests/checkpoint/test_same_call.py",),
    ),
    Mutant(
        *("lost-without-a-word", "dsgraph/checkpoint/asynchronous_save.py", "missing check"),
        *("Writing.say_failure", "error is not None", "False"),
        killers=("tests/checkpoint/test_asynchronous_save.py",),
    ),
    Mutant(
        *("failed-save-fills-the-disk", "dsgraph/checkpoint/save.py", "missing step"),
        *("_Attempt.removing_failed", "unfinished.give_up()", "pass"),
        killers=("tests/engine/test_faults.py",),
    ),
    Mutant(
        *("written-but-never-complete", "dsgraph/checkpoint/save.py", "dropped wait"),
        *("save.end", "attempt.write(written.result)", "pass"),
        killers=("tests/checkpoint/test_asynchronous_save.py",),
    ),
)

MEMORY = (
    Mutant(
        *("limit-forgets-unread-parameters", "dsgraph/compiler/memory_limit/limit_scope.py", "missing step"),
        *("with_unread", "unread=tuple", "unread=() and tuple"),
        killers=(
            "tests/compiler/memory_limit/test_limit_scope.py::test_a_parameter_that_the_forward_does_not_read_counts_and_keeps_the_limit_on",
        ),
    ),
    Mutant(
        *("limit-of-any-size", "dsgraph/compiler/memory_limit/limit_scope.py", "missing check"),
        *("bound_sizes", "bool(size <= number)", "pass"),
        killers=(
            "tests/compiler/memory_limit/test_limit_scope.py::test_smaller_batches_keep_the_limit_and_larger_ones_do_not_run_their_graph",
        ),
    ),
    Mutant(
        *("limit-promised-for-a-block", "dsgraph/compiler/memory_limit/limit_scope.py", "missing check"),
        *("limit_gap", "not all(id(entry.param) in own for entry in entries)", "False"),
        killers=("tests/compiler/memory_limit/test_limit_scope.py::test_blocks_compiled_one_by_one_are_named",),
    ),
    Mutant(
        *("torchs-budget-passes", "dsgraph/compiler/memory_limit/limit_scope.py", "missing check"),
        *("refuse_memory_budget", "budget !=", "budget >"),
        killers=("tests/compiler/memory_limit/test_limit_scope.py::test_torchs_own_budget_is_refused_by_name",),
    ),
    Mutant(
        *("batch-norm-repeated", "passes/memory/forward_values.py", "missing check"),
        *("_Reader._may_repeat", "node not in self.once and", ""),
        killers=(
            "tests/compiler/memory_limit/test_limit_scope.py::test_what_reads_a_running_mean_is_not_repeated_with_the_new_one",
        ),
    ),
    Mutant(
        *("two-forwards-pass", "dsgraph/compiler/memory_limit/limit_watch.py", "missing step"),
        *("_note_forward", "state.open_forwards.add(forward)", "pass"),
        killers=("tests/compiler/memory_limit/test_limit_watch.py",),
    ),
    Mutant(
        *("outputs-of-the-step-before-forgotten", "passes/analysis/step_memory.py", "missing term"),
        *("_Step._forward", "self._keeps_outputs * self._outputs[-1]  # of the step before", "0"),
        killers=("tests/passes/analysis/test_step_memory.py",),
    ),
    Mutant(
        *("convolution-reorders-no-input", "passes/analysis/kernel_scratch.py", "missing term"),
        *("_convolution_backward", "+ _blocked(x)", ""),
        killers=("tests/passes/analysis/test_kernel_scratch.py",),
    ),
    Mutant(
        *("repeated-dropout-has-no-results", "passes/runner/partitioner.py", "missing step"),
        *("Partitioner._finish", "evaluate_random_calls(part)", ""),
        killers=("tests/passes/analysis/test_step_memory.py",),
    ),
    Mutant(
        *("states-of-generators-are-outputs", "passes/analysis/pair_memory.py", "missing step"),
        *("_saved", "len(sources) == len(states)", "not states"),
        killers=("tests/passes/analysis/test_step_memory.py",),
    ),
    Mutant(
        *("generators-state-needs-no-room", "passes/analysis/kernel_scratch.py", "missing term"),
        *("scratch_bytes", "return state +", "return"),
        killers=("tests/passes/analysis/test_kernel_scratch.py",),
    ),
    Mutant(
        *("results-of-a-random-op-end-together", "passes/analysis/memory.py", "wrong bound"),
        *("_Table._places_of", "(name,) for name in names] if is_tuple else [", ""),
        killers=("tests/passes/analysis/test_memory.py",),
    ),
    Mutant(
        *("numpys-integer-is-a-share", "dsgraph/utils/byte_counts.py", "wrong type"),
        *("read_bytes", ", Integral)", ", int)"),
        killers=("tests/utils/test_byte_counts.py",),
    ),
    Mutant(
        *("plan-moves-nothing", "passes/memory/fit.py", "missing step"),
        *(
            "Proposal.save_plan",
            "choices |= {name: Choice.OFFLOAD for name in self.offloaded if name in names}",
            "pass",
        ),
        killers=("tests/distributed/test_memory_limit.py",),
    ),
    Mutant(
        *("next-plan-may-be-the-same", "passes/memory/fit.py", "wrong bound"),
        *("_Search._plans", "plan.needs", "room"),
        killers=("tests/passes/memory/test_fit.py",),
    ),
    Mutant(
        *("views-cost-nothing-to-keep", "passes/memory/step_plan.py", "missing step"),
        *("_costly", "sources += source.all_input_nodes", "pass"),
        killers=("tests/passes/memory/test_step_plan.py",),
    ),
    Mutant(
        *("default-split-in-any-case", "passes/memory/fit.py", "wrong branch"),
        *("_Search._needs_a_plan", "> usable", "> 10**15"),
        killers=("tests/passes/memory/test_fit.py",),
    ),
    Mutant(
        *("split-draws-other-numbers", "passes/memory/split_as_planned.py", "missing check"),
        *("split_as_planned", " or _draws(node)", ""),
        killers=("tests/passes/memory/test_split_as_planned.py",),
    ),
    Mutant(
        *("split-chooses-for-the-plan", "passes/memory/split_as_planned.py", "missing check"),
        *("split_as_planned", "node.name not in repeated or _draws(node)", "_draws(node)"),
        killers=("tests/passes/memory/test_split_as_planned.py",),
    ),
    Mutant(
        *("plans-what-is-not-saved", "passes/memory/forward_values.py", "missing check"),
        *("_Reader._settled", "and node in self.returned", ""),
        killers=("tests/passes/memory/test_forward_values.py",),
    ),
    Mutant(
        *("limit-forgets-what-is-saved", "passes/memory/assignment.py", "off by one"),
        *("_rows", "item.saved / unit", "0.0"),
        killers=("tests/passes/memory/test_policies.py",),
    ),
    Mutant(
        *("one-micro-batch-is-planned", "passes/memory/assignment.py", "missing term"),
        *("_rows", "in_flight > 1", "False"),
        killers=("tests/passes/memory/test_policies.py",),
    ),
    Mutant(
        *("one-micro-batch-is-simulated", "passes/analysis/step_memory.py", "off by one"),
        *("simulate_runs", "needs.in_flight - 1", "0"),
        killers=("tests/distributed/test_pipeline_memory.py",),
    ),
    Mutant(
        *("messages-need-no-memory", "dsgraph/parallel/pipeline/stage_limits.py", "missing term"),
        *("StageLimits._step", "self._buffers(number, run)", "0"),
        killers=("tests/distributed/test_pipeline_memory.py",),
    ),
    Mutant(
        *("repeated-without-its-sources", "passes/memory/policies.py", "missing check"),
        *("_Programme.__init__", ", -1", ", 0"),
        killers=("tests/passes/memory/test_policies.py",),
    ),
    Mutant(
        *("offload-ahead-of-its-last-use", "passes/memory/stored_values.py", "off by one"),
        *("_Uses.__init__", "*node.all_input_nodes", ""),
        killers=("tests/passes/memory/test_offload.py",),
    ),
    Mutant(
        *("write-that-failed-is-read", "inductor_ext/transfers/stored.py", "missing check"),
        *("_read", "if failure is not None:\n        raise TransferError(str(failure)) from failure", ""),
        killers=("tests/inductor_ext/transfers/test_ops.py",),
    ),
    Mutant(
        *("buffer-back-ahead-of-its-copy", "inductor_ext/transfers/stored.py", "dropped wait"),
        *("StoredOnDisk.__del__", "_given_up.set", "written.cancel"),
        killers=("tests/inductor_ext/transfers/test_ops.py",),
    ),
    Mutant(
        *("verifier-of-reloads", "passes/verify/transfers.py", "missing check"),
        *("_wrong_wait", "!= 1 or len(reload.users) !=", ">"),
        killers=("tests/passes/memory/test_offload.py",),
    ),
)

PARALLEL = (
    Mutant(
        *("plan-splits-gradients-early", "dsgraph/parallel/planning/memory_formulas.py", "off by one"),
        *("GRADIENTS", "(2)", "(1)"),
        killers=("tests/parallel/planning/test_layout_plan.py",),
    ),
    Mutant(
        *("search-forgets-memory", "dsgraph/parallel/planning/search.py", "missing check"),
        *("search", "if item.fits", ""),
        killers=("tests/parallel/planning/test_search.py",),
    ),
    Mutant(
        *("slices-not-entered", "passes/parallel/rewrite_slices.py", "missing term"),
        *("Rewriting._slice", "operand is not outcome.added and _has_gradient(operand)", "False"),
        killers=("tests/passes/parallel/test_slice_tensors.py",),
    ),
    Mutant(
        *("entries-outlive-writes", "passes/parallel/rewrite_slices.py", "stale value"),
        *("Rewriting.visit", "if writes(node)", "if False"),
        killers=("tests/passes/parallel/test_slice_sequence.py",),
    ),
    Mutant(
        *("made-without-gradients-and-read-with-them", "passes/parallel/rewrite_slices.py", "stale value"),
        *("Rewriting.visit", "self._made.clear()", "pass"),
        killers=("tests/passes/parallel/test_slice_sequence.py",),
    ),
    Mutant(
        *("tokens-mixed-with-heads", "passes/parallel/slice_sequence.py", "missing check"),
        *("_outcome", "any(operand in own for operand in node.all_input_nodes)", "False"),
        killers=("tests/passes/parallel/test_slice_sequence.py",),
    ),
    Mutant(
        *("tokens-gathered-without-a-sum", "passes/parallel/slice_sequence.py", "missing sum"),
        *("_SequenceRewriting.visit", "_own.gather_entered.default", "_own.gather_slices.default"),
        killers=("tests/distributed/test_sequence_parallel.py",),
    ),
    Mutant(
        *("slices-of-tokens-without-products", "passes/parallel/slice_sequence.py", "missing check"),
        *("_without_effect", "if node.name not in arrived", "if False"),
        killers=("tests/passes/parallel/test_slice_sequence.py",),
    ),
    Mutant(
        *("deferred-gradients-not-counted", "dsgraph/parallel/pipeline/schedule_order.py", "missing term"),
        *("most_deferred", 'kind == "I"', "False"),
        killers=("tests/parallel/pipeline/test_schedule_order.py",),
    ),
    Mutant(
        *("other-results-are-sent", "passes/parallel/stages/stage_graphs.py", "wrong branch"),
        *("return_only", "and not node.users", "and node.users"),
        killers=("tests/passes/parallel/stages/test_split_stages.py",),
    ),
    Mutant(
        *("one-block-is-planned", "dsgraph/compiler/memory_limit/limit_scope.py", "off by one"),
        *("_with_block", "around.in_flight[block],", "1,"),
        killers=("tests/distributed/test_block_limits.py",),
    ),
    Mutant(
        *("held-copies-are-not-kept", f"{_STEP}/step_run.py", "wrong branch"),
        *("StepRun._entered", "if self.in_step and not self._held", "if False"),
        killers=(f"{_STEP_TESTS}/test_step_memory.py",),
    ),
    Mutant(
        *("code-around-blocks-not-counted", "dsgraph/partitioning/blocks/live_bytes.py", "missing term"),
        *("LiveBytes.add", "self._live += size", "pass"),
        killers=("tests/partitioning/blocks/test_fake_step.py",),
    ),
    Mutant(
        *("copies-gathered-one-by-one", "inductor_ext/collectives/together.py", "wrong branch"),
        *("start_gathers_in_place", "not in COALESCING_BACKENDS", "in (*COALESCING_BACKENDS, 'gloo')"),
        killers=("tests/contracts/test_eager_collectives.py",),
    ),
    Mutant(
        *("sliced-sums-stay-opaque", "passes/parallel/lower_slices.py", "missing entry"),
        *("LowerForwardSlices.run", "node.target in _LOWERED", "node.target is _own.gather_slices.default"),
        killers=("tests/passes/parallel/test_lower_slices.py",),
    ),
    Mutant(
        *("sliced-sums-not-followed", "passes/verify/reductions.py", "missing event"),
        *("_follow", "if target in _SUM_SLICES", "if False"),
        killers=("tests/distributed/test_tensor_parallel.py",),
    ),
    Mutant(
        *("sliced-sums-rounded-twice", "passes/parallel/rewrite_slices.py", "missing cast"),
        *("Rewriting._widened", "not in _NARROW", "is not None"),
        killers=("tests/passes/parallel/test_slice_tensors.py",),
    ),
    Mutant(
        *("fused-slices-in-a-row", "dsgraph/inference/weight_sources.py", "wrong index"),
        *("_of_files.read", "part * count + rank", "rank * held.parts + part"),
        killers=("tests/inference/test_weight_sources.py",),
    ),
    Mutant(
        *("planned-in-training-mode", "dsgraph/inference/slice_layers.py", "missing step"),
        *("plan_layers", ".eval()", ""),
        killers=("tests/distributed/test_sliced_few_bits.py",),
    ),
    Mutant(
        *("few-bits-not-summed", "passes/parallel/slice_rules.py", "missing term"),
        *("multiply_sliced_weight", "=True,", "=False,"),
        killers=("tests/passes/parallel/test_slice_tensors.py",),
    ),
    Mutant(
        *("one-cache-for-all-requests", "dsgraph/inference/cache.py", "missing step"),
        *("CachePool.lent", ".pop()", "[-1]"),
        killers=("tests/inference/test_engine.py::test_threads_get_their_own_tokens_and_compile_nothing",),
    ),
    Mutant(
        *("logits-not-compared", "dsgraph/inference/first_tokens.py", "missing check"),
        *("_compare", "distance > tolerance", "False"),
        killers=("tests/inference/test_first_tokens.py::test_what_cannot_be_served_is_refused_and_left_as_it_was",),
    ),
    Mutant(
        *("windows-not-reached", "dsgraph/inference/first_tokens.py", "missing bound"),
        *("_length", ", beyond)", ", 3)"),
        killers=("tests/inference/test_first_tokens.py",),
    ),
    Mutant(
        *("layers-by-their-windows", "dsgraph/inference/cache.py", "wrong index"),
        *("new_cache", "cache.layers = [FullLayer(max_tokens) for _ in range(count)]", ""),
        killers=("tests/inference/test_first_tokens.py::test_tokens_and_logits_are_those_of_transformers",),
    ),
    Mutant(
        *("foreign-forward-in-a-graph", "dsgraph/inference/engine.py", "missing check"),
        *("InferenceEngine._serve", "not isinstance(cache, RewindableCache)", "False"),
        killers=("tests/inference/test_engine.py::test_forwards_that_no_graph_takes_are_the_models_own",),
    ),
    Mutant(
        *("missing-weights-left-random", "dsgraph/inference/checkpoints.py", "missing check"),
        *("from_transformers", 'missing_keys", "mismatched_keys"', 'mismatched_keys",'),
        killers=("tests/inference/test_checkpoints.py",),
    ),
    Mutant(
        *("encoded-once-for-all", "dsgraph/inference/cache.py", "missing step"),
        *("EncoderDecoderMemory.rewind", "self.is_updated = dict.fromkeys(self.is_updated, False)", ""),
        killers=("tests/inference/test_encoders.py",),
    ),
    Mutant(
        *("encoder-output-of-padding", "dsgraph/inference/encoders.py", "missing step"),
        *("EncoderEngine.__call__", "0, length", "0, found[name].shape[dimension]"),
        killers=("tests/inference/test_encoders.py",),
    ),
    Mutant(
        *("samples-of-each-rank", "dsgraph/inference/engine.py", "missing check"),
        *("InferenceEngine._drawn_from", 'arguments.get("do_sample", config.do_sample)', "False"),
        killers=("tests/distributed/test_sliced_inference.py",),
    ),
    Mutant(
        *("replicated-though-random", "passes/analysis/replication.py", "missing check"),
        *("_is_deterministic", "torch.Tag.nondeterministic_seeded not in target.tags", "True"),
        killers=("tests/passes/analysis/test_replication.py",),
    ),
    Mutant(
        *("pipeline-tied-counted-twice", "dsgraph/parallel/pipeline/tied_gradients.py", "missing check"),
        *("StepGradients.local", "name not in self.tied or name in self.owned", "True"),
        killers=("tests/distributed/test_pipeline.py",),
    ),
    Mutant(
        *("slices-counted-once", "dsgraph/parallel/pipeline/tied_gradients.py", "unsummed norm"),
        *("StepGradients.local", "if name in self.slices", "if False"),
        killers=("tests/distributed/test_parallelize.py::test_two_by_two",),
    ),
    Mutant(
        *("mpu-slices-counted-once", "dsgraph/optim/gradient_norm.py", "unsummed norm"),
        *("gradients_of", "held |= dict.fromkeys(sliced, slicing)", ""),
        killers=("tests/engine/integrations/test_mpu.py",),
    ),
    Mutant(
        *("partitioned-slices-counted-once", "dsgraph/optim/gradient_norm.py", "unsummed norm"),
        *("gradients_of", "held = {entry.name: entry.spec.held.group", "held = {'': entry.spec.held.group"),
        killers=("tests/distributed/test_parallelize.py::test_the_engine_trains_two_stages_and_goes_on_with_slices",),
    ),
    Mutant(
        *("slices-of-partitioned-parameters-not-joined", "dsgraph/partitioning/seam.py", "missing step"),
        *("_unsliced", "spec.held is None", "True"),
        killers=("tests/distributed/test_partitioned_slices.py",),
    ),
    Mutant(
        *("rows-of-slices-placed-outermost", "dsgraph/partitioning/rows.py", "wrong placement"),
        *("placements_for", "held is not None and held.dim == 0", "False"),
        killers=("tests/distributed/test_partitioned_slices.py::test_parameters_are_full_to_users",),
    ),
    Mutant(
        *("rows-of-fused-slices-sharded", "dsgraph/partitioning/partition.py", "missing check"),
        *("_why_replicated", "held.parts > 1", "False"),
        killers=("tests/distributed/test_partitioned_slices.py::test_the_report_names_replicated_fused_slices",),
    ),
    Mutant(
        *("sliced-loss-of-ignored-targets", "inductor_ext/collectives/vocabulary.py", "missing check"),
        *("sliced_cross_entropy", ".masked_fill(~counts, 0)", ""),
        killers=(
            "tests/distributed/test_tensor_parallel.py::test_a_vocabulary_is_sliced_and_its_logits_are_not_gathered_for_the_loss",
        ),
    ),
    Mutant(
        *("checkpoint-bodies-not-sliced", "passes/parallel/slice_tensors.py", "missing step"),
        *("SliceTensors.run", "(*dict.fromkeys(body for body, _ in bodies(gm)), gm)", "(gm,)"),
        killers=("tests/passes/parallel/test_slice_tensors.py",),
    ),
    Mutant(
        *("packed-parameter-in-one-piece", "dsgraph/parallel/tensor/plan_styles.py", "wrong index"),
        *("slice_of_parameter", "Slice(max(dims - 2, 0), _COLUMN[known])", "Slice(max(dims - 2, 0))"),
        killers=("tests/parallel/test_plan_styles.py",),
    ),
    Mutant(
        *("tied-slices-part", "dsgraph/parallel/tensor/tensor_plan.py", "missing check"),
        *("plan_by_names", "found.get(first, held) != held and sources[first] != name", "False"),
        killers=("tests/parallel/test_plan_styles.py",),
    ),
    Mutant(
        *("merged-heads-in-one-piece", "passes/parallel/slices.py", "wrong index"),
        *("_merge", "return Slice(first + at, ahead)", "return Slice(first + at)"),
        killers=("tests/passes/parallel/test_slice_views.py",),
    ),
    Mutant(
        *("writes-to-gathered-copies", "passes/parallel/slice_rules.py", "missing check"),
        *("outcome_of", "(refuse_writes(node, values) or outcome) if is_sliced else outcome", "outcome"),
        killers=("tests/passes/parallel/test_slice_writes.py",),
    ),
    Mutant(
        *("heads-of-fused-weights-are-rows", "passes/parallel/unfuse_products.py", "wrong index"),
        *(
            "_with_own_product",
            "slice(piece.first * piece.width, piece.last * piece.width)",
            "slice(piece.first, piece.last)",
        ),
        killers=("tests/passes/parallel/test_unfuse_products.py",),
    ),
    Mutant(
        *("pieces-of-an-index-by-number", "passes/parallel/slice_views.py", "missing check"),
        *("_of_pieces", "if taken != piece or start % piece:", "if taken != piece:"),
        killers=("tests/passes/parallel/test_slice_views.py",),
    ),
    Mutant(
        *("checkpoint-bodies-not-planned", "dsgraph/parallel/tensor/tensor_plan.py", "missing step"),
        *("plan_by_graph", "for body, outer in bodies(gm):", "for body, outer in ():"),
        killers=("tests/parallel/test_tensor_plan.py",),
    ),
    Mutant(
        *("modules-of-decorated-forwards-unnamed", "passes/ir/blocks.py", "missing term"),
        *("module_of", r"(\[\d+\])*", ""),
        killers=("tests/distributed/test_pipeline_arguments.py",),
    ),
    Mutant(
        *("one-scale-for-all-micro-batches", "dsgraph/engine/pipeline_schedule.py", "missing check"),
        *("_joined_leaf", "if not is_same", "if False"),
        killers=("tests/engine/test_pipeline_schedule.py",),
    ),
    Mutant(
        *("one-micro-batch-as-a-step", "dsgraph/parallel/pipeline/step_arguments.py", "missing check"),
        *("StepArguments.leaves", "self._check_rows(call, leaves)", ""),
        killers=("tests/parallel/pipeline/test_pipelined.py",),
    ),
    Mutant(
        *("stages-evaluate-as-in-training", "dsgraph/parallel/pipeline/evaluation/evaluation.py", "missing step"),
        *("Evaluation.__init__", ".eval()", ""),
        killers=("tests/distributed/test_pipeline_evaluation.py",),
    ),
    Mutant(
        *("outputs-of-the-last-micro-batch", "dsgraph/batches.py", "missing term"),
        *("joined_values", "torch.cat(list(parts))", "parts[-1]"),
        killers=("tests/distributed/test_pipeline_outputs.py",),
    ),
    Mutant(
        *("strict-looks-in-one-graph", "dsgraph/tools/reporting/strict.py", "wrong bound"),
        *("refuse_unused_kernels", "all(note in each", "any(note in each"),
        killers=("tests/tools/reporting/test_strict.py",),
    ),
    Mutant(
        *("backward-in-a-backward-is-an-error", "dsgraph/partitioning/step/step_run.py", "missing check"),
        *("StepRun._finish_backward", "if self._ends() is None:", "if True:"),
        killers=("tests/distributed/test_several_backwards.py",),
    ),
    Mutant(
        *("repeated-results-not-relayed", "passes/parallel/stages/stage_graphs.py", "missing step"),
        *("stage_graphs", ".difference(results)", ""),
        killers=("tests/distributed/test_pipeline_outputs.py",),
    ),
    Mutant(
        *("returned-arguments-left-out", "dsgraph/parallel/pipeline/evaluation/output_tree.py", "missing term"),
        *("OutputTree.of", "if isinstance(leaf, Tensor)", "if isinstance(leaf, Tensor) and id(leaf) not in given"),
        killers=("tests/parallel/pipeline/test_captured_model.py",),
    ),
    Mutant(
        *("stages-generate-from-the-padding", "dsgraph/parallel/pipeline/pipelined.py", "wrong index"),
        *("PipelinedModel._logits", "found[:, position]", "found[:, -1]"),
        killers=("tests/distributed/test_pipeline_generation.py",),
    ),
    Mutant(
        *("stages-generate-both-ways", "dsgraph/parallel/pipeline/evaluation/generation.py", "missing check"),
        *("Generation._forward", "if not self._is_causal", "if False"),
        killers=("tests/distributed/test_pipeline_generation.py",),
    ),
    Mutant(
        *("evaluation-cuts-anywhere", "passes/parallel/stages/split_stages.py", "wrong bound"),
        *("stages_by_parameters", "if not reads or stage >= reads[-1][1]", ""),
        killers=("tests/distributed/test_pipeline_evaluation.py", "tests/passes/parallel/stages/test_split_stages.py"),
    ),
    Mutant(
        *("stages-add-up-in-16-bits", "dsgraph/parallel/pipeline/sharded_stages.py", "missing cast"),
        *("ShardedStages.add_gradient", "full.grad.to(entry.param.dtype)", "full.grad"),
        killers=("tests/distributed/test_pipeline_precision.py",),
    ),
    Mutant(
        *("slices-with-scales-of-their-own", "dsgraph/partitioning/transforms/fake_weight.py", "missing check"),
        *("FakeWeight._rounds_slices", "held.dim == channel and", ""),
        killers=(f"{_PARALLEL}::test_stages_and_slices_compute_with_rounded_weights",),
    ),
    Mutant(
        *("errors-of-one-slice-saved", "dsgraph/checkpoint/model_tensors.py", "missing step"),
        *("ModelTensors.saved_key", "or key not in own_keys", "or key in own_keys"),
        killers=(f"{_PARALLEL}::test_a_checkpoint_of_slices_has_their_errors",),
    ),
    Mutant(
        *("micro-batches-drop-alike", "dsgraph/engine/techniques/layer_drop.py", "missing term"),
        *("ProgressiveLayerDrop.keeps", "first + microbatch", "first"),
        killers=(f"{_PARALLEL}::test_stages_leave_out_the_blocks_of_one_process",),
    ),
    Mutant(
        *("frozen-blocks-alike", "passes/parallel/stages/stage_segments.py", "missing check"),
        *("_kind", "getattr(node.meta.get('val'), 'requires_grad', None)", "None"),
        killers=("tests/passes/parallel/stages/test_stage_segments.py",),
    ),
    Mutant(
        *("half-a-block-is-left-out", "passes/parallel/stages/stage_segments.py", "missing check"),
        *("segments_of", "if len(nodes) == tags.count(tag)", "if True"),
        killers=("tests/passes/parallel/stages/test_stage_segments.py",),
    ),
    Mutant(
        *("mixed-dtypes-of-norms-unseen", "dsgraph/parallel/pipeline/mixed_dtypes.py", "missing check"),
        *("_compared", "if name in _NORMS:", "if False:"),
        killers=("tests/parallel/pipeline/test_pipelined.py",),
    ),
    Mutant(
        *("writes-of-slices-refused", "dsgraph/parallel/pipeline/mixed_dtypes.py", "missing check"),
        *("_compared", "and _indexes_by_tensor(node.args[1])", ""),
        killers=("tests/parallel/pipeline/test_pipelined.py",),
    ),
    Mutant(
        *("probabilities-compared", "dsgraph/parallel/pipeline/mixed_dtypes.py", "missing check"),
        *("_compared", "not in operands else []", "is not None else []"),
        killers=("tests/parallel/pipeline/test_pipelined.py",),
    ),
    Mutant(
        *("failed-step-leaves-gradients", "dsgraph/parallel/pipeline/tied_gradients.py", "missing step"),
        *("StepGradients.abandon", "self.sharded.take_gradients()", ""),
        killers=("tests/parallel/pipeline/test_pipelined.py",),
    ),
    Mutant(
        *("failed-step-leaves-losses", "dsgraph/parallel/pipeline/stage_runs.py", "missing step"),
        *("StageRuns.drop", "self._known = {}", ""),
        killers=("tests/parallel/pipeline/test_pipelined.py",),
    ),
    Mutant(
        *("scaled-loss-returned", "dsgraph/parallel/pipeline/pipelined.py", "missing term"),
        *("PipelinedModel.step", " / self._loss.scale", ""),
        killers=("tests/engine/test_pipeline_schedule.py",),
    ),
    Mutant(
        *("stages-receive-what-was-captured", "dsgraph/parallel/pipeline/stage_runs.py", "missing check"),
        *("StageRuns.now", "self.autocast()", '"no autocast"'),
        killers=("tests/distributed/test_pipeline.py::test_autocast_around_a_step_is_that_of_one_process",),
    ),
    Mutant(
        *("stages-keep-own-seeds", "dsgraph/parallel/pipeline/pipeline.py", "ranks differ"),
        *("pipeline", "share_first_values(graphs, held, own, group=group, agreement=agreement)", ""),
        killers=(
            "tests/distributed/test_pipeline.py::test_the_first_ranks_values_count_and_other_stages_leave_memory",
        ),
    ),
    Mutant(
        *("captured-inputs-kept", "dsgraph/parallel/pipeline/captured_model.py", "leak"),
        *("_graph_of", "kept.clear()", ""),
        killers=(
            "tests/distributed/test_pipeline.py::test_the_first_ranks_values_count_and_other_stages_leave_memory",
        ),
    ),
    Mutant(
        *("batches-not-compared", "dsgraph/ranks/equal_batches.py", "missing check"),
        *("EqualBatches.is_due", "<= CHECKED_STEPS", "< 1"),
        killers=(
            "tests/distributed/test_tensor_parallel.py::test_ranks_that_are_given_other_batches_or_seeds_are_named",
        ),
    ),
    Mutant(
        *("refused-batches-untold", "dsgraph/ranks/equal_batches.py", "missing step"),
        *("EqualBatches.refusals", 'self.compare(f"{kind}, refused: {error}", {})', "pass"),
        killers=(
            "tests/distributed/test_pipeline.py::test_a_rank_with_another_batch_in_the_first_step_is_told_on_all",
        ),
    ),
    Mutant(
        *("deferred-weights-overwrite", "dsgraph/parallel/pipeline/deferred_weights.py", "missing term"),
        *("WeightQueue.take.run", "if weight.grad is None else weight.grad.add_(gradient())", ""),
        killers=("tests/distributed/test_pipeline.py::test_steps_are_those_of_the_unsplit_model",),
    ),
    Mutant(
        *("copies-on-another-device", "dsgraph/parallel/pipeline/model_copy.py", "wrong branch"),
        *("without_values", "device=device", 'device=torch.device("meta")'),
        killers=("tests/distributed/test_pipeline_evaluation.py",),
    ),
    Mutant(
        *("deferred-weights-in-the-backward", "dsgraph/parallel/pipeline/deferred_weights.py", "counted twice"),
        *("defer_weights", 'graph.call_method("detach", (weight,))', "weight"),
        killers=("tests/distributed/test_pipeline.py::test_compiled_stages_are_those_of_the_unsplit_model",),
    ),
    Mutant(
        *("random-values-share-a-seed", "passes/parallel/stages/seed_draws.py", "wrong index"),
        *("seed_draws", "(made[0], 1, len(made) - 1)", "(made[0], 1, 0)"),
        killers=("tests/passes/parallel/stages/test_seed_draws.py",),
    ),
    Mutant(
        *("replicas-share-seeds", "dsgraph/parallel/pipeline/step_arguments.py", "wrong index"),
        *("StepArguments._seeds", "[rank * self._count : (rank + 1) * self._count]", "[: self._count]"),
        killers=("tests/distributed/test_pipeline_random.py",),
    ),
    Mutant(
        *("seeds-of-the-rank", "inductor_ext/kernels/seeded_random.py", "missing term"),
        *("seeded_random", "int(seed)", "torch.initial_seed()"),
        killers=("tests/inductor_ext/kernels/test_seeded_random.py",),
    ),
    Mutant(
        *("random-values-repeated", "dsgraph/parallel/pipeline/captured_model.py", "missing check"),
        *("_repeated", "run.impure", "set"),
        killers=("tests/parallel/pipeline/test_captured_model.py",),
    ),
    Mutant(
        *("modes-not-repeated", "passes/parallel/stages/stage_graphs.py", "missing step"),
        *("_with_repeated", "any(node in needed and node not in own for node in span)", "False"),
        killers=("tests/passes/parallel/stages/test_split_stages.py",),
    ),
    Mutant(
        *("rounds-not-checked", "dsgraph/parallel/pipeline/schedule_order.py", "missing check"),
        *("check_microbatches", "kind in _IN_ROUNDS", "False"),
        killers=("tests/parallel/pipeline/test_schedule_order.py",),
    ),
    Mutant(
        *("layouts-load-other-shapes", "dsgraph/checkpoint/checkpoint_match.py", "missing check"),
        *("other_model", "saved.get(name, shape) != shape", "False"),
        killers=(
            "tests/distributed/test_parallelize.py::test_a_checkpoint_of_another_model_or_a_damaged_one_changes_no_rank",
        ),
    ),
    Mutant(
        *("little-sliced-without-a-word", "dsgraph/parallel/tensor/tensor_parallel.py", "missing check"),
        *("_why_little", "sum(whole.values()) <= (1 - MOST) * total", "True"),
        killers=(
            "tests/distributed/test_tensor_parallel.py::test_a_family_of_which_little_is_sliced_is_named_with_reasons",
        ),
    ),
    Mutant(
        *("cuts-ignore-the-link", "dsgraph/parallel/pipeline/pipeline.py", "missing term"),
        *("_seconds_per_byte", '1 / link.of("all_gather_into_tensor").bytes_per_s', "0.0"),
        killers=("tests/parallel/pipeline/test_pipelined.py",),
    ),
    Mutant(
        *("stages-without-work", "passes/parallel/stages/split_stages.py", "missing check"),
        *("SplitStages.plan", "0 < crossing[at] < math.inf", "crossing[at] < math.inf"),
        killers=("tests/passes/parallel/stages/test_split_stages.py",),
    ),
    Mutant(
        *("split-cuts-before-writes", "passes/parallel/stages/crossing_bytes.py", "missing check"),
        *("crossing_bytes", "_writes(name)", "False"),
        killers=("tests/passes/parallel/stages/test_split_stages.py",),
    ),
    Mutant(
        *("written-buffers-in-two-stages", "passes/parallel/stages/crossing_bytes.py", "missing check"),
        *("crossing_bytes", "for nodes in together", "for nodes in ()"),
        killers=("tests/distributed/test_pipeline_buffers.py",),
    ),
    Mutant(
        *("statistics-of-the-first-micro-batch", "dsgraph/parallel/pipeline/stage_modules.py", "missing step"),
        *("StageModule._call", "buffer.copy_(value)", "pass"),
        killers=("tests/distributed/test_pipeline_buffers.py",),
    ),
    Mutant(
        *("backwards-read-later-statistics", "dsgraph/parallel/pipeline/stage_modules.py", "missing copy"),
        *("StageModule._call", "buffer.clone() for", "buffer for"),
        killers=("tests/distributed/test_pipeline_buffers.py",),
    ),
    Mutant(
        *("evaluation-keeps-first-statistics", "dsgraph/parallel/pipeline/captured_model.py", "missing check"),
        *("capture_model", "*changing, ", ""),
        killers=("tests/distributed/test_pipeline_buffers.py",),
    ),
    Mutant(
        *("running-statistics-unseen", "dsgraph/parallel/pipeline/fake_values.py", "missing check"),
        *("_Effects.__torch_dispatch__", "func.name() in _WITH_STATISTICS and args[5]", "False"),
        killers=("tests/distributed/test_pipeline_buffers.py",),
    ),
    Mutant(
        *("capture-writes-to-the-model", "dsgraph/parallel/pipeline/written_buffers.py", "missing step"),
        *("keeping_buffers", "buffer.detach().copy_(value)", "pass"),
        killers=("tests/distributed/test_pipeline_buffers.py",),
    ),
)

CONTRACTS = (
    Mutant(
        *("counts-copied-to-the-device", "inductor_ext/quant/signs.py", "wait for the device"),
        *("launch_pack", "torch.arange(rows, device=x.device)", "torch.tensor(range(rows), device=x.device)"),
        killers=("tests/contracts/test_ops_do_not_wait.py",),
    ),
    Mutant(
        *("fake-result-on-the-cpu", "inductor_ext/collectives/compressed_reduction.py", "wrong device"),
        *("_fake_average", "received.new_empty(", "torch.empty("),
        killers=("tests/contracts/test_fake_ops.py",),
    ),
    Mutant(
        *("device-without-a-number", "passes/parallel/rewrite_slices.py", "wrong device"),
        *("Rewriting._draw", "device=value.device)", "device=value.device.type)"),
        killers=("tests/contracts/test_device_index.py",),
    ),
    Mutant(
        *("engine-leaves-batches-on-the-cpu", "dsgraph/engine/micro_batches.py", "missing step"),
        *("MicroBatches.forward", "move_inputs((args, kwargs), self._device)", "(args, kwargs)"),
        killers=("tests/engine/test_micro_batches.py",),
    ),
    Mutant(
        *("norm-read-twice", "dsgraph/optim/gradient_norm.py", "wait for the device"),
        *("LocalGradients.norm", "float(squares)", "float(squares) if squares > 0 else 0.0"),
        killers=("tests/contracts/test_host_waits.py",),
    ),
    Mutant(
        *("each-read-gathers-all-suspects", "dsgraph/partitioning/gathered_copies.py", "missing check"),
        *("GatheredCopies._needs_gather", "and is_read", ""),
        killers=("tests/contracts/test_eager_collectives.py",),
    ),
    Mutant(
        *("generator-given-to-the-random-op", "passes/ir/random_calls.py", "missing check"),
        *("random_call", 'if key != "rng_state"', ""),
        killers=("tests/contracts/test_graph_safe_generators.py",),
    ),
    Mutant(
        *("code-without-waits", "inductor_ext/compat.py", "missing step"),
        *("lower_as_wait", "ir._WaitKernel.create_wait(op, given)", "pass"),
        killers=("tests/contracts/test_inductor_order.py",),
    ),
    Mutant(
        *("messages-on-any-backend", "passes/zero/choose_collective_algorithms.py", "missing check"),
        *("_on_gloo", 'if axis.backend == "gloo"', ""),
        killers=("tests/contracts/test_lowered_for_nccl.py",),
    ),
    Mutant(
        *("fake-weights-of-counted-elements", "inductor_ext/quant/fake_quantize.py", "wait for the device"),
        *("reference", "rows.abs().amax(1, keepdim=True)", "rows[rows != 0].abs().amax()"),
        killers=("tests/contracts/test_lowered_for_nccl.py",),
    ),
)

MUTANTS = (
    *KERNELS,
    *SUBSTITUTION,
    *SPARSE,
    *ZERO,
    *OVERLAP,
    *SHARDING,
    *COLLECTIVES,
    *STEP,
    *BLOCKS,
    *STEP_GRAPH,
    *COMPILER,
    *OFFLOAD,
    *VERIFIER,
    *ENGINE,
    *MEMORY,
    *PARALLEL,
    *CONTRACTS,
)
