"""Joins products that stand after each other: ``stack([x @ w.T, y @ w.T])`` is one product.

Of two products that share an operand, a condition chooses one: it may as well choose the operand
that they do not share, ``where(c, x . w, y . w) = where(c, x, y) . w``. So views of a batch are
rows of one product. What is done to both alike, such as a bias of the keys, stays around it.
"""

from __future__ import annotations

from torch_streamkl.program.canonical import choose, linear, product, terms_of
from torch_streamkl.program.functions import quotient
from torch_streamkl.program.graph import CONTRACT, FLOAT, Axis, Node, intern


def joined_products(condition: Node, a: Node, b: Node) -> Node | None:
    """Returns ``where(condition, a, b)`` with the condition inside of products, if it can be."""
    if a is b:
        return a
    if a.op == "where" != b.op:
        inside = joined_products(a.args[0], a.args[1], a.args[2])
        return None if inside is None else joined_products(condition, inside, b)
    if b.op == "where":
        inside = joined_products(b.args[0], b.args[1], b.args[2])
        return None if inside is None else joined_products(condition, a, inside)
    if a.op == b.op == CONTRACT:
        return _of_shared_operand(condition, a, b)
    if a.op == b.op == "linear":
        return _of_sums(condition, a, b)
    if a.op != b.op or a.op not in ("product", "div") or len(a.args) != len(b.args):
        return None
    parts = [_part(condition, x, y) for x, y in zip(a.args, b.args, strict=True)]
    if any(x is None for x in parts):
        return None
    found = [x for x in parts if x is not None]
    return product(*found) if a.op == "product" else quotient(*found)


def _part(condition: Node, a: Node, b: Node) -> Node | None:
    """A factor: products are joined, per-row values are chosen."""
    if CONTRACT in (a.op, b.op):
        return joined_products(condition, a, b)
    return choose(condition, a, b)


def _of_sums(condition: Node, a: Node, b: Node) -> Node | None:
    """A sum of a product and of what is added to both."""
    (first, terms), (second, others) = terms_of(a), terms_of(b)
    shared = [term for term in terms if term in others]
    left, right = ([t for t in x if t not in shared] for x in (terms, others))
    if first != second or len(left) != 1 or len(right) != 1 or left[0][0] != right[0][0]:
        return None
    inside = joined_products(condition, left[0][1], right[0][1])
    return None if inside is None else linear(first, [*shared, (left[0][0], inside)])


def _of_shared_operand(condition: Node, a: Node, b: Node) -> Node | None:
    """A product whose other operand is chosen.

    The condition may not vary along what the shared operand alone has: the chosen one would be as
    large as the scores.
    """
    if a.value != b.value:
        return None
    for i in (0, 1):
        for j in (0, 1):
            shared, other, x, y = a.args[i], b.args[j], a.args[1 - i], b.args[1 - j]
            if shared is other and condition.axes & shared.axes <= x.axes | y.axes:
                chosen = choose(condition, x, y)
                axes = (shared.axes | chosen.axes) - frozenset[Axis](a.value)
                return intern(CONTRACT, (chosen, shared), a.value, FLOAT, axes)
    return None
