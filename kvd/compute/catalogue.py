"""Catalogue of kernels by optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvd.compute.accumulated_kernels import AdaDeltaKernel, FtrlKernel
from kvd.compute.kernels import AdagradKernel, AdamKernel, Kernel, RMSPropKernel, SGDKernel, shared_scalars
from kvd.compute.moment_kernels import AdamaxKernel, FTMLKernel, NadamKernel
from kvd.compute.outer_kernels import DelayedNesterovKernel
from kvd.compute.sign_kernels import SignumKernel
from kvd.compute.slice_kernels import LAMBKernel, LARSKernel, SGLDKernel, SliceKernel
from kvd.errors import ConfigError
from kvd.optimizer import (
    FTML,
    LAMB,
    LARS,
    SGD,
    SGLD,
    AdaDelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    DelayedNesterov,
    Ftrl,
    Nadam,
    Optimizer,
    RMSProp,
    Signum,
)

_KERNELS: dict[type[Optimizer], Callable[[Any], Kernel | SliceKernel]] = {
    SGD: SGDKernel,
    Adam: AdamKernel,
    AdamW: AdamKernel,
    Adagrad: AdagradKernel,
    RMSProp: RMSPropKernel,
    AdaDelta: AdaDeltaKernel,
    Adamax: AdamaxKernel,
    Nadam: NadamKernel,
    Ftrl: FtrlKernel,
    Signum: SignumKernel,
    FTML: FTMLKernel,
    LARS: LARSKernel,
    LAMB: LAMBKernel,
    SGLD: SGLDKernel,
    DelayedNesterov: DelayedNesterovKernel,
}


def kernel_of(optimizer: Optimizer) -> Kernel | SliceKernel:
    """Return the arithmetic of an optimizer: a built-in kernel, or what the ``kernel()`` of its class returns.

    It is a SliceKernel for those built-in ones that say ``is_by_slice``.

    Raises:
        ConfigError: the class is not built in and has no ``kernel()``.
    """
    # First its own word: a custom class may be derived from a built-in one.
    own = getattr(optimizer, "kernel", None)
    if own is not None:
        kernel: Kernel = own()
        return kernel
    for cls in type(optimizer).__mro__:
        make = _KERNELS.get(cls)
        if make is not None:
            return make(optimizer)
    raise ConfigError(f"{type(optimizer).__name__} has no kernel(): it says nothing to calculate")


def is_built_in(kernel: Kernel | SliceKernel) -> bool:
    """Return whether a kernel is built in: stateless between updates, and free of errors within one."""
    # By the very type: a kernel derived from a built-in one may do anything.
    return type(kernel) in _KERNELS.values()


def scalars(optimizer: Optimizer, step: int) -> tuple[float, ...]:
    """Return the numbers of update ``step``, counted from 1: rescale_grad, clip_gradient, wd, then those of the kernel.

    Without ``clip_gradient`` the second is infinite; with a decoupled decay the third is 0. They are plain Python
    floats: together with the contributions they determine the update.
    """
    return (*shared_scalars(optimizer), *kernel_of(optimizer).scalars(step))
