"""The mutants of `tests.mutants`: each breaks the product in one line, as a slip of the hand would."""

from __future__ import annotations

from dataclasses import dataclass

_KERNELS = "tests/inductor_ext/kernels"
_ZERO, _OVERLAP, _ANALYSIS = "tests/passes/zero", "tests/passes/overlap", "tests/passes/analysis"


@dataclass(frozen=True)
class Mutant:
    """One change of one line.

    Attributes:
        name: What is broken.
        file: Where, relative to the repository.
        kind: What sort of slip it is.
        before: The text that it replaces, which stands in the file once.
        after: What it puts there.
        killers: Test files that should notice; they are tried first.
    """

    name: str
    file: str
    kind: str
    before: str
    after: str
    killers: tuple[str, ...]


KERNELS = (
    Mutant(
        *("rms-norm-mean", "inductor_ext/kernels/rms_norm.py", "wrong scale"),
        *("h * (u * h).mean(-1, keepdim=True)", "h * (u * h).sum(-1, keepdim=True)"),
        killers=(f"{_KERNELS}/test_rms_norm.py",),
    ),
    Mutant(
        *("rms-norm-rounding", "inductor_ext/kernels/rms_norm.py", "missing cast"),
        *("y = (wide * rstd).to(norm_dtype)\n    if", "y = wide * rstd\n    if"),
        killers=(f"{_KERNELS}/test_rms_norm.py",),
    ),
    Mutant(
        *("rms-norm-triton-mean", "inductor_ext/kernels/rms_norm.py", "wrong scale"),
        *("rstd = tl.rsqrt(tl.sum(x * x, 0) / columns + eps)", "rstd = tl.rsqrt(tl.sum(x * x, 0) / BLOCK + eps)"),
        killers=(f"{_KERNELS}/test_add_rms_norm.py",),
    ),
    Mutant(
        *("layer-norm-centre", "inductor_ext/kernels/layer_norm.py", "missing term"),
        *("rstd * (u - u.mean(-1, keepdim=True) - h", "rstd * (u - h"),
        killers=(f"{_KERNELS}/test_layer_norm.py",),
    ),
    Mutant(
        *("rope-turns-back", "inductor_ext/kernels/rope.py", "wrong sign"),
        *("x1 * cos[0] - x2 * sin[0]", "x1 * cos[0] + x2 * sin[0]"),
        killers=(f"{_KERNELS}/test_rope.py",),
    ),
    Mutant(
        *("rope-backward-halves", "inductor_ext/kernels/rope.py", "swapped order"),
        *("else (-s2, -s1), interleaved)", "else (-s1, -s2), interleaved)"),
        killers=(f"{_KERNELS}/test_rope.py",),
    ),
    Mutant(
        *("swiglu-slope", "inductor_ext/kernels/swiglu.py", "wrong sign"),
        *(
            "s = torch.sigmoid(a)\n    dgate, dup = g * b * (s * (1 + a",
            "s = torch.sigmoid(a)\n    dgate, dup = g * b * (s * (1 - a",
        ),
        killers=(f"{_KERNELS}/test_swiglu.py",),
    ),
    Mutant(
        *("few-rows-scale", "inductor_ext/kernels/few_rows_linear.py", "missing term"),
        *("y = y if scale is None else y * scale\n", "y = y\n"),
        killers=(f"{_KERNELS}/test_few_rows_linear.py",),
    ),
    Mutant(
        *("few-rows-triton-tail", "inductor_ext/kernels/few_rows_linear.py", "off by one"),
        *("for start in range(0, k, BLOCK_K):", "for start in range(0, k - BLOCK_K + 1, BLOCK_K):"),
        killers=(f"{_KERNELS}/test_few_rows_linear.py",),
    ),
    Mutant(
        *("decode-attention-filled", "inductor_ext/kernels/decode_attention.py", "off by one"),
        *("torch.arange(1, mask.shape[-1] + 1,", "torch.arange(mask.shape[-1],"),
        killers=(f"{_KERNELS}/test_decode_attention.py",),
    ),
    Mutant(
        *("decode-attention-triton-heads", "inductor_ext/kernels/decode_attention.py", "wrong index"),
        *("keys_stride0 + (head // GROUP)", "keys_stride0 + (head % GROUP)"),
        killers=(f"{_KERNELS}/test_decode_attention.py",),
    ),
    Mutant(
        *("few-rows-cpp-tail", "inductor_ext/kernels/few_rows_cpp.py", "off by one"),
        *("for (; i < k; i += LANES) step", "for (; i + LANES <= k; i += LANES) step"),
        killers=(f"{_KERNELS}/test_few_rows_linear.py",),
    ),
    Mutant(
        *("few-rows-cpp-halves", "inductor_ext/kernels/few_rows_cpp.py", "wrong index"),
        *("sum[r][m] += other * high[m];", "sum[r][m] += other * low[m];"),
        killers=(f"{_KERNELS}/test_few_rows_groups.py",),
    ),
    Mutant(
        *("decode-attention-cpp-filled", "inductor_ext/kernels/decode_attention_cpp.py", "missing check"),
        *("!mask[(filled - 1) * mask_stride]", "false"),
        killers=(f"{_KERNELS}/test_decode_attention.py",),
    ),
    Mutant(
        *("softmax-dropout-scale", "inductor_ext/kernels/softmax_dropout.py", "wrong scale"),
        *("else 1 / (1 - p)", "else 1 - p"),
        killers=(f"{_KERNELS}/test_softmax_dropout.py",),
    ),
    Mutant(
        *("softmax-dropout-triton-sum", "inductor_ext/kernels/softmax_dropout.py", "missing term"),
        *("dx = z * (u - tl.sum(u * z, 0))", "dx = z * u"),
        killers=(f"{_KERNELS}/test_softmax_dropout.py",),
    ),
    Mutant(
        *("cross-entropy-ignored-rows", "inductor_ext/kernels/cross_entropy_rows.py", "missing mask"),
        *("(row_weights * terms.logit_scale).masked_fill_(ignored, 0)", "(row_weights * terms.logit_scale)"),
        killers=(f"{_KERNELS}/test_cross_entropy_rows.py",),
    ),
    Mutant(
        *("cross-entropy-last-chunk", "inductor_ext/kernels/linear_cross_entropy_chunks.py", "off by one"),
        *("slice(start, min(start + step, count))", "slice(start, min(start + step, count - 1))"),
        killers=(f"{_KERNELS}/test_linear_cross_entropy.py",),
    ),
)

SUBSTITUTION = (
    Mutant(
        *("kernel-over-a-write", "passes/kernels/capture_graph.py", "missing check"),
        *("if any(not storages.isdisjoint(_storages(item)) for item in written):", "if not written and storages:"),
        killers=("tests/passes/kernels/test_substitute_kernels.py",),
    ),
    Mutant(
        *("kernel-over-grad-mode", "passes/kernels/capture_graph.py", "missing check"),
        *("if node.target is set_grad_enabled:", "if node.target is None:"),
        killers=("tests/passes/kernels/test_substitute_kernels.py",),
    ),
)

SPARSE = (
    Mutant(
        *("sparse-shared-keys-forgotten", "inductor_ext/sparse/blocks.py", "unsummed gradient"),
        *("        if some.queries.start * k.shape[1] % q.shape[1] == 0:", "        if True:"),
        killers=("tests/inductor_ext/sparse/test_block_sparse_attention.py",),
    ),
    Mutant(
        *("sparse-last-block-whole", "inductor_ext/sparse/layouts.py", "missing mask"),
        *("            kept[:, self.block - over :] = False", "            pass"),
        killers=("tests/inductor_ext/sparse/test_block_sparse_attention.py",),
    ),
    Mutant(
        *("cross-attention-by-its-length", "passes/kernels/sparsify_attention.py", "missing check"),
        *("why_not_self(found.q, found.k, found.v) if reason is None else reason", "reason"),
        killers=("tests/passes/kernels/test_attention_sources.py",),
    ),
    Mutant(
        *("sparsify-forgets-the-mask", "passes/kernels/sparsify_attention.py", "missing mask"),
        *(
            "    if not terms:\n        return None\n    mask = terms[0]",
            "    if True:\n        return None\n    mask = terms[0]",
        ),
        killers=("tests/passes/kernels/test_sparsify_attention.py",),
    ),
)

