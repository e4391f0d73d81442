"""raptor train-teacher: see raptor.teachers."""

from raptor.teachers import train_teacher

__all__ = ["train_teacher"]
