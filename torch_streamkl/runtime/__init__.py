"""What runs kernels: the one launch function, and the streams next to the current one."""
