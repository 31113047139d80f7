"""Random programs: losses as people write them, with anything that can be changed changed.

`meanness` is the probability of a change at each edge: a detach, a no_grad, a view, a cast, an
operation that has no rule. Programs without any are plain losses, which must fuse.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from tests.fuzz.masks import Masks
from tests.fuzz.steps import (
    AGREEMENTS,
    ANY_TENSOR,
    DISTRIBUTION_STEPS,
    ELEMENT_STEPS,
    ELEMENTS,
    FILLS,
    GUARDS,
    IN_BLOCKS,
    INDEXED,
    INDEXERS,
    LOSSES,
    MAP_ELEMENTS,
    MAP_ROW_STEPS,
    MAXIMA,
    MEAN_BLOCKS,
    MEAN_SCORE_STEPS,
    NORMS,
    OF_BLOCKS,
    OF_CHOSEN,
    OF_HEADS,
    OF_IDS,
    OF_KEYS,
    OF_LARGEST,
    OF_PLACES,
    OPERAND_STEPS,
    PLAIN_ELEMENT_STEPS,
    PLAIN_ROW_STEPS,
    PROGRAM_ELEMENTS,
    RENORMALISED,
    ROW_STEPS,
    ROW_SUMS,
    SCORE_STEPS,
    WRITES,
)
from tests.fuzz.tree import ALL_BELOW, OPERATION, Node, Program, node_of

PROGRAMS = 0.3  # of elements, those that no divergence has
LARGEST = 0.1  # of sums that no divergence has, those at keys that a top-k names
LABELS = 0.05  # of losses, those with labels that an argmax gives
METRICS = 0.15  # and those with maxima, or places of maxima, beside them
BLOCKS = 0.1  # and those over blocks of keys
MEANNESS = (0.0, 0.01, 0.02, 0.04, 0.08, 0.16)
LEARNED = ("q", "k", "v", "h", "w", "ls", "tau", "b", "sink", "hs", "rw", "kw", "c", "z")
TEACHERS = ("qt", "kt", "ht", "wt")


class Grammar:
    """Draws one program; every method returns a node of the kind that it is named for."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.mean = self.draw.choice(MEANNESS)
        self.is_map = self.draw.random() < 0.65
        self._sizes()
        symbolic = self.draw.random() < 0.5
        q, k = ("q", "k") if self.is_map else ("h", "w")
        self.n = f"{q}.size(-2)" if symbolic else str(self.shapes[q][-2])
        self.m = f"{k}.size(-2)" if symbolic else str(self.shapes[k][-2])
        self.masks = Masks(self.draw, self.n, self.m, self.is_map, self.mean)
        self.mask = self.masks.mask()
        self.usual_fill = self.draw.choice(FILLS[:4])
        self.known: dict[str, list[Node]] = {}

    # ------------------------------------------------------------------------------- shapes
    def _sizes(self) -> None:
        draw = self.draw
        batch, heads, n, m, d = (
            draw.choice((2, 2, 2, 3, 1)),
            draw.choice((2, 2, 4, 6, 3, 1)),
            draw.choice((5, 5, 7, 4, 4, 5, 1)),
            draw.choice((7, 5, 5, 6, 6, 7, 7, 7, 1)),
            4,
        )
        if draw.random() < 0.02:
            n = 0
        mean = self.mean > 0.05
        teacher_heads = draw.choice((1, 2, 3, 4, 6)) if mean and draw.random() < 0.15 else heads
        teacher_batch = 1 if mean and draw.random() < 0.1 else batch
        self.heads = {"k": heads, "kt": teacher_heads}
        groups = {"k": heads, "kt": teacher_heads}
        for k, count in self.heads.items():
            if draw.random() < 0.2:
                groups[k] = draw.choice([g for g in (1, 2, 3) if count % g == 0])
        self.groups = groups
        vocab = draw.choice((9, 8, 12))
        teacher_vocab = draw.choice((vocab - 2, vocab + 3)) if draw.random() < 0.1 else vocab
        self.vocab = (vocab, vocab if self.is_map else teacher_vocab)
        self.resized = draw.choice("st")
        tokens = draw.choice((6, 6, 5, 6, 5, 1, vocab))
        self.shapes: dict[str, tuple[int, ...]] = {
            "q": (batch, heads, n, d),
            "k": (batch, groups["k"], m, d),
            "v": (batch, heads, m, d),
            "qt": (teacher_batch, teacher_heads, n, d + 2),
            "kt": (teacher_batch, groups["kt"], m, d + 2),
            "h": (tokens, 5),
            "w": (vocab, 5),
            "ht": (tokens, 3),
            "wt": (teacher_vocab, 3),
            "c": (vocab,),
            "ls": (),
            "tau": (),
            "b": (n, m) if self.is_map else (tokens, vocab),
            "hs": (heads,),
            "rw": (n,) if self.is_map else (tokens,),
            "kw": (m,) if self.is_map else (vocab,),
            "keep": (batch, m),
            "rows": (batch, n),
            "y": (tokens,),
        }

    # -------------------------------------------------------------------------------- edges
    def edge(self, node: Node, steps: Sequence[str] = ()) -> Node:
        """Sometimes a change of a node; sometimes without gradient."""
        while self.draw.random() < self.mean:
            choice = self.draw.random()
            if choice < 0.5 and steps:
                node = self.step(node, self.draw.choice(steps))
            elif choice < 0.65:
                node = node_of(node.kind, "{0}.detach()", node)
            elif choice < 0.8:
                how = self.draw.choice((OPERATION, ALL_BELOW))
                node = Node(node.kind, node.code, node.args, how, node.then)
            elif choice < 0.85 and self.known.get("scores"):
                target = self.draw.choice((*TEACHERS, "rw", "ls", "y"))
                write = "{0}[{0} > 4] = 0" if target == "y" else "{0}.mul_(0.5)"
                node = Node(node.kind, "{0}", (node,), then=write.format(target))
            else:
                node = node_of(node.kind, self.draw.choice(ANY_TENSOR), node)
        return node

    def step(self, node: Node, code: str) -> Node:
        """One step of a list, with masks and fills of the program in it."""
        args = [node]
        if "{mask}" in code:
            fresh = self.draw.random() < 0.03 + self.mean
            args.append(self.masks.mask() if fresh else self.mask)
            code = code.replace("{mask}", "{1}")
        if "{mask_bias}" in code:
            fill = self.draw.choice(("-inf", "-1e4", "-1e4"))
            bias = f"torch.zeros({self.n}, {self.m}).masked_fill(~{{0}}, {fill})"
            args.append(node_of("bias", bias, self.mask))
            code = code.replace("{mask_bias}", "{1}")
        code = code.replace("{fill}", self.fill())
        code = code.replace("{n}", self.n).replace("{m}", self.m)
        return Node(node.kind, code, tuple(args))

    def fill(self) -> str:
        """What masked entries get: mostly one value in all of a program."""
        if self.draw.random() > 2 * self.mean:
            return self.usual_fill
        return self.draw.choice(FILLS)

    def remember(self, what: str, make: Callable[[], Node]) -> Node:
        """A node that was made before, the same written again, or a new one."""
        known = self.known.setdefault(what, [])
        if known and self.draw.random() < 0.75:
            node = self.draw.choice(known)
            return _again(node) if self.draw.random() < 0.35 else node
        known.append(make())
        return known[-1]

    # ------------------------------------------------------------------------------- scores
    def operand(self, name: str) -> Node:
        node = self.edge(Node("tensor", name), OPERAND_STEPS)
        count, groups = self.heads.get(name, 0), self.groups.get(name, 0)
        if count != groups:
            each = count // groups
            ways = [f"{{0}}.repeat_interleave({each}, 1)"] * 3
            ways.append(f"{{0}}[:, :, None].expand(-1, -1, {each}, -1, -1).flatten(1, 2)")
            if self.draw.random() < 3 * self.mean:
                ways = [
                    f"{{0}}.repeat(1, {each}, 1, 1)",
                    f"{{0}}.unsqueeze(1).expand(-1, {each}, -1, -1, -1).flatten(1, 2)",
                ]
                uneven = [each * groups - groups + 1, *([1] * (groups - 1))]
                ways.append(
                    f"{{0}}.repeat_interleave(torch.tensor({uneven}), 1, output_size={count})"
                )
            node = node_of("tensor", self.draw.choice(ways), node)
            node = self.edge(node, OPERAND_STEPS)
        return node

    def product(self, side: str) -> Node:
        names = (
            (("q", "k") if self.is_map else ("h", "w"))
            if side == "s"
            else (("qt", "kt") if self.is_map else ("ht", "wt"))
        )
        a, b = map(self.operand, names)
        if self.is_map:
            ways = [
                "({0} @ {1}.mT)",
                "torch.matmul({0}, {1}.transpose(-1, -2))",
                "torch.einsum('bhqd,bhkd->bhqk', {0}, {1})",
                "({1} @ {0}.mT).transpose(-1, -2)",
                "torch.einsum('...qd,...kd->...qk', {0}, {1})",
                "torch.bmm({0}.flatten(0, 1), {1}.flatten(0, 1).mT).unflatten(0, {0}.shape[:2])",
                "torch.baddbmm(torch.zeros(1, 1, 1, dtype={0}.dtype), {0}.flatten(0, 1), "
                "{1}.flatten(0, 1).mT, beta=0, alpha=0.5).unflatten(0, {0}.shape[:2])",
            ]
        else:
            ways = [
                "({0} @ {1}.T)",
                "F.linear({0}, {1})",
                "torch.mm({0}, {1}.t())",
                "({1} @ {0}.T).T",
            ]
            if self.draw.random() < 0.2 + self.mean and side == "s":
                ways = ["F.linear({0}, {1}, c)", "torch.addmm(c, {0}, {1}.T)", "({0} @ {1}.T + c)"]
        if self.draw.random() < 0.3 * self.mean:
            ways = ["torch.ops.misleading.matmul({0}, {1}.mT)"]
        return self.edge(node_of("scores", self.draw.choice(ways), a, b))

    def scores(self, side: str) -> Node:
        return self.remember("scores " + side, lambda: self._scores(side))

    def _scores(self, side: str) -> Node:
        if not hasattr(self, "common"):
            self.common = [self.draw.choice(SCORE_STEPS) for _ in range(self.draw.randint(0, 3))]
            self.write = self.draw.choice(WRITES) if self.draw.random() < 0.06 else ""
        steps = list(self.common)
        if self.draw.random() < 0.02 + self.mean:
            steps.insert(self.draw.randint(0, len(steps)), self.draw.choice(SCORE_STEPS))
        node = self.product(side)
        if self.vocab[0] != self.vocab[1] and side == self.resized:
            missing = (self.vocab[1] - self.vocab[0]) * (1 if side == "s" else -1)
            ways = [f"F.pad({{0}}, (0, {missing}), value=-1e4)"]
            ways.append(f"F.pad({{0}}, (0, {missing}), value=-inf)")
            if missing < 0:
                ways += [f"{{0}}[..., :{missing}]"] * 3
            node = node_of("scores", self.draw.choice(ways), node)
        for code in steps:
            node = self.edge(self.step(node, code), MEAN_SCORE_STEPS)
        if self.write or self.draw.random() < 0.2 * self.mean:
            node = Node(
                "scores", "({0} * 1)", (node,), then=self.write or self.draw.choice(WRITES)
            )
        return node

    # ------------------------------------------------------------------------ distributions
    def normaliser(self, scores: Node) -> Node:
        node = node_of("total", "{0}.logsumexp(-1, keepdim=True)", scores)
        if self.draw.random() < self.mean:
            moved = self.draw.choice(("{0}.transpose(0, 1)", "({0} + 1)", "{0}.mT", "{0}.flip(1)"))
            node = node_of(
                "total", "{0}.logsumexp(-1, keepdim=True)", node_of("scores", moved, scores)
            )
        return self.edge(node)

    def exponentials(self, scores: Node) -> Node:
        ways = ("{0}.amax(-1, keepdim=True)", "{0}.max(-1, keepdim=True).values")
        way = self.draw.choice((*ways, "{0}.max(dim=-1, keepdim=True)[0]", ways[0]))
        largest = self.edge(node_of("total", way, scores))
        shifted = self.edge(node_of("scores", "({0} - {1})", scores, largest))
        e = self.edge(node_of("exponentials", "{0}.exp()", shifted))
        total = self.edge(node_of("total", "{0}.sum(-1, keepdim=True)", e))
        return node_of("probabilities", "({0} / {1})", e, total)

    def logs(self, side: str) -> Node:
        return self.remember("logs " + side, lambda: self._logs(side))

    def _logs(self, side: str) -> Node:
        scores, kind = self.scores(side), self.draw.random()
        if kind < 0.6:
            dim = "-1" if self.draw.random() > 0.3 * self.mean else "-2"
            node = node_of("logs", f"{{0}}.log_softmax({dim})", scores)
        elif kind < 0.75 and not _may_lose_rows(scores):
            node = node_of("logs", "({0} - {1})", scores, self.normaliser(scores))
        elif kind < 0.9:
            node = node_of("logs", "{0}.log()", self.probabilities(side))
        else:
            node = node_of("logs", "F.log_softmax({0}, dim=-1)", scores)
        return self.edge(node, DISTRIBUTION_STEPS)

    def probabilities(self, side: str) -> Node:
        return self.remember("probabilities " + side, lambda: self._probabilities(side))

    def _probabilities(self, side: str) -> Node:
        kind = self.draw.random()
        if kind < 0.62:
            node = node_of("probabilities", "{0}.softmax(-1)", self.scores(side))
        elif kind < 0.8 and self.known.get("logs " + side):
            node = node_of("probabilities", "{0}.exp()", self.logs(side))
        elif kind < 0.92:
            node = self.exponentials(self.scores(side))
        elif kind < 0.98 or not self.mean:
            scores = self.scores(side)
            shifted = node_of("scores", "({0} - {1})", scores, self.normaliser(scores))
            if _may_lose_rows(scores):
                shifted = node_of("logs", "{0}.log_softmax(-1)", scores)
            node = node_of("probabilities", "{0}.exp()", shifted)
        else:
            node = node_of(
                "probabilities", "torch.ops.misleading.softmax({0}, -1)", self.scores(side)
            )
        guards = self.known.setdefault("guards", [])
        if not guards:
            guard = self.draw.choice(GUARDS) if self.draw.random() < 0.15 else "{0}"
            guards.append(Node("probabilities", guard))
        if guards[0].code != "{0}" and self.draw.random() > self.mean:
            node = node_of("probabilities", guards[0].code, node)
        return self.edge(node, DISTRIBUTION_STEPS)

    # ------------------------------------------------------------------- elements and rows
    def elements(self) -> Node:
        if self.draw.random() < PROGRAMS:
            return self.edge(self.program_elements(), ELEMENT_STEPS)
        code, operands = self.draw.choice(ELEMENTS)
        swap = self.draw.random() < 0.25
        s, t = sides = ("t", "s") if swap else ("s", "t")
        p, logs = self.probabilities, self.logs
        if code == "gap":
            gap = self.edge(node_of("gap", "({0} - {1})", logs(t), logs(s)))
            node = node_of("elements", "({0} * {1})", p(t), gap)
        elif code == "terms":
            one = self.edge(node_of("elements", "({0} * {1})", p(t), logs(t)), ELEMENT_STEPS)
            two = self.edge(node_of("elements", "({0} * {1})", p(t), logs(s)), ELEMENT_STEPS)
            node = node_of("elements", "({0} - {1})", one, two)
        elif code == "mixture":
            node = self._mixture(p(s), p(t), logs(s), logs(t))
        else:
            made = {"l": logs, "p": p}
            given = (made[x[0]](sides["st".index(x[1])]) for x in operands.split())
            node = node_of("elements", code, *given)
        if self.draw.random() < 0.1:
            node = self.step(node, self.draw.choice(PLAIN_ELEMENT_STEPS))
        return self.edge(node, ELEMENT_STEPS)

    def program_elements(self) -> Node:
        """What no divergence has: weights of keys, renormalised maps, powers, bounds, errors."""
        s, t = ("t", "s") if self.draw.random() < 0.25 else ("s", "t")
        p, r = self.probabilities(s), self.probabilities(t)
        choices = (*PROGRAM_ELEMENTS, *(MAP_ELEMENTS if self.is_map else ()))
        kind = self.draw.choice(choices)
        if kind == "renormalised":
            code = self.draw.choice(RENORMALISED)
            p, r = (self.edge(self.step(x, code), DISTRIBUTION_STEPS) for x in (p, r))
            eps = self.draw.choice(("1e-3", "1e-6"))
            logs = [node_of("logs", f"({{0}} + {eps}).log()", x) for x in (r, p)]
            gap = self.edge(node_of("gap", "({0} - {1})", logs[0], logs[1]))
            return node_of("elements", "({0} * {1})", r, gap)
        if kind == "weighted":
            code = "F.kl_div({0}, {1}, reduction='none')"
            return self.step(node_of("elements", code, self.logs(s), r), self.draw.choice(OF_KEYS))
        if kind == "entropy":
            return node_of("elements", "(-{0} * {1})", p, self.logs(s))
        if kind == "of scores":
            return node_of("elements", "({0} - {1}).square()", self.scores(s), self.scores(t))
        return node_of("elements", kind, p, r)

    def program_rows(self) -> Node:
        """Sums of one distribution, entries of its rows, norms of a difference."""
        side = self.draw.choice("sst")
        kind = self.draw.random()
        if kind < LARGEST:
            what = self.draw.choice((self.logs, self.probabilities, self.scores))
            pair = (what("s"), what("t"))
            entries = self.edge(Node("entries", self.draw.choice(OF_LARGEST), pair))
            return self.edge(node_of("rows", self.draw.choice(OF_CHOSEN), entries), ROW_STEPS)
        if kind < 0.4 and self.is_map:
            scores = self.step(self.scores("s"), self.draw.choice(INDEXERS))
            other = self.step(self.probabilities("t"), self.draw.choice(OF_HEADS))
            pair = (self.edge(scores), self.edge(other))
            return self.edge(Node("rows", self.draw.choice(INDEXED), pair), ROW_STEPS)
        if kind < 0.2:
            what = self.draw.choice((self.logs, self.probabilities, self.scores))
            return self.edge(self.step(what(side), self.draw.choice(OF_IDS)), ROW_STEPS)
        if kind < 0.4:
            index = self.draw.choice(("y[:, None]", "y.unsqueeze(-1)"))
            entry = self.edge(node_of("rows", f"{{0}}.gather(-1, {index})", self.logs(side)))
            node = node_of("rows", "{0}.squeeze(-1)", entry)
            return self.edge(node, ROW_STEPS)
        if kind < 0.7:
            total = self.edge(node_of("rows", "{0}.logsumexp(-1)", self.scores(side)))
            return self.edge(node_of("rows", "{0}.square()", total), ROW_STEPS)
        if kind > 1 - BLOCKS:
            return self.block_rows()
        code = self.draw.choice(NORMS)
        pair = (self.probabilities("s"), self.probabilities("t"))
        return self.edge(Node("rows", code, pair), ROW_STEPS)

    def block_rows(self) -> Node:
        """Sums over blocks of keys of both sides, which are compared."""
        keys = self.shapes["k" if self.is_map else "w"][-2]
        sizes = [n for n in range(1, keys + 1) if keys % n == 0]
        size = self.draw.choice(sizes)
        pair = []
        for side in "st":
            what = self.scores if self.draw.random() < self.mean else self.probabilities
            other = self.draw.random() < 2 * self.mean
            code = self.draw.choice(MEAN_BLOCKS if other else IN_BLOCKS)
            pair.append(self.edge(self.step(what(side), code.replace("{size}", str(size)))))
        return self.edge(Node("rows", self.draw.choice(OF_BLOCKS), tuple(pair)), ROW_STEPS)

    def _mixture(self, p: Node, r: Node, ls: Node, lt: Node) -> Node:
        if self.draw.random() < 0.4:
            stack = self.edge(node_of("stack", "torch.stack([{0}, {1}])", ls, lt))
            middle = self.edge(node_of("logs", "({0}.logsumexp(0) - 0.6931471805599453)", stack))
        elif self.draw.random() < 0.5:
            code = "(torch.logaddexp({0}, {1}) - 0.6931471805599453)"
            middle = self.edge(node_of("logs", code, ls, lt))
        else:
            half = self.edge(node_of("mixture", "(0.5 * ({0} + {1}))", p, r))
            middle = self.edge(node_of("logs", "{0}.log()", half))
        one = node_of("elements", "({0} * ({1} - {2}))", p, ls, middle)
        two = node_of("elements", "({0} * ({1} - {2}))", r, lt, middle)
        return self.draw.choice((node_of("elements", "({0} + {1})", one, two), one, two))

    def rows(self) -> Node:
        if self.draw.random() < PROGRAMS / 3:
            return self.program_rows()
        if self.draw.random() < 0.1 and not _may_lose_rows(self.scores("s")):
            s, p = self.scores("s"), self.probabilities("t")
            total = self.edge(node_of("rows", "{0}.logsumexp(-1)", s))
            inside = self.edge(node_of("elements", "({0} * {1})", p, s), ELEMENT_STEPS)
            mean = self.edge(node_of("rows", "{0}.sum(-1)", inside))
            return self.edge(node_of("rows", "({0} - {1})", total, mean), ROW_STEPS)
        if self.draw.random() < 0.06 + 0.3 * self.mean:
            p, lt, ls = self.probabilities("t"), self.logs("t"), self.logs("s")
            how = self.draw.choice(ROW_SUMS)
            sums = []
            for logs in (lt, ls):
                inside = self.edge(node_of("elements", "({0} * {1})", p, logs), ELEMENT_STEPS)
                one = self.edge(node_of("rows", how, inside), ROW_STEPS)
                if self.draw.random() < 0.3:
                    one = node_of(
                        "rows", f"({{0}} / {self.draw.choice((self.n, self.m, '2'))})", one
                    )
                sums.append(one)
            return self.edge(Node("rows", "({0} - {1})", tuple(sums)), ROW_STEPS)
        if self.draw.random() < 0.02:
            gap = node_of(
                "elements", "({0} - {1})", self.probabilities("t"), self.probabilities("s")
            )
            return self.edge(node_of("rows", "{0}.norm(p=1, dim=-1)", gap), ROW_STEPS)
        node = node_of("rows", self.draw.choice(ROW_SUMS), self.elements())
        if self.draw.random() < 0.15:
            steps = (*PLAIN_ROW_STEPS, *(MAP_ROW_STEPS if self.is_map else ()))
            node = self.step(node, self.draw.choice(steps))
        return self.edge(node, ROW_STEPS)

    def loss(self) -> Node:
        if self.draw.random() < PROGRAMS / 5:
            what = self.probabilities if self.draw.random() < 0.7 else self.scores
            code = f"F.mse_loss({{0}}, {{1}}, reduction='{self.draw.choice(('mean', 'sum'))}')"
            return self.edge(node_of("loss", code, what("s"), what("t")))
        kind = self.draw.random()
        if kind < 0.3:
            reduction = self.draw.choice(("batchmean", "batchmean", "sum", "mean"))
            log = self.draw.random() < 0.3
            target = self.logs("t") if log else self.probabilities("t")
            code = f"F.kl_div({{0}}, {{1}}, reduction='{reduction}', log_target={log})"
            return self.edge(node_of("loss", code, self.logs("s"), target))
        if kind < 0.36:
            flat = "" if not self.is_map else ".flatten(0, -2)"
            code = f"F.cross_entropy({{0}}{flat}, {{1}}{flat})"
            return self.edge(node_of("loss", code, self.scores("s"), self.probabilities("t")))
        return self.edge(self.step(node_of("loss", "{0}", self.rows()), self.draw.choice(LOSSES)))

    # ---------------------------------------------------------------------------- the whole
    def result(self) -> Node:
        node = self.loss()
        if self.draw.random() < 0.15:
            code = self.draw.choice(("({0} + {1})", "({0} - 0.5 * {1})", "({0} * {1})"))
            node = node_of("loss", code, node, self.loss())
        if not self.is_map and self.draw.random() < 0.2:
            hard = node_of("loss", "F.cross_entropy({0}, y)", self.scores("s"))
            code = self.draw.choice(("({0} + {1})", "({0} + 0.5 * {1})", "({0} * {1})"))
            order = (
                (node, self.edge(hard)) if self.draw.random() < 0.7 else (self.edge(hard), node)
            )
            node = Node("loss", code, order)
        if self.draw.random() < LABELS:
            node = node_of("loss", "({0} + 0.5 * {1})", node, self.hard_labels())
        kind = self.draw.random()
        if kind < 0.2:
            return node_of("results", "({0}, {1})", node, self.other_use())
        if kind < 0.2 + METRICS:
            return node_of("results", "({0}, {1})", node, self.metric())
        return node

    def metric(self) -> Node:
        """The largest elements of rows or their places, without gradient."""
        what = self.draw.choice((self.scores, self.scores, self.logs, self.probabilities))
        if self.draw.random() < 0.5:
            node = node_of("metric", self.draw.choice(MAXIMA), self.nearly(what("s")))
        else:
            pair = self.nearly(what("s")), self.nearly(what("t"))
            node = node_of("metric", self.draw.choice(AGREEMENTS), *pair)
        if self.draw.random() < self.mean:
            return self.edge(node)
        return Node(node.kind, node.code, node.args, self.draw.choice((OPERATION, ALL_BELOW)))

    def hard_labels(self) -> Node:
        """A loss of one side at the largest entries of the other, or of itself."""
        what = self.draw.choice((self.scores, self.scores, self.probabilities))
        other = self.edge(self.nearly(what(self.draw.choice("tts"))))
        return self.edge(node_of("loss", self.draw.choice(OF_PLACES), self.scores("s"), other))

    def nearly(self, node: Node) -> Node:
        """Sometimes scaled or biased, of which the order is that of rounded numbers."""
        steps = ("({0} / 0.7)", "({0} * 0.3)", "({0} + kw)", "{0}.float()")
        return self.step(node, self.draw.choice(steps)) if self.draw.random() < 0.3 else node

    def other_use(self) -> Node:
        side = self.draw.choice("sst")
        p = self.edge(self.probabilities(side), ("{0}.to(v.dtype)", "{0}.flip(0)"))
        choice = self.draw.random()
        if self.is_map and choice < 0.6:
            return self.edge(node_of("values", "({0} @ v)", p))
        if choice < 0.75:
            return p
        if choice < 0.9:
            return node_of("total", "{0}.logsumexp(-1)", self.scores(side))
        return node_of("values", "{0}.square().sum()", p)

    def program(self) -> Program:
        tree = self.result()
        draw = self.draw
        learned = [n for n in LEARNED if draw.random() < 0.8]
        teachers = [n for n in TEACHERS if draw.random() < 0.25]
        loop = ""
        if draw.random() < 0.08:
            loop = draw.choice(
                (
                    "for q, qt in zip(q.chunk(2, 2), qt.chunk(2, 2))",
                    "for q, qt, k, kt in zip(q.split(1), qt.split(1), k.split(1), kt.split(1))",
                )
                if self.is_map
                else (
                    "for h, ht in zip(h.chunk(3), ht.chunk(3))",
                    "for h, ht in zip(h.split(2), ht.split(2))",
                )
            )
        text = " ".join(n.then for n in tree.walk())
        names = (*TEACHERS, "rw", "ls", "y")
        cloned = {n for n in names if f"{n}.mul_" in text or f"{n}[" in text}
        dtypes = (torch.float32,) * 8 + (torch.bfloat16,) * 4 + (torch.float64,) * 88
        return Program(
            tree,
            self.shapes,
            frozenset([*learned, *teachers]),
            dynamic=draw.random() < 0.2,
            dtype=draw.choice(dtypes),
            loop=loop,
            cloned=frozenset(cloned if draw.random() < 0.8 else ()),
        )


def _may_lose_rows(scores: Node) -> bool:
    """Whether the lowest number may be all that a row has.

    A log-sum-exp written by hand loses log(N) next to it in rounding: eager's probabilities sum to
    N then. log_softmax does not, and neither does what replaces both.
    """
    return any("finfo" in node.code for node in scores.walk())


def _again(node: Node) -> Node:
    """The same written a second time, down to its leaves; what it shares it shares again."""
    known: dict[int, Node] = {}
    for old in node.walk():
        args = tuple(known[id(a)] for a in old.args)
        known[id(old)] = Node(old.kind, old.code, args, old.no_grad)
    return known[id(node)]