ZERO = (
    Mutant(
        *("merge-over-grad-mode", "passes/zero/merge_gathers.py", "missing check"),
        *("repr(node.args), repr(node.kwargs), grad_mode)", "repr(node.args), repr(node.kwargs))"),
        killers=(f"{_ZERO}/test_merge_gathers.py",),
    ),
    Mutant(
        *("compress-what-is-read-whole", "passes/zero/compress_gathers.py", "missing check"),
        *("dtypes.pop() if len(dtypes) == 1 else None", "next((one for one in dtypes if one is not None), None)"),
        killers=(f"{_ZERO}/test_compress_gathers.py",),
    ),
    Mutant(
        *("small-bucket-slices", "passes/zero/bucket_small_reductions.py", "off by one shard"),
        *(
            "own = emit(last, aten.slice.Tensor, sums, 0, start, end)",
            "own = emit(last, aten.slice.Tensor, sums, 0, 0, end - start)",
        ),
        killers=(f"{_ZERO}/test_bucket_small_reductions.py",),
    ),
    Mutant(
        *("small-bucket-bound", "passes/zero/bucket_small_reductions.py", "missing bound"),
        *("> self.bucket_bytes:", "> 2 * self.bucket_bytes:"),
        killers=(f"{_ZERO}/test_bucket_small_reductions.py",),
    ),
    Mutant(
        *("keep-first-gather", "passes/zero/keep_last_gather.py", "swapped order"),
        *("wait_of(gathers[-1])", "wait_of(gathers[0])"),
        killers=(f"{_ZERO}/test_keep_last_gather.py",),
    ),
    Mutant(
        *("await-behind-first-use", "passes/zero/await_copies.py", "dropped wait"),
        *("wait = emit(min(gathered_copy.users)", "wait = emit(max(gathered_copy.users)"),
        killers=(f"{_ZERO}/test_await_copies.py", "tests/distributed/test_copies.py"),
    ),
)

OVERLAP = (
    Mutant(
        *("bucket-over-its-bound", "passes/overlap/buckets.py", "missing bound"),
        *(
            "sum(one.bytes for one in together) > limits.bucket_bytes",
            "sum(one.bytes for one in bucket) > limits.bucket_bytes",
        ),
        killers=(f"{_OVERLAP}/test_bucket_gathers.py", f"{_OVERLAP}/test_bucket_reductions.py"),
    ),
    Mutant(
        *("bucket-of-unlike-members", "passes/overlap/buckets.py", "missing check"),
        *("if member.alike != bucket[0].alike or sum", "if sum"),
        killers=(f"{_OVERLAP}/test_bucket_gathers.py", f"{_OVERLAP}/test_bucket_reductions.py"),
    ),
    Mutant(
        *("delay-over-a-barrier", "passes/overlap/delay_reduction_waits.py", "missing check"),
        *("place = barrier_between(nodes[0], place) or place", "place = place or barrier_between(nodes[0], place)"),
        killers=(f"{_OVERLAP}/test_delay_reduction_waits.py",),
    ),
    Mutant(
        *("delay-without-bound", "passes/overlap/delay_reduction_waits.py", "missing bound"),
        *("if total > most:", "if total > 2 * most:"),
        killers=(f"{_OVERLAP}/test_delay_reduction_waits.py",),
    ),
    Mutant(
        *("prefetch-over-a-barrier", "passes/overlap/prefetch_gathers.py", "missing check"),
        *("if not nodes or barrier_between(place, nodes[-1]) is not None:", "if not nodes:"),
        killers=(f"{_OVERLAP}/test_prefetch_gathers.py",),
    ),
    Mutant(
        *("prefetch-without-bound", "passes/overlap/prefetch_gathers.py", "missing bound"),
        *("sum(self._bytes[self._oldest : number + 1])", "sum(self._bytes[self._oldest : number])"),
        killers=(f"{_OVERLAP}/test_prefetch_gathers.py",),
    ),
)

SHARDING = (
    Mutant(
        *("materialize-own-seed", "dsgraph/partitioning/initialization/materialize.py", "ranks differ"),
        *("broadcast_from_first(shared, mesh)", "pass"),
        killers=("tests/partitioning/initialization/test_materialize.py",),
    ),
    Mutant(
        *("chunks-of-other-rank", "dsgraph/partitioning/rows.py", "off by one shard"),
        *("chunks[rank] if rank < len(chunks)", "chunks[rank - 1] if rank < len(chunks)"),
        killers=("tests/partitioning/test_partition.py", "tests/distributed/test_stages.py"),
    ),
    Mutant(
        *("inputs-stay-wide", "dsgraph/partitioning/forward_inputs.py", "missing cast"),
        *("return cast((args, kwargs), dtype)", "return args, kwargs"),
        killers=("tests/partitioning/test_forward_inputs.py::test_inputs_are_cast_as_by_fsdp2",),
    ),
    Mutant(
        *("frozen-sums-are-lost", "dsgraph/partitioning/accumulation/accumulated_gradients.py", "unsummed gradient"),
        *("entry.param.requires_grad or entry.was_trained", "entry.param.requires_grad"),
        killers=("tests/distributed/test_accumulate.py::test_requires_grad_is_switched_between_micro_batches",),
    ),
    Mutant(
        *("closed-file-stays", "dsgraph/offload/slots.py", "missing step"),
        *("    threads.shutdown(wait=False)\n    folder.remove()", "    threads.shutdown(wait=False)"),
        killers=("tests/engine/optimizers/test_offloading.py::test_engines_leave_no_files_and_threads",),
    ),
    Mutant(
        *("hints-over-digits", "dsgraph/utils/nearest.py", "missing check"),
        *("for name in names if _digits(name) == _digits(found)}", "for name in names}"),
        killers=("tests/utils/test_nearest.py::test_a_hint_is_right_or_absent",),
    ),
    Mutant(
        *("own-errors-are-wrapped", "dsgraph/compiler/backend.py", "missing check"),
        *('return type(error).__module__.split(".")[0] == "dsgraph"', "return False"),
        killers=("tests/compiler/test_options.py::test_wrong_options_stop_torch_compile",),
    ),
    Mutant(
        *("half-a-partition-stays", "dsgraph/partitioning/restore.py", "missing step"),
        *("module._parameters.update(self._parameters)", "pass"),
        killers=("tests/partitioning/test_partition.py::test_a_failure_at_the_last_module_leaves_the_model_as_it_was",),
    ),
    Mutant(
        *("partition-own-values", "dsgraph/partitioning/partition.py", "ranks differ"),
        *(
            "            full = full.clone()\n        broadcast_from_first(full, mesh)\n",
            "            full = full.clone()\n",
        ),
        killers=("tests/distributed/test_stages.py",),
    ),
    Mutant(
        *("agreement-with-itself", "dsgraph/ranks/agreement.py", "missing check"),
        *("if digests[rank] != digests[known[0]]:", "if digests[rank] != digests[rank]:"),
        killers=("tests/distributed/test_agreement.py",),
    ),
    Mutant(
        *("eager-ranks-part-unseen", "dsgraph/ranks/eager_agreement.py", "missing check"),
        *("elif notes.own.differs_at(note):", "elif note.intent != note.intent:"),
        killers=("tests/distributed/test_eager_agreement.py",),
    ),
    Mutant(
        *("runs-compared-without-names", "dsgraph/ranks/rank_notes.py", "missing check"),
        *("Intent(does, digest=_digest(parameters), parameters", 'Intent(does, digest="", parameters'),
        killers=("tests/distributed/test_compiled_runs.py",),
    ),
    Mutant(
        *("optimizer-steps-alone", "dsgraph/partitioning/guards.py", "missing check"),
        *('living.agree(f"steps {type(optimizer).__name__}")', "pass"),
        killers=("tests/distributed/test_compiled_runs.py",),
    ),
    Mutant(
        *("norms-uncompared", "dsgraph/partitioning/rules.py", "missing check"),
        *("            if agreement.patience:", "            if not agreement.patience:"),
        killers=("tests/distributed/test_compiled_runs.py::test_a_rank_that_clips_gradients_while_another_goes_on",),
    ),
    Mutant(
        *("forward-after-a-step-runs-ahead", "dsgraph/ranks/eager_agreement.py", "missing check"),
        *("_BETWEEN if between else max(", "_FORWARD if between else max("),
        killers=("tests/distributed/test_compiled_runs.py::test_a_rank_that_evaluates_after_a_step",),
    ),
    Mutant(
        *("placeholder-takes-writes", "dsgraph/partitioning/accumulation/gradient_placeholder.py", "missing check"),
        *("schema_of(func).is_mutable and str(func) not in _ZEROING", "False"),
        killers=("tests/distributed/test_hooks.py",),
    ),
    Mutant(
        *("heads-of-one-rank-alone", "dsgraph/partitioning/accumulation/accumulated_gradients.py", "missing step"),
        *("        if not is_used:", "        if taken[entry] is None:"),
        killers=("tests/distributed/test_compiled_runs.py::test_ranks_train_different_heads_at_stages_0_and_1",),
    ),
    Mutant(
        *("backward-runs-uncompared", "dsgraph/compiler/runs.py", "missing check"),
        *("if agreement.patience:", "if not agreement.patience:"),
        killers=("tests/distributed/test_compiled_runs.py",),
    ),
    Mutant(
        *("reduce-dtype-of-the-master", "dsgraph/partitioning/layout.py", "missing cast"),
        *("return compute, self.reduce_dtype or compute", "return compute, compute"),
        killers=("tests/partitioning/test_layout.py",),
    ),
    Mutant(
        *("gradient-sent-nowhere", "dsgraph/partitioning/seam.py", "unsummed gradient"),
        *(
            "return layout.reduce(grad, shard.detach())",
            "return grad.narrow(0, 0, len(shard))",
        ),
        killers=("tests/distributed/test_stages.py", "tests/distributed/test_modules.py"),
    ),
)

