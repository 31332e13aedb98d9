"""The side that computes gradients: models bound to devices, and what feeds the store with them."""

from kvd.errors import GradientAnomaly, InputMismatch
from kvd.parallel.batch import DataBatch, DataDesc
from kvd.parallel.convolution import Conv2D
from kvd.parallel.device import Device
from kvd.parallel.executor import Executor, GradReq, Model, ModelDescription
from kvd.parallel.feed import Feed
from kvd.parallel.group import DataParallelExecutorGroup
from kvd.parallel.layer import Layer
from kvd.parallel.layers import Dense, Dropout, Embedding, Flatten, ReLU, Tanh
from kvd.parallel.losses import Loss, MeanSquaredError, SoftmaxCrossEntropy
from kvd.parallel.metric import MSE, Accuracy, Composite, CrossEntropy, Metric, Perplexity, TopK
from kvd.parallel.normalization import BatchNorm
from kvd.parallel.sequential import Sequential
from kvd.parallel.trainer import DataParallelTrainer, ModelUpdate, WorkerUpdate

__all__ = [
    "DataParallelExecutorGroup",
    "DataDesc",
    "DataBatch",
    "Device",
    "Model",
    "ModelDescription",
    "Executor",
    "GradReq",
    "Sequential",
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
    "Feed",
    "InputMismatch",
    "GradientAnomaly",
]
