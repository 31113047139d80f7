"""The portable Triton kernels of `attention_kl`, their launchers; imported when needed."""
