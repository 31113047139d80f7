"""Faults of one line, each with the tests that should catch it: tests/mutations.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One line that is wrong, and the tests that should say so."""

    path: str
    old: str  # occurs once in the file
    new: str
    tests: str  # arguments of pytest, files below tests/
    interpreted: bool = False


def _streaming(*names: str) -> str:
    return " ".join(
        f"operators/test_attention_streaming.py::test_feature[{name}]" for name in names
    )


def _triton(*names: str) -> str:
    file = "kernels/test_attention_triton_interpreted.py"
    return " ".join(f"{file}::test_feature[{name}]" for name in names)


FUNCTIONAL = "torch_streamkl/program/divergences.py"
FORMS = "torch_streamkl/program/divergence_forms.py"
IDENTITIES = "torch_streamkl/program/identities.py"
OPERATIONS = "torch_streamkl/program/operations.py"
CANONICAL = "torch_streamkl/program/canonical.py"
REDUCTIONS = "torch_streamkl/program/reductions.py"
ADJOINTS = "torch_streamkl/program/derive.py"
ROWSTATE = "torch_streamkl/divergences/row_state.py"
STREAMING = "torch_streamkl/attention/torch_impl.py"
ATTENTION = "torch_streamkl/attention/interface.py"
LINEAR = "torch_streamkl/linear/rows.py"
ROWS = "torch_streamkl/kernels/row_state.py"
SCORES = "torch_streamkl/kernels/scores.py"
FORWARD = "torch_streamkl/attention/triton/forward.py"
BACKWARD = "torch_streamkl/attention/triton/backward.py"
REWRITE = "rewrite/test_rewrite_forms.py::"
QUERY_TILES = "operators/test_query_tiles.py"
DERIVE = "torch_streamkl/rows/derive.py"
PROGRAMS = "torch_streamkl/rows/torch_impl.py"
LOSSES = "torch_streamkl/rows/losses.py"
MAP_BLOCKS = "torch_streamkl/rows/triton/blocks.py"
MAP_GRADIENTS = "torch_streamkl/rows/triton/gradients.py"
ROW_CHAINS = "fx_passes/passes/row_chains.py"
GENERATED = "torch_streamkl/rows/triton/source.py"
TURNS = "torch_streamkl/attention/hopper/tile_scheduler.py"
BODY = "torch_streamkl/attention/compiled_rows.py"
VOCAB = "torch_streamkl/linear/compiled_rows.py"
SHARDS = "torch_streamkl/distributed/shard_rows.py"
PACKED = "torch_streamkl/attention/hopper/packed.py"
REPEATED = "fx_passes/closed_forms/repeated_ids.py"
CHOSEN = "rewrite/test_chosen_entries.py"
RULES = "fx_passes/reading/rules"
CLOSED = "fx_passes/closed_forms"
READ = "rewrite/test_reading.py::test_operations[{}]"
SHIFTS = "rewrite/test_large_shifts.py"
MATCHED = "rewrite/test_closed_forms.py"
SEQUENCE = "torch_streamkl/distributed/sequence.py"
PLACED = "torch_streamkl/distributed/dtensors.py"
CALLS = "torch_streamkl/distributed/graph_calls.py"
SHARDING = "torch_streamkl/distributed/sharding.py"
TWO_RANKS = "::test_on_two_ranks"
OPTIONS_OF_RANKS = f"distributed/test_distributed_options.py{TWO_RANKS}"
HEADS_OF_RANKS = f"distributed/test_distributed_linear.py{TWO_RANKS}"
MAPS_OF_RANKS = f"distributed/test_distributed_attention.py{TWO_RANKS}"

