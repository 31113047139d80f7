"""What runs kernels: the one launch function, and the streams beside the current one."""
