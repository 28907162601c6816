"""Indexes of views whose tensors are computed from those of other views: expressions by names, without reading."""