COLLECTIVES = (
    Mutant(
        *("average-over-a-part", "inductor_ext/collectives/algorithms.py", "wrong scale"),
        *("math.prod(each.size for each in (ranks, *outer))", "math.prod(each.size for each in (ranks, *outer[1:]))"),
        killers=("tests/distributed/test_stages.py",),
    ),
    Mutant(
        *("gradient-of-one-rank", "inductor_ext/collectives/algorithms.py", "unsummed gradient"),
        *("return by_rank.sum(0, dtype=received.dtype)", "return by_rank[0]"),
        killers=("tests/distributed/test_stages.py",),
    ),
    Mutant(
        *("reduction-uncast", "inductor_ext/collectives/algorithms.py", "missing cast"),
        *("summed = grad.to(reduce_dtype)", "summed = grad"),
        killers=("tests/distributed/test_mixed_precision.py", "tests/passes/zero/test_insert_zero_collectives.py"),
    ),
    Mutant(
        *("chunks-of-one-row-more", "inductor_ext/collectives/algorithms.py", "off by one shard"),
        *("return -(-rows // world)", "return rows // world + 1"),
        killers=("tests/distributed/test_stages.py", "tests/passes/zero/test_insert_zero_collectives.py"),
    ),
    Mutant(
        *("padding-stays", "inductor_ext/collectives/algorithms.py", "off by one shard"),
        *(
            "return tensor if tensor.shape[0] == rows else tensor[:rows]",
            "return tensor if tensor.shape[0] == rows else tensor[-rows:]",
        ),
        killers=("tests/distributed/test_stages.py", "tests/passes/zero/test_insert_zero_collectives.py"),
    ),
    Mutant(
        *("all-reduce-at-half-price", "passes/ir/collectives.py", "wrong scale"),
        *("shares=lambda n: 2 * (n - 1),\n        steps", "shares=lambda n: n - 1,\n        steps"),
        killers=("tests/passes/analysis/test_cost.py", "tests/passes/ir"),
    ),
    Mutant(
        *("messages-read-early", "inductor_ext/collectives/messages.py", "dropped wait"),
        *("            register_work(tensor.result, work)\n", ""),
        killers=("tests/inductor_ext/collectives",),
    ),
)

STEP = (
    Mutant(
        *("write-without-a-trace-unseen", "dsgraph/partitioning/state.py", "stale gathered copy"),
        *("if not were_written(fresh):", "if fresh:"),
        killers=("tests/distributed/test_copies.py",),
    ),
    Mutant(
        *("suspect-copy-is-trusted", "dsgraph/partitioning/state.py", "stale gathered copy"),
        *("if entry.observe() is not Freshness.FRESH]", "if entry.observe() is Freshness.STALE]"),
        killers=("tests/distributed/test_modules.py",),
    ),
    Mutant(
        *("stale-after-a-write", "dsgraph/partitioning/parameter.py", "stale gathered copy"),
        *(
            "param is not self._gathered_from or compat.version_of(param) != self._gathered_version",
            "param is not self._gathered_from",
        ),
        killers=("tests/distributed/test_copies.py",),
    ),
    Mutant(
        *("eager-read-without-wait", "dsgraph/partitioning/state.py", "dropped wait"),
        *("if self.under_way:\n            with", "if not self.under_way:\n            with"),
        killers=("tests/distributed/test_copies.py",),
    ),
    Mutant(
        *("last-micro-batch-alone", "dsgraph/partitioning/accumulation/accumulated_gradients.py", "unsummed gradient"),
        *("entry.accumulated_grad.add_(grad)", "entry.accumulated_grad.copy_(grad)"),
        killers=("tests/distributed/test_accumulate.py",),
    ),
    Mutant(
        *("hooks-of-late-gradients", "dsgraph/partitioning/accumulation/reductions.py", "missing step"),
        *(
            "            _Deliver.apply(reduced, *params).backward()",
            "            out = _Deliver.apply(reduced, *params)\n"
            "        for param, grad in zip(params, torch.autograd.grad(out, params), strict=True):\n"
            "            param.grad = grad if param.grad is None else param.grad + grad",
        ),
        killers=("tests/distributed/test_hooks.py",),
    ),
    Mutant(
        *("sums-outlive-zero-grad", "dsgraph/partitioning/accumulation/watched_graphs.py", "missing check"),
        *("            drop_if_zeroed(entry)\n", ""),
        killers=("tests/distributed/test_hooks.py",),
    ),
    Mutant(
        *("zeros-are-not-seen", "dsgraph/partitioning/accumulation/gradient_placeholder.py", "missing check"),
        *("return GradState.ZEROS\n", "return GradState.UNTOUCHED\n"),
        killers=("tests/distributed/test_hooks.py",),
    ),
    Mutant(
        *("scalar-state-stays-plain", "dsgraph/partitioning/guards.py", "missing step"),
        *("        _complete_scalar_states(optimizer, living)\n", ""),
        killers=("tests/distributed/test_saving.py",),
    ),
    Mutant(
        *("half-a-model-is-pickled", "dsgraph/partitioning/state_dict/saved_rows.py", "missing check"),
        *("    if here == (rank, world):", "    if here is not None:"),
        killers=("tests/distributed/test_saving.py",),
    ),
    Mutant(
        *("branch-gathers-inside", "dsgraph/compat.py", "missing step"),
        *("    if outer is not None:\n        output.tracers.append(outer)", "    outer = None"),
        killers=("tests/distributed/test_control_flow.py",),
    ),
    Mutant(
        *("checkpoint-sees-waits", "dsgraph/partitioning/seam.py", "missing step"),
        *("with nullcontext() if fetches else compat.outside_selective_checkpoints():", "with nullcontext():"),
        killers=("tests/distributed/test_control_flow.py",),
    ),
    Mutant(
        *("ranks-end-apart", "dsgraph/partitioning/state_dict/pretrained.py", "missing step"),
        *('call.arguments["synced_gpus"] = True', 'call.arguments["synced_gpus"] = False'),
        killers=("tests/distributed/test_generate.py",),
    ),
    Mutant(
        *("sum-in-low-precision", "dsgraph/partitioning/accumulation/accumulated_gradients.py", "missing cast"),
        *("grad = leaf.grad.to(entry.param.dtype)", "grad = leaf.grad"),
        killers=("tests/distributed/test_accumulate.py", "tests/distributed/test_mixed_precision.py"),
    ),
    Mutant(
        *("sum-added-by-two-graphs", "dsgraph/partitioning/accumulation/watched_graphs.py", "summed twice"),
        *("                empty_sum(total)\n                entry.is_summed = False", "                pass"),
        killers=("tests/distributed/test_last_micro_batch.py",),
    ),
    Mutant(
        *("sum-lost-to-another-gradient", "dsgraph/partitioning/accumulation/watched_graphs.py", "missing check"),
        *("if entry.is_summed and not compat.accumulates(", "if entry.is_summed and False and not compat.accumulates("),
        killers=("tests/distributed/test_last_micro_batch.py",),
    ),
    Mutant(
        *("idle-rank-leaves", "dsgraph/partitioning/accumulation/accumulated_gradients.py", "missing check"),
        *(
            "    if stepped and state.phase is StepPhase.LAST:\n        reduce_accumulated(state)",
            "    pass",
        ),
        killers=("tests/distributed/test_idle_rank.py",),
    ),
    Mutant(
        *("gathers-old-rows", "dsgraph/partitioning/gathered_copies.py", "stale gathered copy"),
        *("own[: shard.shape[0]].copy_(shard)", "own[: shard.shape[0]].add_(0)"),
        killers=("tests/distributed/test_modules.py",),
    ),
)

