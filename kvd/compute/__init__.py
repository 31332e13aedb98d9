"""Arithmetic: arrays in and out, merging, and the optimizers. No sockets, no clocks, no decisions.

``tensors`` turns whatever users bring into host arrays and back, ``arrays`` sums the arrays of several devices,
``merge`` adds the contributions of the workers in rank order, ``optimizers`` applies the result to the weights.

``kernels`` is their arithmetic in NumPy; ``jit`` is the same as loops for numba, of which ``compiled`` knows those that
are ready.

Everything here is plain IEEE arithmetic (+ − × ÷ √, comparisons and casts) element by element in a stated dtype, so
that two servers, or a compiled kernel and this one, get the same bits.
"""