FAULTS = (
    # ------------------------------------------------------------------------------ functional
    Fault(
        IDENTITIES,
        'if op == "sub" and va == 0:\n        return apply("neg", b)',
        'if op == "sub" and va == 0:\n        return b',
        "operators/test_functional.py",
    ),
    Fault(
        OPERATIONS,
        'return node if t is node.args[arg] else f("mul", t, node.args[1 - arg])',
        'return node if t is node.args[arg] else f("mul", t, node.args[arg])',
        _streaming("js", "eps"),
    ),
    Fault(
        OPERATIONS,
        'return quotient if arg == 0 else f("neg", f("mul", quotient, node))',
        "return quotient",
        "operators/test_functional.py",
    ),
    Fault(
        OPERATIONS,
        '_by(lambda f, n, x: f("sign", x))',
        '_by(lambda f, n, x: f("sign", n))',
        _streaming("tv"),
    ),
    Fault(
        OPERATIONS,
        "takes = f(inner if arg == 0 else outer, *node.args)",
        "takes = f(outer if arg == 0 else inner, *node.args)",
        _streaming("clamp_reached"),
    ),
    Fault(
        OPERATIONS,
        'share = f("sigmoid", f("sub", mine, other))',
        'share = f("sigmoid", f("sub", other, mine))',
        "operators/test_functional.py",
    ),
    Fault(
        FORMS,
        "result[m] = result.get(m, 0.0) + c1 * c2",
        "result[m] = c1 * c2",
        "operators/test_functional.py",
    ),
    Fault(
        FUNCTIONAL,
        '"forward_kl": "P*(logP-logS)"',
        '"forward_kl": "P*(logP+logS)"',
        _streaming("forward_kl"),
    ),
    Fault(
        FUNCTIONAL,
        'DIVERGENCES["forward_kl" if beta == 0.0 else "reverse_kl"]',
        'DIVERGENCES["reverse_kl" if beta == 0.0 else "forward_kl"]',
        "operators/test_functional.py",
    ),
    # ------------------------------------------------------------------------------ normal form
    Fault(
        REDUCTIONS,
        "return product(*outside, reduced(SUM, axis, inside))",
        "return reduced(SUM, axis, inside)",
        "operators/test_program.py",
    ),
    Fault(
        REDUCTIONS,
        "const(0.0) if c < 0 else last",
        "last if c < 0 else const(0.0)",
        "operators/test_program.py",
    ),
    Fault(
        REDUCTIONS,
        "return subtracted(substitute(score, theta), reduced(LOGSUMEXP, free, every))",
        "return substitute(score, theta)",
        "operators/test_program.py",
    ),
    Fault(
        CANONICAL,
        "outside = [(c, x) for c, x in terms if not condition.axes <= x.axes]",
        "outside = [(c, x) for c, x in terms if condition.axes <= x.axes]",
        "operators/test_program.py",
    ),
    # ------------------------------------------------------------------------------ statistics
    Fault(
        ROWSTATE,
        "l_s = l_s + z.l_s * w_s",
        "l_s = l_s + z.l_s",
        "operators/test_metamorphic.py::test_states_split_and_merge",
    ),
    Fault(
        ROWSTATE,
        "(moment + row_sum * shift) * weight)",
        "moment * weight)",
        "operators/test_metamorphic.py::test_states_split_and_merge",
    ),
    Fault(
        ROWSTATE,
        "        x.masked_fill_(weight == 0, 0.0)",
        "        pass",
        "operators/test_metamorphic.py::test_states_split_and_merge "
        + _streaming("mask_additive"),
    ),
    Fault(
        ROWSTATE,
        "student_delta=e_s + form.ts * row_sum_t",
        "student_delta=e_s + form.tt * row_sum_t",
        _streaming("forward_kl"),
    ),
    Fault(
        ROWSTATE,
        "teacher_delta=e_t + (form.tt + form.t) * row_sum_t",
        "teacher_delta=e_t + form.t * row_sum_t",
        _streaming("forward_kl"),
    ),
    Fault(ROWSTATE, "row_sum + torch.exp(sink - base)", "row_sum", _streaming("sink")),
    Fault(
        ROWSTATE,
        "near = (ratio > 0.5) & (ratio < 2.0)",
        "near = ratio > 2.0",
        "operators/test_attention_numerics.py -k denominators",
    ),
    Fault(
        ROWSTATE,
        "m_t, m_s = torch.maximum(x.m_t, y.m_t), torch.maximum(x.m_s, y.m_s)",
        "m_t, m_s = x.m_t, y.m_s",
        "operators/test_metamorphic.py::test_states_split_and_merge",
    ),
    # -------------------------------------------------------------------------------- streaming
    Fault(
        STREAMING,
        "d_dot = d_score.mul_(row_grad.grad * (side.scale / problem.temperature))",
        "d_dot = d_score.mul_(row_grad.grad * side.scale)",
        _streaming("temperature"),
    ),
    Fault(
        "torch_streamkl/attention/torch_scores.py",
        "slope = 1.0 - x * x",
        "slope = 1.0 - x",
        _streaming("softcap"),
    ),
    Fault(
        "torch_streamkl/attention/torch_scores.py",
        "ratio = self.problem.teacher.num_heads // self.problem.num_heads",
        "ratio = 1",
        _streaming("head_mean", "head_mean_groups"),
    ),
    Fault(
        STREAMING,
        "ds.masked_fill_(log_s < floor, 0.0)",
        "pass",
        "operators/test_attention_streaming.py::test_gradients_of_the_student_alone[clamp_reached]",
    ),
    Fault(
        STREAMING,
        "return higher, total * (high - base).exp() + added",
        "return higher, total + added",
        _streaming("head_mean"),
    ),
    Fault(
        STREAMING,
        "share = (log_t.unflatten(1, (g.shape[1], -1)) - mean).exp()",
        "share = log_t.unflatten(1, (g.shape[1], -1)).exp()",
        _streaming("head_mean"),
    ),
    Fault(
        STREAMING,
        "above = low_t - sums.teacher_lse >= guard.teacher_floor",
        "above = low_t - sums.teacher_lse <= guard.teacher_floor",
        "operators/test_attention_streaming.py -k second_pass",
    ),
    # ------------------------------------------------------------------------------------ masks
    Fault(
        "torch_streamkl/attention/torch_scores.py",
        "parts.append((j >= i - left)",
        "parts.append((j > i - left)",
        _streaming("window"),
    ),
    Fault(
        "torch_streamkl/attention/torch_scores.py",
        "parts.append((j <= i + right)",
        "parts.append((j < i + right)",
        _streaming("causal"),
    ),
    Fault(
        "torch_streamkl/attention/torch_scores.py",
        "j[0] < p.key_lengths",
        "j[0] <= p.key_lengths",
        _streaming("key_lengths"),
    ),
    Fault(
        "torch_streamkl/attention/torch_scores.py",
        "keys.stop - 1 > first + right:",
        "keys.stop - 1 > last + right:",
        _streaming("causal"),
    ),
    Fault(
        "torch_streamkl/program/masks.py",
        "rows.stop + shift + right)",
        "rows.stop + shift + right - 1)",
        _streaming("causal"),
    ),
    Fault(
        "torch_streamkl/attention/torch_scores.py",
        "functools.reduce(torch.bitwise_and, parts)",
        "parts[-1]",
        "operators/test_attention_streaming.py::test_any_call",
    ),
    Fault(
        "torch_streamkl/attention/arguments.py",
        "right = 0 if right is None else min(right, 0)",
        "right = 0 if right is None else right",
        "operators/test_attention_streaming.py::test_any_call",
    ),
    Fault(
        "torch_streamkl/attention/arguments.py",
        "return float(q.shape[-1] ** -0.5 if scale is None else scale)",
        "return float(q.shape[-2] ** -0.5 if scale is None else scale)",
        _streaming("forward_kl"),
    ),
    # ----------------------------------------------------------------------------- linear rows
    Fault(
        LINEAR,
        "level = (form.ss + form.s - rows.student_delta)[:, None]",
        "level = (form.s - rows.student_delta)[:, None]",
        "operators/test_linear_kl.py::test_values_and_gradients",
    ),
    Fault(
        LINEAR,
        "grad.mul_((weight / temperature)[:, None])",
        "grad.mul_(weight[:, None])",
        "operators/test_linear_kl.py::test_values_and_gradients",
    ),
    Fault(
        LINEAR,
        "p = p - (problem.labels[:, None] == vocab_entry).to(p.dtype)",
        "p = p - 0.0",
        "operators/test_linear_kl.py::test_values_and_gradients",
    ),
    Fault(
        LINEAR,
        "for start, stop in ((0, min(sizes)), (min(sizes), max(sizes))):",
        "for start, stop in ((0, min(sizes)),):",
        "operators/test_linear_kl.py::test_values_and_gradients",
    ),
    # ------------------------------------------------------------------------- kernels' plug-ins
    Fault(
        ROWS,
        "l_s = state.l_s * alpha_s + tl.sum(es, 1)",
        "l_s = state.l_s + tl.sum(es, 1)",
        _triton("forward_kl"),
        True,
    ),
    Fault(
        ROWS,
        "moved = (mom + row_sum * moment(shift_t, shift_s, CT, CS)) * alpha",
        "moved = mom * alpha",
        _triton("forward_kl", "split_keys"),
        True,
    ),
    Fault(
        ROWS,
        "h = e_s + COEFFICIENTS.TS * row_sum_t",
        "h = e_s - COEFFICIENTS.TS * row_sum_t",
        _triton("forward_kl"),
        True,
    ),
    Fault(
        ROWS,
        "            d += COEFFICIENTS.ST * S",
        "            d += COEFFICIENTS.ST * P",
        _triton("reverse_kl"),
        True,
    ),
    Fault(
        ROWS,
        "product = tl.where(weight > 0.0, product, 0.0)",
        "product = product",
        _triton("causal", "mask_bool"),
        True,
    ),
    Fault(
        SCORES,
        "allowed &= cols >= rows + seq.offset - masks.window_left",
        "allowed &= cols > rows + seq.offset - masks.window_left",
        _triton("window"),
        True,
    ),
    Fault(
        SCORES,
        "allowed &= cols <= rows + seq.offset + masks.window_right",
        "allowed &= cols < rows + seq.offset + masks.window_right",
        _triton("causal"),
        True,
    ),
    Fault(
        SCORES,
        "allowed = inside & (cols < seq.num_valid)",
        "allowed = inside",
        _triton("key_lengths"),
        True,
    ),
    Fault(
        SCORES,
        "end = tl.maximum(end, tl.max(tl.where(is_admitted, keys + 1, 0), 0))",
        "end = tl.maximum(end, tl.max(tl.where(is_admitted, keys, 0), 0))",
        "kernels/test_attention_triton_interpreted.py -k around_a_tile",
        True,
    ),
    Fault(
        SCORES,
        "is_hole = (keys > first) & (is_admitted == 0)",
        "is_hole = (keys > end) & (is_admitted == 0)",
        _triton("mask_padding"),
        True,
    ),
    Fault(
        SCORES,
        "left = tl.maximum(left, (start + BLOCK_N - 1) // BLOCK_N * BLOCK_N)",
        "left = tl.maximum(left, start // BLOCK_N * BLOCK_N)",
        "kernels/test_attention_triton_interpreted.py -k around_a_tile",
        True,
    ),
    Fault(
        "torch_streamkl/attention/triton/backward.py",
        "acc = tl.where(admitted(masks, sizes, offs_n)[:, None], acc, 0.0)",
        "acc = acc",
        "kernels/test_attention_triton_interpreted.py -k around_a_tile",
        True,
    ),
    Fault(SCORES, "+ (head // side.group) * side.k_h", "+ head * side.k_h", _triton("gqa"), True),
    Fault(
        SCORES,
        "stop = tl.minimum(stop, last_row + seq.offset + masks.window_right + 1)",
        "stop = tl.minimum(stop, last_row + seq.offset + masks.window_right)",
        "kernels/test_attention_triton_interpreted.py -k sees_one_key",
        True,
    ),
    Fault(
        FORWARD,
        "above &= (state.low_s - lse_s) * LN2 >= CONFIG.STUDENT.FLOOR",
        "above &= True",
        _triton("clamp_reached", "split_keys_clamp"),
        True,
    ),
    Fault(
        FORWARD,
        "student_delta += tl.sum(tl.where(allowed, h, 0.0), 1)",
        "student_delta += tl.sum(h, 1)",
        "kernels/test_attention_triton_interpreted.py::test_terms_of_keys_that_are_masked_do_not_count",
        True,
    ),
    Fault(
        BACKWARD,
        "d *= s_slope if STUDENT else t_slope",
        "d *= t_slope",
        _triton("softcap"),
        True,
    ),
    Fault(
        BACKWARD,
        "tl.trans((d * grad[:, None]).to(q.dtype))",
        "tl.trans(d.to(q.dtype))",
        _triton("forward_kl"),
        True,
    ),
    Fault(
        "torch_streamkl/attention/plans.py",
        "STUDENT=student._replace(TOGETHER=1), TEACHER=teacher._replace(TOGETHER=1)",
        "",
        "kernels/test_offline_compile.py::test_elements_that_lie_together",
    ),
    # -------------------------------------------------------------------------------- launches
    Fault(
        "torch_streamkl/kernels/tiles.py",
        "return total + operands.of_rows(stays)",
        "return total",
        "kernels/test_tiles.py",
    ),
    Fault(
        "torch_streamkl/runtime/devices.py",
        "return not self.is_hip and self.capability == (9, 0)",
        "return self.capability == (9, 0)",
        "kernels/test_tiles.py",
    ),
    Fault(
        "torch_streamkl/runtime/launch.py",
        "with on_device(device_of(arguments)):",
        "with _CURRENT:",
        "kernels/test_launches.py",
    ),
    Fault(
        "torch_streamkl/runtime/capture.py",
        'with {guard}({device}):"',
        'if {guard}({device}):"',
        "kernels/test_launches.py",
    ),
    # ------------------------------------------------------------------ closed forms, their calls
    Fault(
        f"{CLOSED}/masks.py",
        "right = linear(0.0, [(1.0, band.rest), (-1.0, offset_of(axes))])",
        "right = linear(0.0, [(1.0, band.rest)])",
        "rewrite/test_rewrite_forms.py -k sizes_of_queries",
    ),
    Fault(
        f"{CLOSED}/masks.py",
        "return a if x <= y else b",
        "return b if x <= y else a",
        f"{REWRITE}test_losses_of_attention -k tighter",
    ),
    Fault(
        f"{CLOSED}/match.py",
        "elif conditions[TEACHER] != conditions[STUDENT]:",
        "elif False:",
        MATCHED,
    ),
    Fault(
        f"{CLOSED}/divergence.py",
        "return named(name).expr, factor",
        "return named(name).expr, 1.0",
        MATCHED,
    ),
    Fault(
        f"{CLOSED}/divergence.py",
        "pair = Pair(named(name).expr, a, b, -c[a, b])",
        "pair = Pair(named(name).expr, a, b, c[a, b])",
        f"{REWRITE}test_one_distribution_and_two_others_in_one_expression",
    ),
    Fault(
        "fx_passes/lowering/attention_call.py",
        'options[f"{name}_softcap"] = side.softcap',
        'options[f"{name}_softcap"] = 2.0 * side.softcap',
        f"{REWRITE}test_choices -k scale",
    ),
    Fault(
        f"{CLOSED}/scores.py",
        "form.scale * cap,",
        "form.scale,",
        f"{REWRITE}test_choices -k scale",
    ),
    Fault(
        "fx_passes/lowering/linear_call.py",
        "x = self.build.call(torch.mul, x, bias.weight / side.scale)",
        "pass",
        f"{REWRITE}test_losses_of_heads -k bias",
    ),
    Fault(
        f"{CLOSED}/score_form.py",
        "return replace(form, mask=form.mask | mask, layers=(*form.layers, layer))",
        "return replace(form, layers=(*form.layers, layer))",
        MATCHED,
    ),
    Fault(
        f"{CLOSED}/heads.py",
        "return scaled(count, exponential(log))",
        "return exponential(log)",
        MATCHED,
    ),
    Fault(
        f"{CLOSED}/score_form.py",
        "        softcap=form.softcap * number,",
        "        softcap=form.softcap,",
        MATCHED,
    ),
    Fault(
        "fx_passes/fusing.py",
        "terms.append((1.0, product(call.weight, value)))",
        "terms.append((1.0, value))",
        f"{REWRITE}test_choices -k spelling",
    ),
    Fault(
        "fx_passes/fusing.py",
        "        check_nan_readers(found.node, scores, self.outside)",
        "        pass",
        "rewrite/test_nan_readers.py",
    ),
    Fault(
        f"{CLOSED}/score_form.py",
        "fill -= form.shift",
        "fill += form.shift",
        MATCHED,
    ),
    Fault(
        f"{CLOSED}/masks.py",
        "left = linear(0.0, [(1.0, band.rest), (1.0, offset_of(axes))])",
        "left = linear(0.0, [(1.0, band.rest), (-1.0, offset_of(axes))])",
        MATCHED,
    ),
    Fault(
        f"{CLOSED}/masks.py",
        "return replace(masks, lengths=linear(1.0, [(1.0, band.rest)]))",
        "return replace(masks, lengths=band.rest)",
        MATCHED,
    ),
    Fault(
        f"{CLOSED}/limits.py",
        "    if call.student.averaged:",
        "    if False:",
        MATCHED,
    ),
    Fault(
        f"{CLOSED}/sums.py",
        "inside = linear(k * shift, [*((k * d, t) for d, t in terms), (c, lse)])",
        "inside = linear(k * shift, [*terms, (c, lse)])",
        MATCHED,
    ),
    Fault(
        "torch_streamkl/program/shifts.py",
        'if y.op == "capture" and y.dtype == FLOAT:',
        'if y.op == "capture" and y.dtype != FLOAT:',
        SHIFTS,
    ),
    Fault(
        "torch_streamkl/program/reductions.py",
        "kept = constant if is_masked or abs(constant) > LARGEST_SHIFT else 0.0",
        "kept = constant if is_masked else 0.0",
        SHIFTS,
    ),
    Fault(
        "torch_streamkl/program/reductions.py",
        "if is_shifted(score, axis):  # the difference would lose the digits of its logarithm",
        "if False:",
        SHIFTS,
    ),
    Fault(
        f"{CLOSED}/row_steps.py",
        "return math.copysign(1.0, c), multiplied([*nodes, const(abs(c))])",
        "return c, multiplied(nodes)",
        SHIFTS,
    ),
    Fault(
        "fx_passes/reading/types.py",
        "return in_type(x.value, dtype)",
        "return const(x.value, INT)",
        SHIFTS,
    ),
    # ---------------------------------------------------------------------------- row programs
    Fault(
        DERIVE,
        "t, level = _softmax(value) * t, level + 1",
        "t, level = _softmax(value) * t, level",
        "operators/test_row_program_rules.py",
    ),
    Fault(
        ADJOINTS,
        'found[x] = build("add", found[x], t) if x in found else t',
        "found[x] = t",
        "operators/test_row_programs.py",
    ),
    Fault(
        DERIVE,
        "t * _softmax(value) if value.kind == LOGSUMEXP else t",
        "t",
        "operators/test_row_programs.py",
    ),
    Fault(
        PROGRAMS,
        "row_sums[slot] *= (peaks[slot] - base).exp()",
        "pass",
        "operators/test_row_programs.py",
    ),
    Fault(
        PROGRAMS,
        "dk[at[0], :, at[2]] += d.mT @ q",
        "dk[at[0], :, at[2]] = d.mT @ q",
        "operators/test_row_programs.py",
    ),
    Fault(
        "torch_streamkl/program/masks.py",
        "min(num_keys, rows.stop + shift + right)",
        "min(num_keys, rows.start + shift + right)",
        "operators/test_row_programs.py",
    ),
    Fault(
        PROGRAMS,
        "dot(problem, i, (batch, rows, outside)).zero_()",
        "pass",
        "operators/test_row_program_rules.py",
    ),
    Fault(
        f"{CLOSED}/formulas.py",
        "if divides_rest_of_one(formula):",
        "if False:",
        "rewrite/test_digits_of_logarithms.py",
    ),
    Fault(
        f"{CLOSED}/row_arithmetic.py",
        "more = _beyond_one(a) if constant(b) is None else None",
        "more = _beyond_one(a)",
        "rewrite/test_digits_of_logarithms.py",
    ),
    Fault(
        f"{CLOSED}/masks.py",
        "return bound if is_at_most(size, key.size) else None",
        "return bound",
        "rewrite/test_score_chain.py -k padding",
    ),
    Fault(
        "fx_passes/views_of_inputs.py",
        'view.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)',
        "pass",
        "rewrite/test_training_around_sums.py",
    ),
    Fault(
        GENERATED,
        'w.line(f"sum{slot} *= tl.math.exp2((peak{slot} - base{slot}) * {LOG2E!r})")',
        "pass",
        "kernels/test_row_program_kernels.py",
        True,
    ),
    Fault(
        GENERATED,
        'w.line(f"h = head * group{dot} + share * members + member")',
        'w.line(f"h = head + share * members + member")',
        "kernels/test_row_program_kernels.py::test_key_heads_of_several_heads",
        True,
    ),
    Fault(
        GENERATED,
        'w.line(f"peak{slot} = new{slot}")',
        "pass",
        "kernels/test_row_program_kernels.py",
        True,
    ),
    Fault(
        LOSSES,
        "x.value: schedule[gradients.get(x, ZERO)]",
        "x.value: schedule[ONE]",
        "operators/test_row_program_sums.py::test_by_blocks",
    ),
    Fault(
        PROGRAMS,
        "rows = slice(at[1].start - chunk.start, at[1].stop - chunk.start)",
        "rows = slice(at[1].start - at[1].start, at[1].stop - at[1].start)",
        "operators/test_row_program_sums.py",
    ),
    Fault(
        MAP_BLOCKS,
        "given = {i: part(x, batch, own) for i, x in logits.items()}",
        "given = {i: part(x, batch, slice(0, own.stop - own.start)) for i, x in logits.items()}",
        "operators/test_row_program_sums.py::test_by_kernels",
        True,
    ),
    Fault(
        MAP_GRADIENTS,
        "_matmul_into(into, each.t(), tokens, rows.start == 0)",
        "_matmul_into(into, each.t(), tokens, True)",
        "operators/test_row_program_sums.py::test_by_kernels",
        True,
    ),
    Fault(
        ROW_CHAINS,
        "if x in self.terms:  # of one shape: else rows meet other rows",
        "if x in self.terms and is_condition:",
        "rewrite/test_row_sums_in_graphs.py",
    ),
    Fault(
        ROW_CHAINS,
        "if not isinstance(value, Tensor) or x in self.after_call or value.requires_grad:",
        "if not isinstance(value, Tensor):",
        "rewrite/test_row_sums_in_graphs.py",
    ),
    Fault(
        ROW_CHAINS,
        "return all(u in allowed for n in learned for u in n.users)",
        "return True",
        "rewrite/test_row_sums_in_graphs.py",
    ),
    Fault(
        ROW_CHAINS,
        'return Term(literally("div", x.expr, self._number_of_rows()), True)',
        "return Term(x.expr, True)",
        "rewrite/test_row_sums_in_graphs.py",
    ),
    # ---------------------------------------------------------------------------------- Hopper
    Fault(
        TURNS,
        "return (grid.num_works + grid.num_programs - 1) // grid.num_programs",
        "return grid.num_works // grid.num_programs",
        "kernels/test_hopper_ranges.py",
    ),
    Fault(
        TURNS,
        "grid.num_programs - 1 - grid.program)",
        "grid.num_programs - grid.program)",
        "kernels/test_hopper_ranges.py",
    ),
    Fault(
        TURNS,
        "return inside // num_heads, first + inside % num_heads",
        "return inside // num_heads, inside % num_heads",
        "kernels/test_hopper_ranges.py",
    ),
    Fault(
        TURNS,
        "    edge = edge // 2 * 2\n",
        "    edge = (edge + 1) // 2 * 2\n",
        "kernels/test_hopper_ranges.py",
    ),
    Fault(
        TURNS,
        "return first_key // STEP, (stop_key - first_key + STEP - 1) // STEP",
        "return first_key // STEP, (stop_key - first_key) // STEP",
        "kernels/test_hopper_ranges.py",
    ),
    Fault(
        "torch_streamkl/runtime/devices.py",
        "return self.capability == (9, 4) if self.is_hip else self.capability >= (8, 0)",
        "return self.capability >= (8, 0)",
        "kernels/test_tiles.py",
    ),
    # ------------------------------------------------------------------------ compiled for a CPU
    Fault(BODY, "d = (term - share) * factor", "d = term * factor", QUERY_TILES),
    Fault(BODY, "row_sum = row_sum + (sink - base).exp()", "pass", QUERY_TILES),
    Fault(
        BODY,
        'for name, compare in (("first", torch.ge), ("stop", torch.lt)):',
        'for name, compare in (("first", torch.ge), ("stop", torch.le)):',
        QUERY_TILES,
    ),
    Fault(
        VOCAB,
        'd = d + _counted(p - (j == inputs["label"]).to(p.dtype), weight)',
        "d = d + _counted(p, weight)",
        QUERY_TILES,
    ),
    # ------------------------------------------------------------------------------- Inductor
    Fault(
        "torch_streamkl/kernels/entries.py",
        'return f"tl.full((), {self._literal(x)}, tl.float32)"',
        'return f"tl.full((), {self._literal(2.0 * x)}, tl.float32)"',
        "rewrite/test_inductor_kernels.py",
        True,
    ),
    Fault(
        "fx_passes/inductor_kernels.py",
        "return {x.name: given.get(x.name, x.default_value) for x in operator._schema.arguments}",
        "return {x.name: given.get(x.name) for x in operator._schema.arguments}",
        "rewrite/test_inductor_kernels.py",
        True,
    ),
    Fault(
        "fx_passes/inductor_lowering.py",
        'all(user.op == "output" for user in node.users)',
        "True",
        "rewrite/test_inductor_kernels.py",
        True,
    ),
    Fault(
        "fx_passes/inductor_lowering.py",
        "    if not is_one_chunk(problem, workspace):\n",
        "    if False:\n",
        "rewrite/test_inductor_kernels.py",
        True,
    ),
    Fault(
        "fx_passes/inductor_kernels.py",
        "    if is_checked and not of_cpp:",
        "    if False:",
        "rewrite/test_inductor_kernels.py",
        True,
    ),
    Fault(
        "fx_passes/passes/loss_sum.py",
        "        factor *= by\n",
        "        factor = by\n",
        "rewrite/test_rewrite_forms.py",
    ),
    Fault(
        "fx_passes/passes/loss_sum.py",
        "(name in QUOTIENTS and node.args[0] is not x)",
        "False",
        "rewrite/test_rewrite_forms.py",
    ),
    Fault(
        "fx_passes/planning/logits_that_stay.py",
        "for side, nodes in stays.items() if not nodes)",
        "for side, nodes in stays.items())",
        "rewrite/test_profitability.py",
    ),
    Fault(
        "fx_passes/planning/row_plan.py",
        "if last is None or mode == RECORDS else last",
        "",
        "rewrite/test_metrics_of_a_loss.py",
    ),
    Fault(
        "fx_passes/run_without_inductor.py",
        "if x.shape == y.shape and x.stride() == y.stride():",
        "if x.shape == y.shape:",
        "rewrite/test_run_without_inductor.py",
    ),
    Fault(
        "fx_passes/run_without_inductor.py",
        "isinstance(y, Tensor) and x.dtype == y.dtype",
        "isinstance(y, Tensor)",
        "rewrite/test_run_without_inductor.py",
    ),
    Fault(
        "fx_passes/run_without_inductor.py",
        "if not _results_are_apart(graph):",
        "if False:",
        "rewrite/test_run_without_inductor.py",
    ),
    Fault(
        "torch_streamkl/runtime/capture.py",
        '[{self._pointer(x.base)}]"',
        '[{x.base.data_ptr()}]"',
        "kernels/test_recorded_descriptors.py",
    ),
    Fault(BODY, 'inputs["mask"] > 0 if', 'inputs["mask"] >= 0 if', QUERY_TILES),
    # ---------------------------------------------------------------------------- distributed
    Fault(
        SHARDS,
        "out.hard_lse - parts[:, STATE_FIELDS + 1].amax(0), math.nan)",
        "out.hard_lse - parts[0, STATE_FIELDS + 1], math.nan)",
        "distributed/test_distributed_linear.py",
    ),
    Fault(
        SHARDS,
        "total = merge(total, other, form)",
        "total = merge(other, other, form)",
        "distributed/test_distributed_linear.py",
    ),
    Fault(
        "torch_streamkl/distributed/vocab_ranges.py",
        "return teacher.start if student.is_empty else student.start",
        "return student.start - teacher.start",
        "distributed/test_distributed_linear.py",
    ),
    Fault(
        SEQUENCE,
        "return [rank, 2 * num_ranks - 1 - rank] if load_balance else [rank]",
        "return [rank, num_ranks + rank] if load_balance else [rank]",
        "distributed/test_distributed_attention.py",
    ),
    Fault(
        SEQUENCE,
        "parts = torch.cat([halves[:, :, :, 0], halves[:, :, :, 1].flip(2)], 2)",
        "parts = torch.cat([halves[:, :, :, 0], halves[:, :, :, 1]], 2)",
        "distributed/test_distributed_attention.py",
    ),
    Fault(
        PLACED,
        "counted = of_labels if counted is None else counted & of_labels",
        "counted = of_labels",
        f"{OPTIONS_OF_RANKS}[means_of_tokens_that_count]",
    ),
    Fault(
        PLACED,
        "else counted.clamp(min=1)",
        "else counted",
        f"{OPTIONS_OF_RANKS}[means_of_tokens_that_count]",
    ),
    Fault(
        PLACED,
        "denominator = tokens[0]",
        "denominator = math.prod(tokens)",
        f"{OPTIONS_OF_RANKS}[means_of_tokens_that_count]",
    ),
    Fault(
        PLACED,
        "    for dim in layout.shared_rows:\n        local = with_summed",
        "    for dim in layout.shared_rows[:1]:\n        local = with_summed",
        f"{OPTIONS_OF_RANKS}[tokens_that_two_mesh_dimensions_share]",
    ),
    Fault(
        PLACED,
        "gradients.append(Partial() if is_part else placements[-1])",
        "gradients.append(placements[-1])",
        f"{OPTIONS_OF_RANKS}[weights_and_masks_of_tokens_on_a_mesh]",
    ),
    Fault(
        PLACED,
        "denominator(None, reduction, tokens)",
        'denominator(None, "mean", tokens)',
        f"{OPTIONS_OF_RANKS}[calls_without_tokens]",
    ),
    Fault(
        SHARDS,
        "0.0, 0.0, 0.0, -math.inf, -math.inf])",
        "0.0, 0.0, 0.0, -math.inf, 0.0])",
        f"{HEADS_OF_RANKS}[shards_without_words]",
    ),
    Fault(
        SHARDS,
        "logits_of(part.student, student[index % num_buffers[0]])",
        "logits_of(part.student, student[0])",
        f"{HEADS_OF_RANKS}[chunks_of_tokens]",
    ),
    Fault(
        "torch_streamkl/distributed/vocab_ranges.py",
        "        return t.start >= student_end\n    if t.is_empty:\n"
        "        return s.start >= teacher_end",
        "        return True\n    if t.is_empty:\n        return True",
        f"{HEADS_OF_RANKS}[ranks_that_disagree]",
    ),
    Fault(
        "torch_streamkl/distributed/context_parallel.py",
        "(keys.lengths - start).clamp(0, stop - start)",
        "keys.lengths.clamp(0, stop - start)",
        f"{MAPS_OF_RANKS}[sequences_that_ranks_share]",
    ),
    Fault(
        "torch_streamkl/distributed/ring.py",
        "after += stop - stop_key",
        "after += 0",
        "distributed/test_distributed_attention.py -k sequences_that_ranks_share",
    ),
    Fault(
        SHARDING,
        "static_argnum=_NEEDS_GRAD, ",
        "static_argnum=_NEEDS_GRAD + 1, ",
        f"{MAPS_OF_RANKS}[batch_and_heads]",
    ),
    Fault(
        SHARDING,
        "x.shape[own] == 1 else Shard(own)",
        "False else Shard(own)",
        f"{MAPS_OF_RANKS}[batch_and_heads]",
    ),
    Fault(
        CALLS,
        "    if tensors[-1] is not None:  # else it is empty",
        "    if False:",
        "distributed/test_rewritten_labels.py",
    ),
    Fault(
        CALLS,
        "labels.redistribute(placements=layout.rows).to_local()",
        "labels.to_local()",
        "distributed/test_rewritten_labels.py",
    ),
    # --------------------------------------------------------------- packed, squares, repeats
    Fault(
        PACKED,
        "blocks = (stop - start + SIZE - 1) // SIZE",
        "blocks = (stop - start) // SIZE",
        "kernels/test_attention_triton_interpreted.py::test_table_of_packed_blocks",
        True,
    ),
    Fault(
        PACKED,
        "(other[None, :] < entry[:, None])",
        "(other[None, :] <= entry[:, None])",
        "kernels/test_attention_triton_interpreted.py::test_table_of_packed_blocks",
        True,
    ),
    Fault(
        FORMS,
        "return factor if factor and terms == square else None",
        "return factor if factor else None",
        "operators/test_squares.py",
    ),
    Fault(
        ROWS,
        "alpha_s * (alpha_t * b + delta * c),",
        "alpha_s * alpha_t * b,",
        "operators/test_squares.py",
        True,
    ),
    Fault(
        ROWS,
        "g = 2.0 * value - h",
        "g = 2.0 * value + h",
        "operators/test_squares.py",
        True,
    ),
    Fault(
        FORWARD,
        "found |= tl.max((value != value).to(tl.int32), 0) << i",
        "found |= tl.max((value != value).to(tl.int32), 0)",
        "kernels/test_attention_triton_interpreted.py::test_only_blocks_with_nan_are_computed_again",
        True,
    ),
    Fault(
        "torch_streamkl/attention/heuristics.py",
        "return 2 * sum(dims) > sum(columns_of(dim) for dim in dims)",
        "return True",
        "kernels/test_hopper_choice.py",
    ),
    Fault(
        "torch_streamkl/attention/heuristics.py",
        "        and not problem.has_key_mask\n",
        "",
        "kernels/test_hopper_choice.py",
    ),
    Fault(
        "torch_streamkl/attention/problem.py",
        "return self.num_heads // self.num_kv_heads if self.num_kv_heads else 1",
        "return self.num_heads // self.num_kv_heads",
        "operators/test_attention_operator.py -k empty",
    ),
    Fault(
        "fx_passes/lowering/captured.py",
        "if not is_traced and not self.build.selections.is_count(span.size, size):",
        "if False:",
        "rewrite/test_unknown_numbers_of_keys.py",
    ),
    Fault(
        "fx_passes/planning/row_plan.py",
        "return self.form.program_of_root(self.outputs.index(output))",
        "return self.form.program",
        "rewrite/test_nan_readers.py",
    ),
    Fault(
        "fx_passes/fx_utils/shape_reads.py",
        'return name.startswith("new_") or name.endswith("_like")',
        'return name.startswith("new_")',
        "rewrite/test_losses_of_2026.py",
    ),
    Fault(
        "torch_streamkl/attention/hopper_tiles.py",
        "return is_alike and has_address and student.data_ptr() == teacher.data_ptr()",
        "return is_alike and has_address",
        "kernels/test_hopper_choice.py",
    ),
    # ------------------------------------------------------------ row programs of a graph
    Fault(
        REPEATED,
        "    if entries.size == 0:",
        "    if False:",
        CHOSEN,
    ),
    Fault(
        REPEATED,
        "isinstance(whole, int) and length <= whole",
        "isinstance(whole, int)",
        CHOSEN,
    ),
    Fault(
        REPEATED,
        "    if places != [dim]:",
        "    if False:",
        CHOSEN,
    ),
    Fault(
        f"{CLOSED}/row_checks.py",
        "if all(x.itemsize >= 4 for x in elements.dtypes):",
        "if all(x.itemsize >= 2 for x in elements.dtypes):",
        "rewrite/test_row_program_rewrites.py::test_scores_of_a_narrow_type_are_not_compared",
    ),
    # ------------------------------------------------------------------- blocks of keys
    Fault(
        "torch_streamkl/rows/tile.py",
        "head = min(-first % size, count)",
        "head = min(first % size, count)",
        "operators/test_row_program_blocks.py",
    ),
    Fault(
        "torch_streamkl/rows/tile.py",
        "blocks = torch.arange(at[2].start, at[2].stop, device=device)",
        "blocks = torch.arange(0, at[2].stop - at[2].start, device=device)",
        "operators/test_row_program_blocks.py",
    ),
    Fault(
        PROGRAMS,
        "accumulate(jacobian.by, value.sum(-1) if jacobian.size else value)",
        "accumulate(jacobian.by, value.mean(-1) if jacobian.size else value)",
        "operators/test_row_program_blocks.py",
    ),
    Fault(
        f"{CLOSED}/row_opening.py",
        "            if axis.size != num_positions(self.keys):",
        "            if False:",
        "rewrite/test_pooled_keys.py::test_is_left_alone",
    ),
    Fault(
        f"{CLOSED}/row_opening.py",
        "if inner and inner.axis == self.parts.get(rest) and inner.kind == kind:",
        "if inner and inner.kind == kind:",
        "rewrite/test_pooled_keys.py::test_forms",
    ),
    Fault(
        f"{CLOSED}/row_opening.py",
        "                        return trailing",
        "                        return leading",
        "rewrite/test_pooled_keys.py::test_forms",
    ),
    Fault(
        f"{CLOSED}/row_program.py",
        "dims = (*of_rows, site.blocks) if site.blocks else of_rows",
        "dims = (site.blocks, *of_rows) if site.blocks else of_rows",
        "rewrite/test_pooled_keys.py::test_forms",
    ),
    Fault(
        "torch_streamkl/rows/triton/lanes.py",
        "ends = (block + 1) * SIZE <= stop",
        "ends = (block + 1) * SIZE < stop",
        "kernels/test_row_program_kernels.py::test_sums_over_blocks_of_keys",
        True,
    ),
    Fault(
        "torch_streamkl/rows/triton/writer.py",
        'block = f"(n64 + first_key) // {self.program.reductions[i].size}"',
        'block = f"n64 // {self.program.reductions[i].size}"',
        "operators/test_row_program_maps.py::test_lm_heads",
        True,
    ),
    # ------------------------------------------------------------------- columns and maps
    Fault(
        "torch_streamkl/rows/tile.py",
        "return torch.where(inside, ids - at[2].start, at[2].stop - at[2].start).long()",
        "return torch.where(inside, ids, at[2].stop - at[2].start).long()",
        "operators/test_row_programs.py operators/test_row_program_rules.py",
    ),
    Fault(
        "torch_streamkl/rows/triton/materialized.py",
        "out.scatter_add_(-1, places, values.expand(places.shape))",
        "out.scatter_(-1, places, values.expand(places.shape))",
        "operators/test_row_program_maps.py",
        True,
    ),
    Fault(
        "torch_streamkl/rows/triton/writer.py",
        'self.line(f"written_stop = ({stop} + 15) // 16 * 16")',
        'self.line(f"written_stop = {stop} // 16 * 16")',
        "operators/test_row_program_maps.py",
        True,
    ),
    # ------------------------------------------------------------------ rules of the reader
    Fault(
        f"{RULES}/reductions.py",
        "return product(const(1.0), *(size_of(a.size or 1) for d in dims for a in x.dims[d]))",
        "return product(const(1.0), *(size_of(a.size or 1) for d in dims[:1] for a in x.dims[d]))",
        READ.format("other_losses"),
    ),
    Fault(
        f"{RULES}/reductions.py",
        "return found.map(lambda e: scaled(-1.0, e))",
        "return found",
        READ.format("norms"),
    ),
    Fault(
        f"{RULES}/reductions.py",
        "count = linear(-float(correction), [(1.0, count_of(x, dims))])",
        "count = linear(0.0, [(1.0, count_of(x, dims))])",
        READ.format("norms"),
    ),
    Fault(
        f"{RULES}/pointwise.py",
        'return _sum(call, -1.0, "other", "self")',
        "return _sum(call, -1.0)",
        READ.format("functions"),
    ),
    Fault(
        f"{RULES}/selections.py",
        "return choose(nonnegative(at), at, linear(0.0, [(1.0, at), (1.0, size_of(size))]))",
        "return at",
        READ.format("entries_by_index"),
    ),
    Fault(
        f"{RULES}/selections.py",
        "if known is not None and reader.writes.version(known[0].mask) == known[1]:",
        "if known is not None:",
        "rewrite/test_reading.py -k mask_that_was_written",
    ),
    Fault(
        f"{RULES}/selections.py",
        "return top is not None and top[1] == d",
        "return top is not None",
        READ.format("ids_of_another_dimension"),
    ),
    Fault(
        f"{RULES}/conditions.py",
        'return same if op == "eq" else negation(same)',
        "return same",
        READ.format("conditions"),
    ),
    Fault(
        f"{RULES}/losses.py",
        "return scaled(beta, found) if is_huber else found",
        "return found",
        READ.format("other_losses"),
    ),
    Fault(
        f"{RULES}/losses.py",
        'missing = detached(subtracted(function("clamp_min", norm.expr, eps), norm.expr))',
        'missing = subtracted(function("clamp_min", norm.expr, eps), norm.expr)',
        READ.format("norms"),
    ),
    Fault(
        f"{RULES}/losses.py",
        "linear(0.0, [(1.0 - smoothing, a), (1.0, product(share, b))]), found, other",
        "linear(0.0, [(1.0, a), (1.0, product(share, b))]), found, other",
        READ.format("of_labels"),
    ),
    Fault(
        f"{RULES}/matmuls.py",
        'elif y.op == "div" and not y.args[1].axes & along:',
        'elif y.op == "div":',
        READ.format("with_tensor_scales"),
    ),
    Fault(
        "fx_passes/reading/writes.py",
        "self._versions[storage] = self._versions.get(storage, 0) + 1",
        "self._versions[storage] = 0",
        "rewrite/test_reading.py::test_equals_eager",
    ),
    Fault(
        "fx_passes/reading/reader.py",
        "if x.expr.flows and not self.records(node):",
        "if False:",
        READ.format("without_gradient"),
    ),
    Fault(
        "fx_passes/reading/types.py",
        "if kind == FLOAT and x.dtype == FLOAT and is_narrower(to, than):",
        "if False:",
        "rewrite/test_casts.py::test_rounding_is_kept",
    ),
    # ------------------------------------------------------------------------------- capture
    Fault(
        "fx_passes/capture/region.py",
        "return name in OPERAND_VIEWS and sum(isinstance(x, (Tensor, tuple)) for x in given) == 1",
        "return name in OPERAND_VIEWS",
        "rewrite/test_region.py",
    ),
    Fault(
        "fx_passes/capture/region.py",
        "storages = {storage_of(n) for n in inside} - {storage_of(n) for n in leaves} - {None}",
        "storages = {None} - {None}",
        "rewrite/test_region.py",
    ),
    # ------------------------------------------------------------------------------- dtensors
    Fault(
        "fx_passes/dtensors/agreement.py",
        "digest = hashlib.sha256(repr((self.inputs, list(rewrite))).encode()).hexdigest()",
        "digest = hashlib.sha256(repr(self.inputs).encode()).hexdigest()",
        "distributed/test_agreement.py",
    ),
    Fault(
        "fx_passes/dtensors/agreement.py",
        'sorted({site for message in everyone.values() for site in message["refused"]})',
        "sorted(refused)",
        "distributed/test_agreement.py",
    ),
    Fault(
        "fx_passes/dtensors/unshard.py",
        'if method == "to_local" and not all(p.is_replicate() for p in given.placements):',
        "if False:",
        "distributed/test_agreement.py",
    ),
    Fault(
        "fx_passes/dtensors/unshard.py",
        "not x.requires_grad or gradients is None or tuple(gradients) == tuple(x.placements)",
        "True",
        "distributed/test_rewritten_dtensors.py -k own_words",
    ),
    Fault(
        "fx_passes/dtensors/agreement.py",
        "(node.name, _sizes(x), str(x.placements))",
        "(node.name, _sizes(x))",
        "distributed/test_agreement.py",
    ),
    Fault(
        "fx_passes/dtensors/alike.py",
        "            and not draws_random(node)\n",
        "",
        "distributed/test_numbers_of_a_rank.py",
    ),
    Fault(
        "fx_passes/dtensors/alike.py",
        "self.constants += [_described(n) for n in node.graph.nodes if n in made]",
        "pass",
        "distributed/test_numbers_of_a_rank.py",
    ),
    Fault(
        "fx_passes/dtensors/alike.py",
        "if _symbols(example(number)) & self.own:",
        "if False:",
        "distributed/test_numbers_of_a_rank.py",
    ),
    Fault(
        "fx_passes/dtensors/alike.py",
        "and all(_symbols(example(a)) <= self.sizes for a in _numbers_of(node))",
        "",
        "distributed/test_numbers_of_a_rank.py",
    ),
    Fault(
        "fx_passes/dtensors/rewriting.py",
        'new = agreement.refusals(["put back"], new)',
        "new = dict(new)",
        "distributed/test_rewritten_attention_dtensors.py",
    ),
    Fault(
        "fx_passes/pipeline.py",
        "given = replace(given, options=replace(options, row_programs=False))",
        "pass",
        "distributed/test_rewritten_dtensors.py distributed/test_rewritten_attention_dtensors.py",
    ),
    Fault(
        "fx_passes/pipeline.py",
        "if not has_dtensors(given.owner.graph):  # where nodes",
        "if True:  # where nodes",
        "distributed/test_rewritten_dtensors.py distributed/test_rewritten_attention_dtensors.py",
    ),
    Fault(
        "fx_passes/closed_forms/row_maxima.py",
        "largest = subtracted(reduced(MAX, axis, scores), reduced(LOGSUMEXP, axis, scores))",
        "largest = reduced(MAX, axis, scores)",
        "rewrite/test_metrics_of_a_loss.py",
    ),
    Fault(
        "fx_passes/fx_utils/dead_code.py",
        "is_known and not has_effect(node)",
        "is_known",
        "rewrite/test_metrics_of_a_loss.py",
    ),
    # -------------------------------------------------------------------------------- report
    Fault(
        "fx_passes/reporting/score_tensors.py",
        "found[i].num_bytes += share + (rest if i == owners[0] else 0)",
        "found[i].num_bytes += num_bytes(node)",
        "report/test_memory.py -k what_it_saves",
    ),
    Fault(
        "fx_passes/reporting/comparisons.py",
        "skipped = [site for site in sites if site.skipped]",
        "skipped = [site for site in sites if False]",
        "report/test_strict.py -k accepts_what_is_skipped",
    ),
    Fault(
        "fx_passes/reporting/formats.py",
        "return {k: _plain(v) for k, v in x.items() if k not in _UNUSED}",
        "return {k: _plain(v) for k, v in x.items()}",
        "report/test_report_text.py -k json",
    ),
)
