"""Reads the user's graph into programs (torch_streamkl/program).

NOTE [Reading a graph]
``reader.read_trace(trace)`` reads what capture/retrace.py traced, ``reader.read(graph, records)``
any pre-dispatch ATen graph with fake values as ``meta["val"]``. Of the `Reading` that comes back:

- ``arrays[node]`` is an `arrays.Array` for every tensor: an expression, and for each dimension the
  axes that it runs through (outermost first; none: size 1). Free axes are named ("dim", n) where
  they are those of a tensor's n-th dimension from the last. Several results are a tuple, in which
  None is one without a rule; each ``getitem`` of it has an array of its own.
- A captured tensor is ``capture(Source(node, version, grad_flows), at=positions)``. ``node`` is
  one of the graph that was read (`Trace.outer` has the user's), the first of equal ones.
  ``version`` is the number of writes to its memory before. Rows that a mask selects are read at
  captures of `positions.Positions`, columns of ``mask.nonzero()``.
- ``reasons[node]`` says why a result was captured: no rule, a call that its rule does not read, a
  limit. Inputs have no reason.
- ``reads_products`` are nodes computed from matmuls of the graph. A captured tensor among them
  exists in memory: an operator that reads it saves nothing.
- ``observers`` are operations that tell NaN and infinity, or roundings, from numbers: comparisons,
  clamps, ``isnan``; "folded" are those that became a number, as 0 times scores. The identities of
  the normal form are those of real numbers. A matcher that drops or replaces what an observer
  reads has to know that it sees nothing else than in eager code.
- ``sizes`` has the extents of symbolic sizes.

Whether gradient flows is a property of captured tensors (``Node.flows`` of an expression), and was
held against autograd's record of every node. Values are real numbers; a cast to a narrower type of
what is made of products is a "round" node, which the matcher accepts or refuses. Positions are
exact: what a type cannot hold is rounded or wraps around.

NOTE [How a rule reads an operation]
A rule is ``@rule(aten.foo.default)`` in the file of its kind in rules/: it gets a `registry.Call`
and returns an array, or raises `NoRule` with a reason. Overloads that write in place are
registered with it (writes.py follows what they write).

- A view, slice, gather, pad or concatenation is a function of arrays.py. Each substitutes index
  expressions for axes; selected keys keep the normaliser of all keys.
- Where tensors meet, `Call.pointwise` gives their expressions in the same axes. A pointwise
  operation is then made by canonical.py (`linear`, `product`, `quotient`, `exponential`,
  `logarithm`, `choose`, `compare`, `function`).
- Shape, type, gradient and limits of the result are not the rule's business: `Reader.fitted`.
- What is to run as it is written is made by `graph.apply` instead.
- A mask is ``choose(condition, score, fill)``. Masks of -inf are one form however they are added;
  other fills stay in the score until it is read.

Axes that are free in an expression have names of this process: a program that leaves it is made of
the row, key and head axes of `graph` (rows/program.py).
"""
