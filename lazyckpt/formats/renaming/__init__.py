"""Tensors under the names, and in the pieces, of another family of models. Nothing is copied: new placements only."""
