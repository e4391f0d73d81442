"""The Raptor surrogate: the teacher with its L blocks replaced by k tied ones."""

from raptor.surrogate.surrogate import block_parameters, make_surrogate, shared_blocks, surrogate_spec

__all__ = ["block_parameters", "make_surrogate", "shared_blocks", "surrogate_spec"]