OFFLOAD = (
    Mutant(
        *("masters-of-each-step", "dsgraph/optim/host_optimizer.py", "missing step"),
        *("return param.dtype in _LOW", "return False"),
        killers=("tests/optim/test_host_optimizer.py",),
    ),
    Mutant(
        *("master-over-what-was-written", "dsgraph/optim/host_optimizer.py", "missing check"),
        *("elif known.versions != versions_of(param):", "elif False:"),
        killers=("tests/optim/test_host_optimizer.py",),
    ),
    Mutant(
        *("late-update-is-lost", "dsgraph/optim/delayed.py", "missing step"),
        *("            own_part(param).detach().copy_(known.value)\n", ""),
        killers=("tests/optim/test_host_optimizer.py",),
    ),
    Mutant(
        *("plain-optimizer-steps-on-offloaded", "dsgraph/partitioning/guards.py", "missing check"),
        *('if tier and getattr(optimizer, "tier", None) != tier:', "if False:"),
        killers=("tests/distributed/test_offload_optimizer.py",),
    ),
    Mutant(
        *("host-without-masters", "dsgraph/offload/sizes.py", "missing term"),
        *("for param in there) + masters + travelling", "for param in there) + travelling"),
        killers=("tests/optim/test_plan_offload.py",),
    ),
    Mutant(
        *("disk-behind-the-network", "dsgraph/tools/cli/inspect/timeline.py", "swapped order"),
        *("return node.transfer.tier if node.transfer is not None else None", 'return "" if node.transfer else None'),
        killers=("tests/tools/cli/test_transfers.py",),
    ),
    Mutant(
        *("plan-without-buffers", "dsgraph/offload/sizes.py", "missing term"),
        *("return self._held(split) + self.buffers(split)", "return self._held(split)"),
        killers=("tests/optim/test_plan_offload.py",),
    ),
    Mutant(
        *("one-chunk-in-a-step", "dsgraph/offload/chunk_sizes.py", "off by one"),
        *("sum(sizes[at : at + 2])", "sum(sizes[at : at + 1])"),
        killers=("tests/offload/test_predicted_memory.py",),
    ),
    Mutant(
        *("prediction-by-bytes", "dsgraph/compiler/capture.py", "missing step"),
        *('"state_share": state_share(state)', '"state_share": state.arguments.offload.optimizer_ratio'),
        killers=("tests/offload/test_predicted_memory.py",),
    ),
    Mutant(
        *("read-ahead-as-ever", "dsgraph/compiler/pipeline.py", "missing check"),
        *('{} if options.read_ahead_bytes is None else {"ahead_bytes": options.read_ahead_bytes}', "{}"),
        killers=("tests/compiler/test_pipeline.py",),
    ),
    Mutant(
        *("state-on-disk-counts-in-memory", "passes/analysis/states.py", "missing term"),
        *("* info.requires_grad - state_bytes_below(info, tensors)", "* info.requires_grad"),
        killers=("tests/passes/analysis/test_budget.py",),
    ),
    Mutant(
        *("reads-ahead-take-no-memory", "passes/analysis/transfer_buffers.py", "missing term"),
        *("reading += _bytes(moved_tensor(node))", "reading += 0"),
        killers=("tests/passes/analysis/test_transfer_buffers.py",),
    ),
    Mutant(
        *("share-and-one-more", "dsgraph/offload/slots.py", "off by one"),
        *("start < ratio * before[-1]", "start <= ratio * before[-1]"),
        killers=("tests/distributed/test_parameters_on_disk.py",),
    ),
    Mutant(
        *("state-of-first-step-alone", "dsgraph/optim/stored_state.py", "missing step"),
        *("                view.copy_(value)\n", "                pass\n"),
        killers=("tests/optim/test_disk_optimizer.py",),
    ),
    Mutant(
        *("chunks-in-one-place", "dsgraph/offload/slots.py", "off by one"),
        *("os.pwritev, at=self._offsets[slot])", "os.pwritev, at=self._offsets[0])"),
        killers=("tests/optim/test_disk_optimizer.py",),
    ),
    Mutant(
        *("stored-gradient-of-the-last-micro-batch", "dsgraph/offload/stored_rows.py", "missing step"),
        *("                view.add_(view_in(earlier, grad))\n", "                pass\n"),
        killers=("tests/distributed/test_parameters_on_disk.py",),
    ),
    Mutant(
        *("update-of-stored-rows-is-lost", "dsgraph/offload/read_rows.py", "missing step"),
        *(
            "        return self._stored.write_buffer(self._rows.result())\n",
            "        return self._stored.write_rows(self._stored.rows)\n",
        ),
        killers=("tests/distributed/test_parameters_on_disk.py",),
    ),
    Mutant(
        *("update-ahead-of-the-second-gradient", "dsgraph/offload/stored_rows.py", "missing check"),
        *("self.when_arrived is not None and self._reads == 1", "self.when_arrived is not None"),
        killers=("tests/optim/test_beside_backward.py",),
    ),
    Mutant(
        *("changed-gradient-goes-unseen", "dsgraph/offload/stored_rows.py", "missing check"),
        *(" and compat.version_of(grad) == self._given", ""),
        killers=("tests/optim/test_beside_backward.py",),
    ),
    Mutant(
        *("checksum-of-nothing", "dsgraph/offload/slots.py", "missing check"),
        *("self._sums[slot] != crc32(buffer.view())", "self._sums[slot] != self._sums[slot]"),
        killers=("tests/optim/test_disk_optimizer.py",),
    ),
    Mutant(
        *("state-set-over-that-of-others", "dsgraph/optim/stored_state.py", "missing step"),
        *("        buffer = self._file.read(number).result()\n", "        buffer = self._file.take(number)\n"),
        killers=("tests/optim/test_disk_optimizer.py",),
    ),
    Mutant(
        *("saved-pages-are-kept", "dsgraph/checkpoint/disk_planners.py", "missing step"),
        *("            last.madvise(mmap.MADV_DONTNEED)\n", "            pass\n"),
        killers=("tests/engine/optimizers/test_offloading.py",),
    ),
    Mutant(
        *("loaded-over-its-neighbours", "dsgraph/offload/slots.py", "missing step"),
        *("        if begin or buffer.size != data.nbytes:", "        if False:"),
        killers=("tests/distributed/test_loading_to_disk.py",),
    ),
    Mutant(
        *("half-a-checkpoint-is-trained-with", "dsgraph/checkpoint/disk_planners.py", "missing check"),
        *("                rows.held_for = _HALF\n", "                pass\n"),
        killers=("tests/engine/optimizers/test_offloading.py",),
    ),
    Mutant(
        *("update-at-the-first-gradient", "dsgraph/optim/beside_backward.py", "missing check"),
        *("        if self._waits_for[number]:\n", "        if self._waits_for[number] < 0:\n"),
        killers=("tests/optim/test_beside_backward.py",),
    ),
    Mutant(
        *("step-beside-every-micro-batch", "dsgraph/engine/optimizers/step_moment.py", "missing check"),
        *("if not is_last or needs_all_gradients(settings):", "if needs_all_gradients(settings):"),
        killers=("tests/engine/optimizers/test_offloading.py",),
    ),
    Mutant(
        *("gradient-stored-ahead-of-the-read", "passes/memory/stream_parameters.py", "missing step"),
        *("                    read.append(store)\n", "                    pass\n"),
        killers=("tests/passes/memory/test_stream_parameters.py",),
    ),
    Mutant(
        *("every-parameter-read-at-the-start", "passes/memory/stream_parameters.py", "wrong bound"),
        *("    while first > 0 and sum(", "    while first > 0 and 0 * sum("),
        killers=("tests/passes/memory/test_stream_parameters.py",),
    ),
)

