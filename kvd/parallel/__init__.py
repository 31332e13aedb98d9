"""What computes gradients: models bound to devices, the pipeline to the store, and the training loop.

``from kvd.parallel import *`` gives `TorchModel` and `JaxModel` only where torch and JAX are installed. Elsewhere,
using one of them raises an ImportError that says how to install its library.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from kvd.errors import GradientAnomaly, InputMismatch
from kvd.parallel.allreduce.blocks import MissingBlock
from kvd.parallel.allreduce.parameter import AllReduceParameter
from kvd.parallel.batch import DataBatch, DataDesc
from kvd.parallel.clipping import clip_by_global_norm
from kvd.parallel.device import Device
from kvd.parallel.group.group import DataParallelExecutorGroup
from kvd.parallel.group.monitor import Monitor, MonitorEntry
from kvd.parallel.group.monitoring import Metric
from kvd.parallel.group.pipeline import GradientPipeline
from kvd.parallel.models.model import BindOptions, Executor, GradReq, Model, ModelDescription, ReadsRows
from kvd.parallel.models.numpy.convolution import Conv2D
from kvd.parallel.models.numpy.layer import Layer
from kvd.parallel.models.numpy.layers import Dense, Dropout, Embedding, Flatten, ReLU, Tanh
from kvd.parallel.models.numpy.losses import Loss, MeanSquaredError, SoftmaxCrossEntropy
from kvd.parallel.models.numpy.normalization import BatchNorm
from kvd.parallel.models.numpy.sequential import Sequential
from kvd.parallel.training.checkpoint import Checkpoint
from kvd.parallel.training.fit import fit
from kvd.parallel.training.metric import MSE, Accuracy, Composite, CrossEntropy, Perplexity, TopK
from kvd.parallel.training.run import EpochReport
from kvd.parallel.training.trainer import DataParallelTrainer, ModelUpdate, WorkerUpdate

if TYPE_CHECKING:
    from kvd.parallel.models.jax.model import JaxModel
    from kvd.parallel.models.torch.model import TorchModel

__all__ = [
    "DataParallelExecutorGroup",
    "DataDesc",
    "DataBatch",
    "Device",
    "Model",
    "ModelDescription",
    "Executor",
    "ReadsRows",
    "GradReq",
    "BindOptions",
    "Sequential",
    "TorchModel",
    "JaxModel",
    "Layer",
    "Dense",
    "Conv2D",
    "ReLU",
    "Tanh",
    "Flatten",
    "Dropout",
    "BatchNorm",
    "Embedding",
    "Loss",
    "SoftmaxCrossEntropy",
    "MeanSquaredError",
    "Monitor",
    "MonitorEntry",
    "Metric",
    "Accuracy",
    "TopK",
    "CrossEntropy",
    "MSE",
    "Perplexity",
    "Composite",
    "DataParallelTrainer",
    "WorkerUpdate",
    "ModelUpdate",
    "AllReduceParameter",
    "GradientPipeline",
    "clip_by_global_norm",
    "fit",
    "EpochReport",
    "Checkpoint",
    "InputMismatch",
    "GradientAnomaly",
    "MissingBlock",
]

_LAZY = {
    "TorchModel": ("torch", "kvd.parallel.models.torch.model"),
    "JaxModel": ("jax", "kvd.parallel.models.jax.model"),
}


def _is_installed(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ValueError:  # it was put into sys.modules by hand, so it can be imported
        return True


for _model, (_library, _) in _LAZY.items():
    if not _is_installed(_library):
        __all__.remove(_model)  # import * fetches every name of the list


def __getattr__(name: str) -> Any:
    """Imports the models of libraries that kvd does not need when they are first used."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    extra, module = _LAZY[name]
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != extra:
            raise
        raise ImportError(f"{name} needs {extra}: pip install {extra}") from error
