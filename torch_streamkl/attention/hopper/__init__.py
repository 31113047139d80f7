"""Holds the kernels of `attention_kl` for compute capability 9.0, written in Gluon.

`launches.py` launches `forward.py` and `backward.py`, whose roles have files of their own. They
are imported when they are first needed.
"""
