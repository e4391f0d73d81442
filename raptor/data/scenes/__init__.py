"""The built-in images: drawn by the project, with classes, masks and depth maps."""
