"""Represents what is computed as one expression graph, and what is known of it.

`graph.py` has nodes and axes, `operations.py` the table of operations, `identities.py` and
`canonical.py` their identities and normal form, `derive.py` derivatives, `divergences.py` the
named divergences, `masks.py` masks, and `steps.py` the form that implementations run.
"""

from torch_streamkl.program import identities as identities  # graph.py makes nodes with them
