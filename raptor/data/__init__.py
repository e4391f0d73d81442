"""Images by name: `open_data("folder")`, `scenes`, `cifar10`, `hf/NAME:split`, `wds/PATTERN`, zip archives."""

from raptor.data.by_name import open_data, open_dense
from raptor.data.chosen import ChosenData
from raptor.data.dense import DenseData
from raptor.data.image_file import BadImage
from raptor.data.images import ImageData
from raptor.data.memory import InMemory
from raptor.data.preprocess import Preprocess
from raptor.data.stream import Batch, ImageStream, TrainStream, iterate

__all__ = [
    "BadImage",
    "Batch",
    "ChosenData",
    "DenseData",
    "ImageData",
    "ImageStream",
    "InMemory",
    "Preprocess",
    "TrainStream",
    "iterate",
    "open_data",
    "open_dense",
]
