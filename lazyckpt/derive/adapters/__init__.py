"""Adapters of models (LoRA, DoRA, LoHa, LoKr), as the weights that they make of a base model's.

`naming`: what the tensors of an adapter are, by the names of PEFT, kohya and diffusers. `matching`: which tensors of
the base they change. `scaling`: by how much. `deltas`: the expressions. `applying`: the view of the changed model.
"""
