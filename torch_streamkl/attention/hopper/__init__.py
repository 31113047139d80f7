"""Holds the kernels of `attention_kl` for compute capability 9.0, written in Gluon.

`launches.py` chooses among them: `forward.py`, `backward.py`, their persistent variants, and
`wide_forward.py`. They are imported when they are first needed.
"""