COMPILER = (
    Mutant(
        *("region-hands-on-its-arguments", "passes/runner/partitioner.py", "missing step"),
        *("        read_arguments_outside(gm)\n", ""),
        killers=("tests/distributed/test_captured_regions.py",),
    ),
    Mutant(
        *("sliced-loss-in-16-bits", "inductor_ext/collectives/vocabulary.py", "missing step"),
        *("    own = own.to(wide)\n", ""),
        killers=("tests/distributed/test_tensor_parallel.py",),
    ),
    Mutant(
        *("regions-without-our-partitioner", "dsgraph/compiler/codegen.py", "missing check"),
        *(" and not any(region_calls(gm)):", ":"),
        killers=("tests/distributed/test_regions.py",),
    ),
    Mutant(
        *("region-hands-on-views", "passes/regions/saved_arguments.py", "missing check"),
        *("None not in aliased_arguments(node):", "node is None:"),
        killers=("tests/passes/regions/test_saved_arguments.py",),
    ),
    Mutant(
        *("region-keeps-its-markers", "passes/regions/captured.py", "missing step"),
        *("        _hoist(gm, body, sites)\n", ""),
        killers=("tests/passes/regions/test_captured.py",),
    ),
    Mutant(
        *("sum-added-where-the-shard-is-read", "dsgraph/compiler/captured_sums.py", "missing check"),
        *(
            "if not all(map(is_gather_marker, markers)):\n            return []",
            "if not all(map(is_gather_marker, markers)):\n            continue",
        ),
        killers=("tests/distributed/test_last_micro_batch.py",),
    ),
    Mutant(
        *("spare-without-activations", "dsgraph/compiler/memory_limit/spare_memory.py", "missing term"),
        *("saved.total + _GRADIENTS_ALIVE * saved.largest", "_GRADIENTS_ALIVE * saved.largest"),
        killers=("tests/compiler/memory_limit/test_spare_memory.py",),
    ),
    Mutant(
        *("sum-written-twice", "passes/ir/accumulated_grads.py", "summed twice"),
        *("if total not in added:", "if total is not added:"),
        killers=("tests/passes/ir/test_accumulated_grads.py",),
    ),
    Mutant(
        *("budget-forgets-takers", "passes/analysis/budget.py", "missing term"),
        *("max(0, self.to_keep - self.taken(MemoryPart.GATHERED_COPIES))", "max(0, self.to_keep)"),
        killers=("tests/passes/analysis", "tests/passes/zero/test_selective_gather.py"),
    ),
    Mutant(
        *("knapsack-over-its-room", "passes/analysis/knapsack.py", "missing bound"),
        *("sizes[number] <= left", "sizes[number] <= room"),
        killers=("tests/passes/analysis/test_knapsack.py",),
    ),
    Mutant(
        *("plan-turned-round", "passes/ir/save_plan.py", "swapped order"),
        *("node.meta[_KEY] = _POLICIES[choice]", "node.meta[_KEY] = CheckpointPolicy.MUST_SAVE"),
        killers=("tests/passes/ir", "tests/passes/zero/test_insert_zero_collectives.py"),
    ),
    Mutant(
        *("pair-of-unlike-values", "passes/verify/pair.py", "missing check"),
        *("if not is_like(was, now):", "if not is_like(was, was):"),
        killers=("tests/passes/core/test_graph_pair.py",),
    ),
    Mutant(
        *("pair-values-swapped", "passes/verify/pair.py", "missing check"),
        *("if ours != theirs:\n                raise", "if ours is None:\n                raise"),
        killers=("tests/passes/core/test_graph_pair.py",),
    ),
)

VERIFIER = (
    Mutant(
        *("verifier-of-waits", "passes/verify/collectives.py", "missing check"),
        *("if waits != 1 or len(result.users) != 1:", "if waits > 1:"),
        killers=("tests/passes/verify/test_verifier.py",),
    ),
    Mutant(
        *("verifier-of-barriers", "passes/verify/memory.py", "missing check"),
        *(
            "    if crossed is not None:\n        node, barrier = crossed",
            "    if crossed is None and before.ordered is None:\n        node, barrier = crossed",
        ),
        killers=("tests/passes/verify/test_verifier.py",),
    ),
    Mutant(
        *("verifier-of-writes", "passes/verify/memory.py", "missing check"),
        *("if len(was) == len(now):", "if len(was) >= len(now):"),
        killers=("tests/passes/verify/test_verifier.py",),
    ),
)

