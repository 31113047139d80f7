"""Recognises closed forms: from a program to the arguments of `attention_kl` or `linear_kl`.

NOTE [How a closed form is recognised]
A program is an expression of `torch_streamkl.program` in canonical form. It does not say what the
user called, so there is nothing to search for but the form itself.

1. `rows.py` finds the matched losses: the outermost sums over keys. What stands around them are
   per-row values, and stay in the user's graph.
2. `score_form.py` reads each score: a product, what it is multiplied with, tanh, biases, masks.
3. `divergence.py` replaces log-softmaxes by variables, and judges the rest in two worlds: at keys
   that the masks allow, and at those that they remove. `heads.py` reads averages over heads.
4. `axes.py` says which axis is which dimension of the operator's tensors, `masks.py` what a mask
   is to the operator.
5. `limits.py` says what the operators do not compute. It is a step of its own: everything before
   it is about what the program means.

Tests make the program again from the arguments alone, and compare both: this holds the matcher
from accepting what it should not (tests/support/closed_forms.py).
"""
