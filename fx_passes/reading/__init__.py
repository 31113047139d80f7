"""Reads the user's graph into programs (torch_streamkl/program).

NOTE [How a rule reads an operation]
A tensor is an `arrays.Array`: an expression, and for each dimension the axes that it runs through.

- An input, and whatever has no rule, is captured: ``graph.capture(Source(node, version,
  grad_flows), dtype, at=[position of each dimension])`` with new axes (`arrays.new_dims`).
- A view, slice, gather, pad or concatenation is a function of arrays.py. Each substitutes index
  expressions for axes; selected keys keep the normaliser of all keys.
- Where tensors meet, `arrays.met` gives their expressions in the same axes. A pointwise operation
  is then made by canonical.py (`linear`, `product`, `quotient`, `exponential`, `logarithm`,
  `choose`, `compare`, `function`); a matmul is `arrays.matmul`, a reduction `arrays.over`.
- What is to run as it is written is made by `graph.apply` instead; `reductions.canonical` gives
  its normal form. The identities of the normal form are those of real numbers, not of NaN.
- A mask is ``choose(condition, score, fill)``. Masks of -inf are one form however they are added;
  other fills stay in the score until it is read. `masks.structure_of` takes conditions apart.
- `reductions.detached` is detach and no_grad: it is pushed to the captured tensors. A narrowing
  cast is `reductions.rounded`. A write is a `choose` of positions, and a new version.
- Symbolic sizes are interned by one `sizes.SymbolicSizes` for each trace.

Axes that are free in an expression have names of this process: a program that leaves it is made of
the row, key and head axes of `graph` (rows/program.py).
"""
