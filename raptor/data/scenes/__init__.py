"""The built-in images: drawn by the project, with classes, masks and depth maps."""

from raptor.data.scenes.data import DrawnScenes
from raptor.data.scenes.render import SceneBatch, Scenes

__all__ = ["DrawnScenes", "SceneBatch", "Scenes"]
