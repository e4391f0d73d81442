"""Layer-layer similarity: streaming cosine, minibatch CKA, and the share of outliers."""

from raptor.similarity.cosine import CoordinateStatistics, measure_similarity

__all__ = ["CoordinateStatistics", "measure_similarity"]
