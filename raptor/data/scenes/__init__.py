"""The built-in images: drawn by the project, with classes, masks and depth maps."""

from raptor.data.scenes.drawn import DrawnScenes, SceneFrames
from raptor.data.scenes.render import SceneBatch, Scenes

__all__ = ["DrawnScenes", "SceneBatch", "SceneFrames", "Scenes"]
