"""Holds the portable Triton kernels of `attention_kl` and their launchers.

`launches.py` has the entry points, `forward.py` and `backward.py` the kernels, `plans.py` the
cached launch arguments, and `head_mean*.py` the kernels of a head-averaged teacher.
"""