ENGINE = (
    Mutant(
        *("errors-not-propagated", "dsgraph/inference/quantization/calibrate.py", "missing term"),
        *("        weight[:, end:] -= left.errors @ factor[start:end, end:]\n", ""),
        killers=("tests/inference/quantization/test_calibrate.py",),
    ),
    Mutant(
        *("period-does-not-double", "dsgraph/engine/techniques/quantize_training.py", "wrong scale"),
        *("period = 2 * now.period", "period = 1 * now.period"),
        killers=("tests/engine/techniques/test_quantize_training.py::test_training_is_that_of_one_process",),
    ),
    Mutant(
        *("clamp-that-inductor-decomposes", "inductor_ext/quant/fake_quantize.py", "missing step"),
        *("torch.minimum(torch.maximum(numbers, lowest), levels)", "numbers.clamp(lowest, levels)"),
        killers=("tests/passes/zero/test_lower_fake_weights.py",),
    ),
    Mutant(
        *("eigenvalue-of-one-side", "dsgraph/engine/techniques/eigenvalues.py", "wrong scale"),
        *("product = [(a - b) / (2 * step)", "product = [(a - b) / step"),
        killers=("tests/engine/techniques/test_quantize_training.py::test_the_eigenvalue_of_a_known_hessian",),
    ),
    Mutant(
        *("rounded-weight-is-kept", "passes/zero/lower_fake_weights.py", "missing step"),
        *("        recompute_with_users(made)\n", ""),
        killers=("tests/passes/zero/test_lower_fake_weights.py::test_the_op_is_written_out_and_computed_again",),
    ),
    Mutant(
        *("signs-upside-down", "inductor_ext/quant/signs.py", "swapped order"),
        *("signs = 1 - 2 * ((byte >> torch.arange(8", "signs = 1 - 2 * ((byte << torch.arange(8"),
        killers=("tests/inductor_ext/quant/test_signs.py",),
    ),
    Mutant(
        *("errors-not-fed-back", "inductor_ext/collectives/compressed_reduction.py", "missing term"),
        *("        block.add_(worker_error[start:end])\n", ""),
        killers=("tests/inductor_ext/collectives/test_compressed_reduction.py",),
    ),
    Mutant(
        *("owner-forgets-its-error", "inductor_ext/collectives/compressed_reduction.py", "missing term"),
        *("        block.add_(owner_error[start:end])\n", ""),
        killers=("tests/inductor_ext/collectives/test_compressed_reduction.py",),
    ),
    Mutant(
        *("errors-not-fed-back-in-cpp", "inductor_ext/quant/signs_cpp.py", "missing term"),
        *("return (kept + taken) + load(e + i, some);", "return kept + taken;"),
        killers=("tests/inductor_ext/collectives/test_compressed_reduction.py",),
    ),
    Mutant(
        *("squares-of-the-first-block-in-cpp", "inductor_ext/quant/signs_cpp.py", "missing term"),
        *("for (double each : sums) sum += each;", "sum = sums[0];"),
        killers=("tests/inductor_ext/collectives/test_compressed_reduction.py",),
    ),
    Mutant(
        *("lamb-compares-biased-variances", "dsgraph/optim/one_bit.py", "wrong scale"),
        *('factor * (bias / float(state["bias"])) * share', "factor * share"),
        killers=("tests/optim/test_one_bit.py::test_equals_the_papers_equations",),
    ),
    Mutant(
        *("momentum-takes-in-one-of-two-gradients", "passes/zero/compress_reductions.py", "missing term"),
        *("total = emit(last, aten.add.Tensor, cast(last, total, dtype), cast(last, grad, dtype))", "total = grad"),
        killers=("tests/passes/zero/test_compress_reductions.py",),
    ),
    Mutant(
        *("skipped-step-keeps-new-errors", "dsgraph/optim/compressed_optimizer.py", "missing step"),
        *("            compression.drop()\n", "            compression.take_over()\n"),
        killers=("tests/optim/test_one_bit.py::test_a_skipped_step_leaves_momentum_and_errors",),
    ),
    Mutant(
        *("variance-frozen-with-its-bias", "dsgraph/optim/one_bit.py", "wrong scale"),
        *('variance.div_(1 - group["betas"][1] ** int(state["step"]))', "variance.div_(1.0)"),
        killers=("tests/optim/test_one_bit.py::test_equals_the_papers_equations",),
    ),
    Mutant(
        *("norm-of-the-warm-up-goes-on", "dsgraph/engine/engine.py", "missing step"),
        *("            self._norm = None\n", ""),
        killers=("tests/optim/test_one_bit.py::test_behind_the_warm_up_there_is_no_norm_of_gradients",),
    ),
    Mutant(
        *("second-gradient-into-a-momentum", "dsgraph/partitioning/transforms/compression.py", "missing check"),
        *("if self._arrivals > 1:", "if self._arrivals > 9:"),
        killers=("tests/optim/test_one_bit.py::test_a_momentum_takes_in_one_gradient_a_step",),
    ),
    Mutant(
        *("layers-dropped-alike-at-any-depth", "dsgraph/engine/techniques/layer_drop.py", "wrong scale"),
        *("block.keep = 1 - block.depth * (1 - self._theta)", "block.keep = self._theta"),
        killers=("tests/engine/techniques/test_layer_drop.py::test_training_is_that_of_the_papers_equations",),
    ),
    Mutant(
        *("kept-layers-unscaled", "dsgraph/engine/techniques/layer_drop.py", "wrong scale"),
        *("torch.tensor(1 / self.keep if trains else 1.0,", "torch.tensor(1.0,"),
        killers=("tests/engine/techniques/test_layer_drop.py::test_training_is_that_of_the_papers_equations",),
    ),
    Mutant(
        *("layers-share-compiled-code", "dsgraph/engine/techniques/layer_drop.py", "missing step"),
        *('run.__code__.replace(co_name=f"run {name}")', "run.__code__"),
        killers=(
            "tests/engine/techniques/test_layer_drop.py::test_each_block_is_compiled_once_and_what_is_left_out_has_no_gradient",
        ),
    ),
    Mutant(
        *("engine-clips-by-shards", "dsgraph/engine/norms.py", "unsummed norm"),
        *("total = sum_over(total, [Ranks.of(group) for group in groups])", "total = total"),
        killers=("tests/engine/test_engine.py",),
    ),
    Mutant(
        *("engine-counts-replicated-twice", "dsgraph/engine/norms.py", "wrong scale"),
        *("total + _square(replicated, device)", "total + 2 * _square(replicated, device)"),
        killers=("tests/engine/test_engine.py",),
    ),
    Mutant(
        *("engine-sums-micro-batches", "dsgraph/engine/engine.py", "wrong scale"),
        *("share = loss / self.gradient_accumulation_steps()", "share = loss / 1"),
        killers=("tests/engine/test_engine.py",),
    ),
    Mutant(
        *("engine-keeps-the-scale", "dsgraph/engine/norms.py", "wrong scale"),
        *("factor = 1 / scale", "factor = 1.0"),
        killers=("tests/engine/test_engine.py",),
    ),
    Mutant(
        *("schedule-steps-when-skipped", "dsgraph/engine/engine.py", "missing check"),
        *("if is_finite and self.lr_scheduler is not None:", "if self.lr_scheduler is not None:"),
        killers=("tests/engine/test_engine.py",),
    ),
    Mutant(
        *("lamb-by-shards", "dsgraph/optim/lamb.py", "unsummed norm"),
        *("        dist.all_reduce(together, group=group)\n", ""),
        killers=("tests/engine/test_engine.py",),
    ),
    Mutant(
        *("owner-takes-its-rows-alone", "dsgraph/optim/full_matrix.py", "off-by-one shard"),
        *("return tensor[rank * each : rank * each + share.rows_of(rank)]", "return tensor[: share.rows_of(rank)]"),
        killers=("tests/optim/test_full_matrix.py",),
    ),
    Mutant(
        *("loader-forgets-its-place", "dsgraph/engine/data.py", "off-by-one shard"),
        *("        left = order[self.drawn :]", "        left = order"),
        killers=("tests/engine/test_data.py",),
    ),
    Mutant(
        *("host-name-by-its-beginning", "dsgraph/launch/hosts.py", "missing check"),
        *("    if _NAME.fullmatch(name) is None:", "    if _NAME.match(name) is None:"),
        killers=("tests/launch/test_hosts.py",),
    ),
    Mutant(
        *("ssh-takes-a-shell-line", "dsgraph/launch/commands.py", "missing check"),
        *(
            "there = shlex.join(_with_variables(variables, command))",
            'there = " ".join(_with_variables(variables, command))',
        ),
        killers=("tests/launch/test_hosts.py",),
    ),
    Mutant(
        *("flops-of-the-wrong-way", "dsgraph/compiler/module_flops.py", "swapped order"),
        *("self.found.backward[owner] += operations", "self.found.forward[owner] += operations"),
        killers=("tests/engine/monitoring/test_step_logger.py",),
    ),
    Mutant(
        *("shows-the-last-loss", "dsgraph/engine/monitoring/step_logger.py", "unsummed gradient"),
        *("self._loss = share if self._loss is None else self._loss + share", "self._loss = share"),
        killers=("tests/engine/monitoring/test_step_logger.py",),
    ),
    Mutant(
        *("one-cycle-without-stairs", "dsgraph/engine/schedules/one_cycle.py", "missing rounding"),
        *("return math.floor(way * stairs / size) / stairs if stairs else way / size", "return way / size"),
        killers=("tests/engine/schedules/test_by_name.py",),
    ),
    Mutant(
        *("import-without-padding", "dsgraph/engine/checkpoints/deepspeed_files.py", "off-by-one shard"),
        *("offset += size + padding", "offset += size"),
        killers=("tests/engine/test_import.py",),
    ),
    Mutant(
        *("number-of-own-rows", "dsgraph/partitioning/rules.py", "unsummed norm"),
        *("        return func(value.full_tensor())", "        return func(local)"),
        killers=("tests/partitioning/test_replicated.py",),
    ),
    Mutant(
        *("replaced-data-passes", "dsgraph/partitioning/eager/replaced_data.py", "missing check"),
        *("    if now[0] != seen[0] and now[1] == seen[1]:", "    if False:"),
        killers=("tests/partitioning/test_replicated.py",),
    ),
    Mutant(
        *("replicated-compared-once", "dsgraph/partitioning/replicated.py", "missing check"),
        *("if is_first or entry.is_written]", "if is_first]"),
        killers=("tests/partitioning/test_replicated.py",),
    ),
    Mutant(
        *("checkpoint-trusts-files", "dsgraph/checkpoint_files.py", "missing check"),
        *("if not (path / name).is_file() or _checksum(path / name) != checksum:", "if not (path / name).is_file():"),
        killers=("tests/engine/checkpoints/test_write_checkpoint.py",),
    ),
    Mutant(
        *("checkpoint-trusts-what-it-says", "dsgraph/checkpoint_files.py", "missing check"),
        *('if head is not None and int(head["sum"], 16) == zlib.crc32(content[head.end() :]):', "if head is not None:"),
        killers=("tests/test_checkpoint_files.py",),
    ),
    Mutant(
        *("killed-checkpoint-stays-hidden", "dsgraph/checkpoint_folder.py", "missing step"),
        *('            path.rename(folder / found["tag"])', "            pass"),
        killers=("tests/test_checkpoint_folder.py",),
    ),
    Mutant(
        *("two-jobs-one-checkpoint", "dsgraph/checkpoint_folder.py", "missing check"),
        *("fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass"),
        killers=("tests/test_checkpoint_folder.py",),
    ),
    Mutant(
        *("keys-become-text", "dsgraph/utils/typed_json.py", "missing check"),
        *(" and all(type(key) is str for key in value)", ""),
        killers=("tests/utils/test_typed_json.py", "tests/engine/checkpoints/test_saving.py"),
    ),
    Mutant(
        *("resumes-amid-a-step", "dsgraph/engine/checkpoints/saving.py", "missing step"),
        *("self.counts.micro = self.counts.steps * self.resolved.batch.micro_batches", "pass"),
        killers=("tests/engine/checkpoints/test_saving.py",),
    ),
    Mutant(
        *("tags-may-differ", "dsgraph/engine/checkpoints/same_call.py", "missing check"),
        *('if validation == "Fail":', "if False:"),
        killers=("tests/engine/checkpoints/test_same_call.py",),
    ),
    Mutant(
        *("saves-alone", "dsgraph/engine/checkpoints/same_call.py", "missing check"),
        *('texts = exchange(module, f"that they {doing}", json.dumps(mine))', "texts = {0: json.dumps(mine)}"),
        killers=("tests/engine/checkpoints/test_same_call.py",),
    ),
    Mutant(
        *("lost-without-a-word", "dsgraph/engine/checkpoints/asynchronous_save.py", "missing check"),
        *("        if error is not None:", "        if False:"),
        killers=("tests/engine/checkpoints/test_asynchronous_save.py",),
    ),
    Mutant(
        *("failed-save-fills-the-disk", "dsgraph/engine/checkpoints/write_checkpoint.py", "missing step"),
        *("                unfinished.give_up()", "                pass"),
        killers=("tests/engine/test_faults.py",),
    ),
    Mutant(
        *("written-but-never-complete", "dsgraph/engine/checkpoints/write_checkpoint.py", "dropped wait"),
        *("attempt.write(written.result)", "pass"),
        killers=("tests/engine/test_faults.py",),
    ),
)

