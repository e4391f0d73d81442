"""Triton kernels, each behind an operator of torch. A file `*_triton.py` is imported only where its kernels run."""