MEMORY = (
    Mutant(
        *("limit-forgets-unread-parameters", "dsgraph/compiler/memory_limit/limit_scope.py", "missing step"),
        *("unread=tuple(parameter_info(", "unread=() and tuple(parameter_info("),
        killers=(
            "tests/compiler/memory_limit/test_limit_scope.py::test_a_parameter_that_the_forward_does_not_read_counts_and_keeps_the_limit_on",
        ),
    ),
    Mutant(
        *("limit-of-any-size", "dsgraph/compiler/memory_limit/limit_scope.py", "missing check"),
        *("bool(size <= number)", "pass"),
        killers=(
            "tests/compiler/memory_limit/test_limit_scope.py::test_smaller_batches_keep_the_limit_and_larger_ones_do_not_run_their_graph",
        ),
    ),
    Mutant(
        *("limit-promised-for-a-block", "dsgraph/compiler/memory_limit/limit_scope.py", "missing check"),
        *("if not all(id(entry.param) in own for entry in entries):", "if False:"),
        killers=("tests/compiler/memory_limit/test_limit_scope.py::test_blocks_compiled_one_by_one_are_named",),
    ),
    Mutant(
        *("torchs-budget-passes", "dsgraph/compiler/memory_limit/limit_scope.py", "missing check"),
        *("if budget != 1.0:", "if budget > 1.0:"),
        killers=("tests/compiler/memory_limit/test_limit_scope.py::test_torchs_own_budget_is_refused_by_name",),
    ),
    Mutant(
        *("batch-norm-repeated", "passes/memory/forward_values.py", "missing check"),
        *("return node not in self.once and _may_repeat(node)", "return _may_repeat(node)"),
        killers=(
            "tests/compiler/memory_limit/test_limit_scope.py::test_what_reads_a_running_mean_is_not_repeated_with_the_new_one",
        ),
    ),
    Mutant(
        *("two-forwards-pass", "dsgraph/compiler/memory_limit/limit_watch.py", "missing step"),
        *("state.open_forwards.add(forward)", "pass"),
        killers=("tests/compiler/memory_limit/test_limit_watch.py",),
    ),
    Mutant(
        *("outputs-of-the-step-before-forgotten", "passes/analysis/step_memory.py", "missing term"),
        *("+ self._keeps_outputs * self._outputs[-1]  # of the step before", "+ 0"),
        killers=("tests/passes/analysis/test_step_memory.py",),
    ),
    Mutant(
        *("convolution-reorders-no-input", "passes/analysis/kernel_scratch.py", "missing term"),
        *("_expanded(gradient) + _blocked(x)", "_expanded(gradient)"),
        killers=("tests/passes/analysis/test_kernel_scratch.py",),
    ),
    Mutant(
        *("repeated-dropout-has-no-results", "passes/runner/partitioner.py", "missing step"),
        *("            evaluate_random_calls(part)\n", ""),
        killers=("tests/passes/analysis/test_step_memory.py",),
    ),
    Mutant(
        *("states-of-generators-are-outputs", "passes/analysis/step_memory.py", "missing step"),
        *("if len(sources) == len(states) else found", "if not states else found"),
        killers=("tests/passes/analysis/test_step_memory.py",),
    ),
    Mutant(
        *("generators-state-needs-no-room", "passes/analysis/kernel_scratch.py", "missing term"),
        *("return state + _scratch(", "return _scratch("),
        killers=("tests/passes/analysis/test_kernel_scratch.py",),
    ),
    Mutant(
        *("results-of-a-random-op-end-together", "passes/analysis/memory.py", "wrong bound"),
        *("return [(name,) for name in names] if is_tuple else [names]", "return [names]"),
        killers=("tests/passes/analysis/test_memory.py",),
    ),
    Mutant(
        *("numpys-integer-is-a-share", "dsgraph/utils/byte_counts.py", "wrong type"),
        *("if isinstance(value, Integral)", "if isinstance(value, int)"),
        killers=("tests/utils/test_byte_counts.py",),
    ),
    Mutant(
        *("plan-moves-nothing", "passes/memory/fit.py", "missing step"),
        *("choices |= {name: Choice.OFFLOAD for name in self.offloaded if name in names}", "pass"),
        killers=("tests/distributed/test_memory_limit.py",),
    ),
    Mutant(
        *("next-plan-may-be-the-same", "passes/memory/fit.py", "wrong bound"),
        *("room = plan.needs - max(", "room = room - max("),
        killers=("tests/passes/memory/test_fit.py",),
    ),
    Mutant(
        *("plans-what-is-not-saved", "passes/memory/forward_values.py", "missing check"),
        *("return None if size and node in self.returned else False", "return None if size else False"),
        killers=("tests/passes/memory/test_forward_values.py",),
    ),
    Mutant(
        *("limit-forgets-what-is-saved", "passes/memory/assignment.py", "off by one"),
        *("before.append((column, item.saved / unit))", "before.append((column, 0.0))"),
        killers=("tests/passes/memory/test_policies.py",),
    ),
    Mutant(
        *("repeated-without-its-sources", "passes/memory/policies.py", "missing check"),
        *("(2 * count + position, -1)])", "(2 * count + position, 0)])"),
        killers=("tests/passes/memory/test_policies.py",),
    ),
    Mutant(
        *("offload-ahead-of-its-last-use", "passes/memory/stored_values.py", "off by one"),
        *("for value in (node, *node.all_input_nodes) for", "for value in (node,) for"),
        killers=("tests/passes/memory/test_offload.py",),
    ),
    Mutant(
        *("write-that-failed-is-read", "inductor_ext/transfers/stored.py", "missing check"),
        *(
            "    if failure is not None:\n        raise TransferError(str(failure)) from failure\n    read_file",
            "    read_file",
        ),
        killers=("tests/inductor_ext/transfers/test_ops.py",),
    ),
    Mutant(
        *("buffer-back-ahead-of-its-copy", "inductor_ext/transfers/stored.py", "dropped wait"),
        *("            self._given_up.set()", "            self.written.cancel()"),
        killers=("tests/inductor_ext/transfers/test_ops.py",),
    ),
    Mutant(
        *("verifier-of-reloads", "passes/verify/transfers.py", "missing check"),
        *(
            "is_transfer_wait(user)]\n    if len(waits) != 1 or len(reload.users) != 1:",
            "is_transfer_wait(user)]\n    if len(waits) > 1:",
        ),
        killers=("tests/passes/memory/test_offload.py",),
    ),
)

PARALLEL = (
    Mutant(
        *("plan-splits-gradients-early", "dsgraph/parallel/planning/memory_formulas.py", "off by one"),
        *("_HALF * stage_params / (tp * _split_from(2))", "_HALF * stage_params / (tp * _split_from(1))"),
        killers=("tests/parallel/planning/test_plan.py",),
    ),
    Mutant(
        *("search-forgets-memory", "dsgraph/parallel/planning/search.py", "missing check"),
        *("sorted((item for item in plans if item.fits), key", "sorted((item for item in plans), key"),
        killers=("tests/parallel/planning/test_search.py",),
    ),
    Mutant(
        *("slices-not-entered", "passes/parallel/slice_tensors.py", "missing term"),
        *("operand is not outcome.added and _has_gradient(operand)", "False"),
        killers=("tests/passes/parallel/test_slice_tensors.py",),
    ),
    Mutant(
        *("sliced-sums-rounded-twice", "passes/parallel/slice_tensors.py", "missing cast"),
        *("or value.dtype not in _NARROW:", "or value.dtype is not None:"),
        killers=("tests/passes/parallel/test_slice_tensors.py",),
    ),
    Mutant(
        *("fused-slices-in-a-row", "dsgraph/inference/sources.py", "wrong index"),
        *("(part * count + rank) * size for part", "(rank * held.parts + part) * size for part"),
        killers=("tests/inference/test_sources.py",),
    ),
    Mutant(
        *("planned-in-training-mode", "dsgraph/inference/slice_layers.py", "missing step"),
        *("(*model.parameters(), *model.buffers())}).eval()", "(*model.parameters(), *model.buffers())})"),
        killers=("tests/distributed/test_sliced_few_bits.py",),
    ),
    Mutant(
        *("few-bits-not-summed", "passes/parallel/slice_few_bits.py", "missing term"),
        *("is_partial=True, **call", "is_partial=False, **call"),
        killers=("tests/passes/parallel/test_slice_tensors.py",),
    ),
    Mutant(
        *("one-cache-for-all-requests", "dsgraph/inference/cache.py", "missing step"),
        *("            cache = free.pop() if free else None\n", "            cache = free[-1] if free else None\n"),
        killers=("tests/inference/test_engine.py::test_threads_get_their_own_tokens_and_compile_nothing",),
    ),
    Mutant(
        *("logits-not-compared", "dsgraph/inference/probe.py", "missing check"),
        *("        if distance > tolerance:\n", "        if False:\n"),
        killers=("tests/inference/test_probe.py::test_what_cannot_be_served_is_refused_and_left_as_it_was",),
    ),
    Mutant(
        *("windows-not-reached", "dsgraph/inference/probe.py", "missing bound"),
        *("            found = max(found, beyond)\n", "            found = max(found, 3)\n"),
        killers=("tests/inference/test_probe.py",),
    ),
    Mutant(
        *("layers-by-their-windows", "dsgraph/inference/cache.py", "wrong index"),
        *("    cache.layers = [FullLayer(max_tokens) for _ in range(count)]\n", ""),
        killers=("tests/inference/test_probe.py::test_tokens_and_logits_are_those_of_transformers",),
    ),
    Mutant(
        *("foreign-forward-in-a-graph", "dsgraph/inference/engine.py", "missing check"),
        *("not isinstance(cache, RewindableCache)", "False"),
        killers=("tests/inference/test_engine.py::test_forwards_that_no_graph_takes_are_the_models_own",),
    ),
    Mutant(
        *("missing-weights-left-random", "dsgraph/inference/checkpoints.py", "missing check"),
        *('for what in ("missing_keys", "mismatched_keys"):', 'for what in ("mismatched_keys",):'),
        killers=("tests/inference/test_checkpoints.py",),
    ),
    Mutant(
        *("encoded-once-for-all", "dsgraph/inference/cache.py", "missing step"),
        *("            self.is_updated = dict.fromkeys(self.is_updated, False)\n", ""),
        killers=("tests/inference/test_encoders.py",),
    ),
    Mutant(
        *("encoder-output-of-padding", "dsgraph/inference/encoders.py", "missing step"),
        *("narrow(dimension, 0, length)", "narrow(dimension, 0, found[name].shape[dimension])"),
        killers=("tests/inference/test_encoders.py",),
    ),
    Mutant(
        *("samples-of-each-rank", "dsgraph/inference/engine.py", "missing check"),
        *('if arguments.get("do_sample", config.do_sample):', "if False:"),
        killers=("tests/distributed/test_sliced_inference.py",),
    ),
    Mutant(
        *("replicated-though-random", "passes/analysis/replication.py", "missing check"),
        *("return torch.Tag.nondeterministic_seeded not in target.tags", "return True"),
        killers=("tests/passes/analysis/test_replication.py",),
    ),
    Mutant(
        *("pipeline-tied-counted-twice", "dsgraph/parallel/pipeline/tied_gradients.py", "missing check"),
        *("(name in self.tied and name not in self.owned)", "False"),
        killers=("tests/distributed/test_pipeline.py",),
    ),
    Mutant(
        *("slices-counted-once", "dsgraph/parallel/pipeline/tied_gradients.py", "unsummed norm"),
        *("squares[2 * (name in self.slices) + is_split]", "squares[int(is_split)]"),
        killers=("tests/distributed/test_parallelize.py::test_two_by_two_by_two",),
    ),
    Mutant(
        *("mpu-slices-counted-once", "dsgraph/engine/norms.py", "unsummed norm"),
        *("    dist.all_reduce(sliced, group=shared.group)\n", ""),
        killers=("tests/engine/integrations/test_mpu.py",),
    ),
    Mutant(
        *("sliced-loss-of-ignored-targets", "inductor_ext/collectives/vocabulary.py", "missing check"),
        *("losses = losses.masked_fill(~counts, 0)", "losses = losses"),
        killers=(
            "tests/distributed/test_tensor_parallel.py::test_a_vocabulary_is_sliced_and_its_logits_are_not_gathered_for_the_loss",
        ),
    ),
    Mutant(
        *("stages-receive-what-was-captured", "dsgraph/parallel/pipeline/stage_runs.py", "missing check"),
        *("key = self.autocast()", 'key = "no autocast"'),
        killers=("tests/distributed/test_pipeline.py::test_autocast_around_a_step_is_that_of_one_process",),
    ),
    Mutant(
        *("stages-keep-own-seeds", "dsgraph/parallel/pipeline/pipeline.py", "ranks differ"),
        *("    share_first_values(graphs, held, own, group=group, agreement=agreement)\n", ""),
        killers=(
            "tests/distributed/test_pipeline.py::test_the_first_ranks_values_count_and_other_stages_leave_memory",
        ),
    ),
    Mutant(
        *("captured-inputs-kept", "dsgraph/parallel/pipeline/captured_model.py", "leak"),
        *("gm, values = kept.pop()", "gm, values = kept[0]"),
        killers=(
            "tests/distributed/test_pipeline.py::test_the_first_ranks_values_count_and_other_stages_leave_memory",
        ),
    ),
    Mutant(
        *("batches-not-compared", "dsgraph/ranks/equal_batches.py", "missing check"),
        *("self._seen[kind] <= CHECKED_STEPS", "self._seen[kind] < 1"),
        killers=(
            "tests/distributed/test_tensor_parallel.py::test_ranks_that_are_given_other_batches_or_seeds_are_named",
        ),
    ),
    Mutant(
        *("deferred-weights-overwrite", "dsgraph/parallel/pipeline/deferred_weights.py", "missing term"),
        *(
            "weight.grad = gradient() if weight.grad is None else weight.grad.add_(gradient())",
            "weight.grad = gradient()",
        ),
        killers=("tests/distributed/test_pipeline.py::test_steps_are_those_of_the_unsplit_model",),
    ),
    Mutant(
        *("random-values-repeated", "dsgraph/parallel/pipeline/captured_model.py", "missing check"),
        *("parameters=apart, impure=run.impure()", "parameters=apart, impure=set()"),
        killers=("tests/parallel/pipeline/test_captured_model.py",),
    ),
    Mutant(
        *("modes-not-repeated", "passes/parallel/stage_graphs.py", "missing step"),
        *("if any(node in needed and node not in own for node in span)", "if False"),
        killers=("tests/passes/parallel/test_split_stages.py",),
    ),
    Mutant(
        *("rounds-not-checked", "dsgraph/parallel/pipeline/schedule_order.py", "missing check"),
        *("if kind in _IN_ROUNDS and", "if False and"),
        killers=("tests/parallel/pipeline/test_schedule_order.py",),
    ),
    Mutant(
        *("layouts-load-other-shapes", "dsgraph/parallel/pipeline/stage_checkpoint.py", "missing check"),
        *("        if saved[name] != mine[name]:", "        if False:"),
        killers=(
            "tests/distributed/test_parallelize.py::test_a_checkpoint_of_another_model_or_a_damaged_one_changes_no_rank",
        ),
    ),
    Mutant(
        *("little-sliced-without-a-word", "dsgraph/parallel/tensor/tensor_parallel.py", "missing check"),
        *("sum(whole.values()) <= (1 - MOST) * total", "True"),
        killers=(
            "tests/distributed/test_tensor_parallel.py::test_a_family_of_which_little_is_sliced_is_named_with_reasons",
        ),
    ),
    Mutant(
        *("split-cuts-before-writes", "passes/parallel/split_stages.py", "missing check"),
        *("        if _writes(name):", "        if False:"),
        killers=("tests/passes/parallel/test_split_stages.py",),
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
    *COMPILER,
    *OFFLOAD,
    *VERIFIER,
    *ENGINE,
    *MEMORY,
    *PARALLEL,
)
